"""Tile sizes of the kernels for each chip: data, and the rule that picks a row of it.

A chip is named by its compute capability: 8.0 A100, 9.0 H100 and H200, 10.0 B200, 12.0 RTX PRO
6000. One that is not listed takes the newest listed one before it. A block may use 99 KiB of shared
memory on 8.6, 8.9 and 12.0, so the rows of 8.0 and 12.0 stay below that. The sizes compile without
spilling registers; which are fastest was not measured.
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas.dispatch import Target


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


class ChipTiles(NamedTuple):
    """Every kernel's tiles on one chip."""

    mla_16_bits: tuple[MlaTiles, ...]
    """For a bfloat16 cache: the first that holds a call's query rows, else the last."""
    mla_32_bits: tuple[MlaTiles, ...]
    gate_up: ExpertTiles
    down: ExpertTiles
    gate_up_sorted: ExpertTiles
    """For many tokens; both sorted kernels share the first one's rows."""
    down_sorted: ExpertTiles


# Two stages need less shared memory than one, which stores a tile once for each of its products.
_MLA_16_BITS = (
    MlaTiles(rows=16, keys=32, num_warps=4, num_stages=2, num_splits=128, least_chunk=64),
    MlaTiles(rows=32, keys=32, num_warps=8, num_stages=2, num_splits=128, least_chunk=64),
    MlaTiles(rows=64, keys=16, num_warps=8, num_stages=2, num_splits=128, least_chunk=64),
)
_MLA_32_BITS = (
    MlaTiles(rows=16, keys=16, num_warps=4, num_stages=2, num_splits=128, least_chunk=64),
)
_GATE_UP = ExpertTiles(columns=32, inputs=256, num_warps=4, num_stages=3)
_DOWN = ExpertTiles(columns=64, inputs=256, num_warps=4, num_stages=2)
_GATE_UP_SORTED = ExpertTiles(columns=64, inputs=128, num_warps=4, num_stages=3, rows=32)
_DOWN_SORTED = ExpertTiles(columns=64, inputs=128, num_warps=4, num_stages=3, rows=32)
_COMMON = ChipTiles(_MLA_16_BITS, _MLA_32_BITS, _GATE_UP, _DOWN, _GATE_UP_SORTED, _DOWN_SORTED)

CHIPS: dict[tuple[int, int], ChipTiles] = {
    (8, 0): _COMMON,
    (9, 0): _COMMON,
    (10, 0): _COMMON,
    (12, 0): _COMMON,
}


def chip_tiles(target: Target) -> ChipTiles:
    """The chip's row; of a target that is no NVIDIA GPU (interpreted kernels), the oldest one's."""
    capability = target.capability or min(CHIPS)
    return CHIPS[max((c for c in CHIPS if c <= capability), default=min(CHIPS))]


def mla_tiles(target: Target, num_rows: int, cache_dtype: jnp.dtype) -> MlaTiles:
    """Attention's tiles for calls of `num_rows` query rows (tokens times heads)."""
    chip = chip_tiles(target)
    options = chip.mla_32_bits if jnp.dtype(cache_dtype).itemsize == 4 else chip.mla_16_bits
    return next((tiles for tiles in options if tiles.rows >= num_rows), options[-1])
