"""What training data is made from: conversations and texts, read from files in common spellings.

- `.jsonl`: rows `{"id", "conversations": [{"role", "content", ...}], "tools"}`, or with `messages`,
  or with ShareGPT's `from` and `value`; or rows `{"id", "text"}`. A row without an id gets its
  file's name and line.
- any other suffix: the file is one text.

It renders nothing and knows no model; what a row holds beyond this is passed on as it is.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kimi_jax.text.messages import ChatError, normalize_messages, normalize_tools
from spec.training.samples import Report

SUFFIXES = (".jsonl", ".md", ".py", ".txt")
"""What is read of a folder."""

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class SourceError(ValueError):
    """An input that cannot be read; names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the layout of `kimi_jax.text.messages`, and the tools declared to the model."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A document, or a conversation as its template has rendered it."""

    id: str
    text: str


Source = Conversation | Text


def files_in(path: str | Path) -> list[tuple[str, Path]]:
    """A file, or all of a folder that have one of `SUFFIXES`, each with the name its rows carry.

    Raises:
        SourceError: there is no such file or folder, or nothing to read in it.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not found:
            raise SourceError(f"{path}: no file in it ends in {', '.join(SUFFIXES)}")
        top = path.resolve().name
        return [(f"{top}/{p.relative_to(path).as_posix()}", p) for p in found]
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    return [(path.name, path)]


def read_sources(files: Iterable[tuple[str, Path]], report: Report) -> tuple[list[Source], str]:
    """All conversations and texts, and a digest of the files they are from.

    Raises:
        SourceError: a file cannot be read.
    """
    sources: list[Source] = []
    seen: set[str] = set()
    digest = hashlib.sha256()
    for name, path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        for source in _sources(name, path.suffix, data, report):
            if source.id in seen:
                report.leave_out("id used before", source.id)
                continue
            seen.add(source.id)
            sources.append(source)
    return sources, digest.hexdigest()


def _sources(name: str, suffix: str, data: bytes, report: Report) -> Iterator[Source]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        report.leave_out("file not UTF-8", name)
        return
    if suffix != ".jsonl":
        if text.strip():
            yield Text(id=name, text=text)
        else:
            report.leave_out("empty text", name)
        return
    # Not `splitlines`: JSON text may hold other line ends than the newline.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            yield _row(line, where)
        except _BadRow as error:
            reason, detail = error.args
            report.leave_out(reason, f"{where}: {detail}" if detail else where)


class _BadRow(Exception):
    """A reason to count by, and what else there is to say."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)


def _row(line: str, where: str) -> Source:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRow("not JSON", str(error)) from None
    if not isinstance(row, dict):
        raise _BadRow("not a JSON object")
    id = row.get("id", where)
    if not isinstance(id, str | int) or isinstance(id, bool) or id == "":
        raise _BadRow("id is neither text nor a number", repr(id))
    given = [name for name in ("conversations", "messages", "text") if row.get(name) is not None]
    if len(given) != 1:
        reason = "neither conversations nor messages nor text"
        raise _BadRow("several of conversations, messages and text" if given else reason)
    content = row[given[0]]
    if given == ["text"]:
        if not isinstance(content, str) or not content.strip():
            raise _BadRow("empty text" if content == "" or isinstance(content, str) else "not text")
        return Text(id=str(id), text=content)
    try:
        if isinstance(content, list):
            content = [_message(message) for message in content]
        messages = normalize_messages(content)
        tools = normalize_tools(row.get("tools"))
    except ChatError as error:
        raise _BadRow("not a conversation", str(error)) from None
    return Conversation(id=str(id), messages=messages, tools=tools)


def _message(message: Any) -> Any:
    """ShareGPT's spelling as the common one; anything else as it is."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": role, "content": message.get("value", rest.get("content")), **rest}
