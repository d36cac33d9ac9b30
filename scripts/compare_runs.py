"""Says which figures moved between two runs of a script, and which of their conditions differ.

    python scripts/bench_decode.py > a.txt
    python scripts/bench_decode.py --draft-tokens 3 > b.txt
    python scripts/compare_runs.py a.txt b.txt

What it does: reads the JSON line that ends each file (every script here ends its output with one),
sets their figures side by side, rows matched by what names them (model, phase, context, draft
tokens and the like), and lists every condition that is not the same: versions, device, clocks,
flags, mesh, sizes, commit. A figure that moved while nothing else did is noise or a change in the
code; one that moved with a condition is explained by it, or not comparable.

Figures within --tolerance of each other are left out. Prints two tables, then one JSON line. Exit
status: 0, or 1 if a file cannot be read.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("model", "phase", "kind", "context", "draft_tokens", "batch", "devices", "name", "bytes")
"""Fields of a row that say what it measured, not what came out."""

NOT_FIGURES = ("rows", "conditions", "token_ids")

LONGEST_LIST = 16
"""Counts by depth are figures, one by one; token ids are not."""


def read_run(path: Path) -> dict[str, Any]:
    """The object on the last line of a file that is one.

    Raises:
        ValueError: there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                run = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: its last JSON line is broken ({error})") from None
            rows, conditions = run.get("rows", []), run.get("conditions", {})
            is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
            if not is_list or not isinstance(conditions, dict):
                raise ValueError(f"{path}: its last JSON line is not of a script here")
            return run
    raise ValueError(f"{path}: no line of JSON; give it a script's whole output")


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects and short lists, under dotted names."""
    if isinstance(value, list) and len(value) <= LONGEST_LIST:
        value = dict(enumerate(value)) or None
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def figures(run: dict[str, Any]) -> dict[str, float]:
    """Every number that was measured, by what it is of."""
    out: dict[str, float] = {}
    own = {key: value for key, value in run.items() if key not in NOT_FIGURES}
    for name, value in flatten(own):
        if _is_number(value):
            out[name] = value
    for row in run.get("rows", []):
        label = " ".join(f"{name}={row[name]}" for name in NAMES if name in row)
        for name, value in flatten({k: v for k, v in row.items() if k not in NAMES}):
            if _is_number(value):
                out[f"{label}: {name}"] = value
    return out


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not math.isfinite, which refuses integers beyond the floats.
    return is_number and -math.inf < value < math.inf


def compare(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """The figures that moved, those in one run only, and the conditions that differ."""
    ours, theirs = figures(a), figures(b)
    moved = []
    for name in ours.keys() & theirs.keys():
        x, y = ours[name], theirs[name]
        if abs(y - x) > tolerance * max(abs(x), abs(y)):
            moved.append({"figure": name, "a": x, "b": y, "b_over_a": y / x if x else None})
    moved.sort(key=lambda row: (-_distance(row["b_over_a"]), row["figure"]))
    left, right = (dict(flatten(run.get("conditions", {}))) for run in (a, b))
    names = [*left, *(name for name in right if name not in left)]
    missing = "(not recorded)"
    differing = [
        {"condition": name, "a": left.get(name, missing), "b": right.get(name, missing)}
        for name in names
        if left.get(name, missing) != right.get(name, missing)
    ]
    return {
        "moved": moved,
        "same": len(ours.keys() & theirs.keys()) - len(moved),
        "only_in_a": sorted(ours.keys() - theirs.keys()),
        "only_in_b": sorted(theirs.keys() - ours.keys()),
        "conditions_differ": differing,
    }


def _distance(ratio: float | None) -> float:
    """How far a figure moved, either way; to or from zero is farthest."""
    return abs(math.log(abs(ratio))) if ratio else math.inf


def show(found: dict[str, Any]) -> None:
    """The tables."""
    print(f"figures that moved: {len(found['moved'])}; the same: {found['same']}")
    for row in found["moved"]:
        ratio = "" if row["b_over_a"] is None else f"  x{row['b_over_a']:.3f}"
        print(f"  {row['figure']}: {row['a']:g} -> {row['b']:g}{ratio}")
    for side in ("a", "b"):
        if only := found[f"only_in_{side}"]:
            print(f"only in {side}: {len(only)} figures, such as {only[0]}")
    print(f"conditions that differ: {len(found['conditions_differ'])}")
    for row in found["conditions_differ"]:
        print(f"  {row['condition']}: {row['a']!r} -> {row['b']!r}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A", help="a script's output")
    parser.add_argument("b", type=Path, metavar="B", help="another's")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="as a share (default: %(default)s)"
    )
    args = parser.parse_args()
    if not 0 <= args.tolerance < 1:
        parser.error(f"--tolerance is {args.tolerance}, expected a share from 0 to 1")
    try:
        found = compare(read_run(args.a), read_run(args.b), args.tolerance)
    except ValueError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 1
    show(found)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
