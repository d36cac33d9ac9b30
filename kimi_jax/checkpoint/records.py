"""JSON records beside arrays: written whole or not at all, and compared field by field."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replaces the file in one step, so that a reader finds the old record or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def as_json(value: Any, name: str) -> Any:
    """As it is once written and read: a tuple is a list.

    Raises:
        TypeError: the value is not JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is not JSON: {error}") from None


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What differs, "name: theirs, ours" each."""
    absent = object()
    out = []
    for name in sorted(theirs.keys() | ours.keys()):
        both = [values.get(name, absent) for values in (theirs, ours)]
        if both[0] != both[1]:
            there, here = ("none" if value is absent else repr(value) for value in both)
            out.append(f"{name}: {there}, {here}")
    return out


def fields(value: Any, path: str = "") -> dict[str, Any]:
    """The values of nested JSON objects by dotted path."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    out: dict[str, Any] = {}
    for name, inner in value.items():
        out |= fields(inner, f"{path}.{name}" if path else name)
    return out


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says, not too long: orbax's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '':.500}"
