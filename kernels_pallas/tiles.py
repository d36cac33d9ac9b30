"""Tile sizes of the kernels for each chip: the classes, the data in tiles.json, who gets which.

A chip is named by its compute capability: 8.0 A100, 9.0 H100 and H200, 10.0 B200, 12.0 RTX PRO
6000. One that is not listed takes the newest listed one before it. A block may use 99 KiB of shared
memory on 8.6, 8.9 and 12.0, so the rows of 8.0 and 12.0 stay below that. The sizes compile without
spilling registers; which are fastest was not measured: `scripts/tune_tiles.py` does, and rewrites
the row of the GPU it finds.

A kernel's tiles are a field of `ChipTiles`, of a NamedTuple of integers or a tuple of such; adding
one is adding it there and to every row of tiles.json.
"""

import contextlib
import json
import os
import re
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from kernels_pallas.dispatch import Target

TILES_FILE = Path(__file__).with_name("tiles.json")

MOST_WARPS = 32
"""1024 threads, the most a block may have."""

MOST_STAGES = 8

LEAST = {"rows": 16, "keys": 16, "columns": 16, "inputs": 32}
"""A tensor core's tile has 16 rows and columns; 32 inputs of an INT4 weight share a scale."""


class TilesError(ValueError):
    """Tile data that no kernel can take; the message names file, chip, field and value."""


class MlaTiles(NamedTuple):
    """One block of the attention kernel: `rows` query rows against `keys` slots at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    num_splits: int
    """Blocks that share one group of query rows, at most; a power of two."""
    least_chunk: int
    """Slots a split takes at least: each leaves 4 C bytes a query row for the merge to read."""


class ExpertTiles(NamedTuple):
    """One block of an expert product: `columns` outputs, `inputs` contracted at a time."""

    columns: int
    inputs: int
    num_warps: int
    num_stages: int
    rows: int = 0
    """Sorted rows of one expert; 0 where every expert runs over all tokens of the call."""


class LinearTiles(NamedTuple):
    """One block of a product of few rows: `columns` outputs, `inputs` contracted at a time.

    Inputs are given for 2-byte values and at most 16 rows.
    """

    columns: int
    inputs: int
    num_warps: int
    num_stages: int


class ChipTiles(NamedTuple):
    """Every kernel's tiles on one chip."""

    mla_16_bits: tuple[MlaTiles, ...]
    """For a bfloat16 cache: the first that holds a call's query rows, else the last.

    Two stages need less shared memory than one, which stores a tile once for each of its products.
    """
    mla_32_bits: tuple[MlaTiles, ...]
    gate_up: ExpertTiles
    down: ExpertTiles
    gate_up_batch: ExpertTiles
    """From `BATCH_TOKENS` on, still not sorted: an accumulator has a row for every token, and what
    is right for a few spills registers."""
    down_batch: ExpertTiles
    gate_up_sorted: ExpertTiles
    """For many tokens; both sorted kernels share the first one's rows."""
    down_sorted: ExpertTiles
    norm_linear: LinearTiles
    absorb: LinearTiles
    """Of the queries' absorption."""


BATCH_TOKENS = 17
"""Accumulators of fewer tokens have 16 rows, a tensor core's least."""


def loads(text: str, where: str = "tiles.json") -> dict[tuple[int, int], ChipTiles]:
    """The rows of a tiles file, by compute capability, ascending.

    Raises:
        TilesError: not JSON, or values no kernel can take.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TilesError(f"{where}: not readable as JSON ({error})") from None
    if not isinstance(data, dict) or not data:
        raise TilesError(f"{where}: expected an object with a row for each compute capability")
    chips = {}
    for name, row in data.items():
        if not re.fullmatch(r"[1-9]\d*\.\d", name):
            raise TilesError(f"{where}: chip {name!r}, expected a compute capability such as '9.0'")
        major, minor = name.split(".")
        chips[int(major), int(minor)] = _read_chip(row, f"{where}: {name}")
    return dict(sorted(chips.items()))


def dumps(chips: Mapping[tuple[int, int], ChipTiles]) -> str:
    """The text of a tiles file: a line for every tile; what `loads` reads back.

    Raises:
        TilesError: values no kernel can take.
    """
    rows = []
    for (major, minor), chip in sorted(chips.items()):
        fields = []
        for name, value in chip._asdict().items():
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                options = ",\n".join(f"      {_dump(tiles)}" for tiles in value)
                fields.append(f'    "{name}": [\n{options}\n    ]')
            else:
                fields.append(f'    "{name}": {_dump(value)}')
        rows.append(f'  "{major}.{minor}": {{\n' + ",\n".join(fields) + "\n  }")
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    loads(text, "the new rows")
    return text


def write(chips: Mapping[tuple[int, int], ChipTiles], path: Path = TILES_FILE) -> None:
    """Replaces the file as a whole, or leaves it as it was.

    Raises:
        TilesError: values no kernel can take; nothing is written.
        OSError: the file cannot be replaced.
    """
    text = dumps(chips)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are for their owner alone.
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def chip_tiles(target: Target) -> ChipTiles:
    """The chip's row; of a target that is no NVIDIA GPU (interpreted kernels), the oldest one's."""
    tried = _tried.get()
    if tried is not None:
        return tried
    return row_of(CHIPS, target)


def row_of(chips: Mapping[tuple[int, int], ChipTiles], target: Target) -> ChipTiles:
    """The newest row that is not newer than the chip; else the oldest."""
    capability = target.capability or min(chips)
    return chips[max((c for c in chips if c <= capability), default=min(chips))]


def mla_tiles(target: Target, num_rows: int, cache_dtype: jnp.dtype) -> MlaTiles:
    """Attention's tiles for calls of `num_rows` query rows (tokens times heads)."""
    chip = chip_tiles(target)
    options = chip.mla_32_bits if jnp.dtype(cache_dtype).itemsize == 4 else chip.mla_16_bits
    return next((tiles for tiles in options if tiles.rows >= num_rows), options[-1])


def expert_tiles(target: Target, num_tokens: int) -> tuple[ExpertTiles, ExpertTiles]:
    """Tiles of the gate-and-up and the down kernel, for tokens that are not sorted."""
    chip = chip_tiles(target)
    if num_tokens < BATCH_TOKENS:
        return chip.gate_up, chip.down
    return chip.gate_up_batch, chip.down_batch


@contextlib.contextmanager
def trying(chip: ChipTiles) -> Iterator[None]:
    """Programs traced inside take these tiles, whatever the chip's row says."""
    token = _tried.set(chip)
    try:
        yield
    finally:
        _tried.reset(token)


_tried: ContextVar[ChipTiles | None] = ContextVar("tried", default=None)


def _read_chip(row: Any, where: str) -> ChipTiles:
    values = _fields(ChipTiles, row, where)
    kinds = typing.get_type_hints(ChipTiles)
    read: dict[str, Any] = {}
    for name, value in values.items():
        here = f"{where}: {name}"
        if isinstance(kinds[name], types.GenericAlias):
            if not isinstance(value, list) or not value:
                raise TilesError(f"{here}: expected a list of tiles")
            kind = typing.get_args(kinds[name])[0]
            options = tuple(_read_tiles(kind, v, f"{here}[{i}]") for i, v in enumerate(value))
            rows = [tiles.rows for tiles in options]
            if rows != sorted(set(rows)):
                raise TilesError(f"{here}: rows {rows}, expected them to ascend")
            read[name] = options
        else:
            read[name] = _read_tiles(kinds[name], value, here)
    return ChipTiles(**read)


def _read_tiles(kind: Any, value: Any, where: str) -> Any:
    fields = _fields(kind, value, where)
    for name, number in fields.items():
        is_count = isinstance(number, int) and not isinstance(number, bool)
        is_none = number == 0 and kind._field_defaults.get(name) == 0
        if is_count and is_none:
            continue
        if name == "num_stages":
            if not is_count or not 1 <= number <= MOST_STAGES:
                raise TilesError(f"{where}: {name} is {number!r}, expected 1 to {MOST_STAGES}")
        elif not is_count or number < 1 or number & (number - 1):
            raise TilesError(f"{where}: {name} is {number!r}, expected a power of two")
        elif name in LEAST and number < LEAST[name]:
            raise TilesError(f"{where}: {name} is {number}, expected {LEAST[name]} at least")
        elif name == "num_warps" and number > MOST_WARPS:
            raise TilesError(f"{where}: {name} is {number}, expected {MOST_WARPS} at most")
    return kind(**fields)


def _fields(kind: Any, value: Any, where: str) -> dict[str, Any]:
    """The object's members, exactly those of the NamedTuple."""
    if not isinstance(value, dict):
        raise TilesError(f"{where}: expected an object, found {type(value).__name__}")
    unknown = sorted(value.keys() - set(kind._fields))
    missing = [n for n in kind._fields if n not in value and n not in kind._field_defaults]
    if unknown or missing:
        problems = [f"{n} is unknown" for n in unknown] + [f"{n} is missing" for n in missing]
        raise TilesError(f"{where}: {', '.join(problems)}; there are {', '.join(kind._fields)}")
    return value


def _dump(tiles: Any) -> str:
    defaults = type(tiles)._field_defaults
    return json.dumps({n: v for n, v in tiles._asdict().items() if v != defaults.get(n)})


CHIPS: dict[tuple[int, int], ChipTiles] = loads(
    TILES_FILE.read_text(encoding="utf-8"), str(TILES_FILE)
)
