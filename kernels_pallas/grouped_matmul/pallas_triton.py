"""INT4 expert products as two kernels; p counts the T*A pairs (token t, choice a).

    gate_up:  hidden[p, t] = silu(gate_e x[t]) * (up_e x[t]),   e = expert_ids[t, a] of pair p
    down:     out[t] = sum_p share[t, e] * down_e hidden[p, t],   share[t, e] = sum_a combine[t, a]

where there is a shared expert, down adds its last product too, of its activation made there.
Few tokens are neither moved nor sorted. A pair works only if it is the first with its expert, and
then for all T tokens at once, so that tokens that share an expert share one read of it; the sum of
down runs in a fixed order and never depends on timing. Many tokens are sorted into tiles of one
expert each (`_row_tiles`), and a pair has its own row of hidden and of the output. Either way pairs
whose id lies outside 0..E-1 read no weight.

A byte holds inputs 2i and 2i+1 of its column, so that a product is two: the even inputs with the
low nibbles and the odd ones with the high. Nibbles become weights in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul import unpack
from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight
from kernels_pallas.grouped_matmul.reference import (
    ExpertWeight,
    ExpertWeights,
    SharedExpert,
    num_experts,
    shared_ffn,
)
from kernels_pallas.kernel_ops import (
    largest_power_of_two_in,
    matmul,
    next_power_of_two,
    padded_rows,
)
from kernels_pallas.tiles import ExpertTiles

FEW_TOKENS = 64
"""Up to here an expert runs over all tokens of the call; beyond, pairs are sorted by expert."""

MOST_VALUES = 1 << 31
"""Of an array with a row for each pair, whose places are 32-bit numbers."""

FEWEST_COLUMNS = 16

SHARED_INPUTS = 64
"""Inputs of the shared expert's last product taken at a time: little shared memory for little."""

MOST_BYTES = 1 << 31
"""Of one packed array: beyond, the lowering's 32-bit offsets into 1-byte arrays are in doubt."""


def obstacle(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    shared: SharedExpert | None,
) -> str | None:
    """Why the kernels cannot take these operands; None if they can."""
    if not all(isinstance(weight, Int4Weight) for weight in experts):
        return "the expert weights are floating point, and the kernels read INT4"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the tokens are {x.dtype}, and the kernels take bfloat16 and float32"
    for weight in experts:
        assert isinstance(weight, Int4Weight)
        if weight.packed.size >= MOST_BYTES:
            return f"{weight.packed.size} bytes of packed weights pass 32-bit offsets"
        if weight.packed.shape[2] % FEWEST_COLUMNS:
            return f"a width of {weight.packed.shape[2]} is no multiple of {FEWEST_COLUMNS}"
        if expert_ids.size * weight.packed.shape[2] >= MOST_VALUES:
            return f"{x.shape[0]} tokens at once pass 32-bit offsets"
    if shared is not None and shared.gate.shape[1] % FEWEST_COLUMNS:
        return f"a shared expert {shared.gate.shape[1]} wide is no multiple of {FEWEST_COLUMNS}"
    return None


@functools.partial(jax.jit, static_argnames=("gate_up", "down", "interpret"))
def few_tokens(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    combine_f32: Float[Array, "T A"],
    shared: SharedExpert | None = None,
    *,
    gate_up: ExpertTiles,
    down: ExpertTiles,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """What the reference's `expert_ffn` says, on operands without an `obstacle`."""
    T, D = x.shape
    num_pairs = expert_ids.size
    gate_weight, up_weight, down_weight = experts
    F = _width(gate_weight)
    ids = expert_ids.astype(jnp.int32)
    tiles = _fitted(gate_up, D, F)
    hidden, is_used = pl.pallas_call(
        functools.partial(_gate_up_kernel, tiles=tiles, interpret=interpret),
        out_shape=(
            jax.ShapeDtypeStruct((num_pairs, T, F), x.dtype),
            jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
        ),
        grid=(F // tiles.columns, num_pairs),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="experts_gate_up",
    )(ids.reshape(-1), x.reshape(T, D // 2, 2), *gate_weight, *up_weight)
    tiles = _fitted(down, F, D)
    return pl.pallas_call(
        functools.partial(_down_kernel, tiles=tiles, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((T, D), x.dtype),
        grid=(D // tiles.columns,),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="experts_down",
    )(
        ids,
        combine_f32,
        is_used,
        hidden.reshape(num_pairs, T, F // 2, 2),
        *down_weight,
        *(() if shared is None else shared),
    )


@functools.partial(jax.jit, static_argnames=("gate_up", "down", "interpret"))
def many_tokens(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    combine_f32: Float[Array, "T A"],
    shared: SharedExpert | None = None,
    *,
    gate_up: ExpertTiles,
    down: ExpertTiles,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """The same, for any number of tokens."""
    (T, D), A = x.shape, expert_ids.shape[1]
    gate_weight, up_weight, down_weight = experts
    F, E = _width(gate_weight), num_experts(experts)
    tile_experts, tile_pairs = _row_tiles(expert_ids.astype(jnp.int32), E, gate_up.rows)

    def product(
        kernel: Any, name: str, tiles: ExpertTiles, inputs: jax.Array, width: int, dtype: Any,
        *weights: Any,
    ) -> jax.Array:  # fmt: skip
        return pl.pallas_call(
            functools.partial(kernel, num_inputs=inputs.shape[1], A=A, tiles=tiles,
                              interpret=interpret),
            out_shape=jax.ShapeDtypeStruct((T * A * width,), dtype),
            grid=(width // tiles.columns, tile_experts.shape[0]),
            compiler_params=plgpu.CompilerParams(
                num_warps=tiles.num_warps, num_stages=tiles.num_stages
            ),
            interpret=interpret,
            name=name,
        )(tile_experts, tile_pairs, inputs.reshape(-1), *weights).reshape(T * A, width)  # fmt: skip

    tiles = _fitted(gate_up, D, F)
    weights = *gate_weight, *up_weight
    hidden = product(_gate_up_tile, "experts_gate_up_sorted", tiles, x, F, x.dtype, *weights)
    tiles = _fitted(down._replace(rows=gate_up.rows), F, D)
    y = product(_down_tile, "experts_down_sorted", tiles, hidden, D, jnp.float32, *down_weight)
    # Rows of absent pairs were never written.
    is_here = ((expert_ids >= 0) & (expert_ids < E))[:, :, None]
    y = jnp.where(is_here, y.reshape(T, A, D), 0.0)
    out = jnp.sum(combine_f32[:, :, None] * y, axis=1).astype(x.dtype)
    return out if shared is None else out + shared_ffn(shared)


def _row_tiles(
    ids: Int[Array, "T A"], E: int, rows: int
) -> tuple[Int[Array, " tiles"], Int[Array, "tiles rows"]]:
    """Each tile's expert and the pairs of it; E for a tile without any, T*A for a row without."""
    num_pairs = ids.size
    flat = ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < E), flat, E)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum((flat[:, None] == jnp.arange(E)).astype(jnp.int32), axis=0)
    group_end = jnp.cumsum(sizes)
    tile_end = jnp.cumsum((sizes + (rows - 1)) // rows)
    # Every group's last tile may be as good as empty, and no group is without a pair.
    tiles = jnp.arange(num_pairs // rows + min(E, num_pairs), dtype=jnp.int32)
    experts = jnp.searchsorted(tile_end, tiles, side="right", method="compare_all")
    experts = experts.astype(jnp.int32)
    held = jnp.minimum(experts, E - 1)
    of_group = tiles - (tile_end - (sizes + (rows - 1)) // rows)[held]
    place = (group_end - sizes)[held] + of_group * rows
    places = place[:, None] + jnp.arange(rows, dtype=jnp.int32)
    is_pair = (places < group_end[held][:, None]) & (experts < E)[:, None]
    pairs = jnp.where(is_pair, order[jnp.where(is_pair, places, 0)], num_pairs)
    return experts, pairs


def _width(weight: ExpertWeight) -> int:
    return (weight.packed if isinstance(weight, Int4Weight) else weight).shape[2]


def _fitted(tiles: ExpertTiles, inputs: int, columns: int) -> ExpertTiles:
    """The tiles, made smaller where they do not divide the matrix."""
    return tiles._replace(
        inputs=min(tiles.inputs, inputs & -inputs), columns=min(tiles.columns, columns & -columns)
    )


def _gate_up_kernel(
    ids_ref, x_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref, is_used_ref,
    *, tiles, interpret,
):  # fmt: skip
    part, pair = pl.program_id(0), pl.program_id(1)
    T, half_inputs = x_ref.shape[:2]
    num_experts, num_pairs = gate_ref.shape[0], ids_ref.shape[0]
    M, f32 = padded_rows(T), jnp.float32
    expert = ids_ref[pair]
    pairs = jnp.arange(next_power_of_two(num_pairs), dtype=jnp.int32)
    # A start that is not a constant: rows past the array's end are then masked, not refused.
    zero = pair * 0
    others = plgpu.load(
        ids_ref.at[pl.ds(zero, pairs.shape[0])], mask=pairs < num_pairs, other=jnp.int32(-1)
    )
    earlier = jnp.sum(((others == expert) & (pairs < pair)).astype(jnp.int32))
    is_used = (expert >= 0) & (expert < num_experts) & (earlier == 0)
    columns = pl.ds(part * tiles.columns, tiles.columns)
    half = tiles.inputs // 2

    @pl.when(part == 0)
    def _():
        is_used_ref[pair] = is_used.astype(jnp.int32)

    @pl.when(is_used)
    def _():
        is_row = (zero + jnp.arange(M, dtype=jnp.int32) < T)[:, None]

        def add(i, carry):
            here = pl.ds(i * half, half)
            planes = [
                plgpu.load(
                    x_ref.at[pl.ds(zero, M), here, jnp.int32(plane)],
                    mask=jnp.broadcast_to(is_row, (M, half)),
                    other=jnp.zeros((), x_ref.dtype),
                )
                for plane in range(2)
            ]
            return tuple(
                acc + _times(planes, refs, expert, i, columns, tiles, interpret)
                for acc, refs in zip(
                    carry, ((gate_ref, gate_scale_ref), (up_ref, up_scale_ref)), strict=True
                )
            )

        init = (jnp.zeros((M, tiles.columns), f32),) * 2
        gate, up = jax.lax.fori_loop(0, half_inputs // half, add, init)
        hidden = gate * jax.nn.sigmoid(gate) * up
        plgpu.store(
            hidden_ref.at[pair, pl.ds(zero, M), columns],
            hidden.astype(hidden_ref.dtype),
            mask=jnp.broadcast_to(is_row, hidden.shape),
        )


def _gate_up_tile(
    experts_ref, pairs_ref, x_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref,
    *, num_inputs, A, tiles, interpret,
):  # fmt: skip
    weights = (gate_ref, gate_scale_ref), (up_ref, up_scale_ref)

    def gated(gate, up):
        return gate * jax.nn.sigmoid(gate) * up

    _product_of_tile(
        experts_ref, pairs_ref, x_ref, weights, hidden_ref, gated, A, num_inputs, tiles, interpret
    )


def _down_tile(
    experts_ref, pairs_ref, hidden_ref, packed_ref, scale_ref, out_ref,
    *, num_inputs, A, tiles, interpret,
):  # fmt: skip
    del A  # hidden has a row for every pair
    weights = ((packed_ref, scale_ref),)
    _product_of_tile(
        experts_ref, pairs_ref, hidden_ref, weights, out_ref, lambda y: y, 1, num_inputs, tiles,
        interpret,
    )  # fmt: skip


def _product_of_tile(
    experts_ref, pairs_ref, input_ref, weights, out_ref, finish, pairs_a_row, num_inputs, tiles,
    interpret,
):  # fmt: skip
    """One tile's rows times one expert's columns; inputs and results are flat arrays of rows."""
    part, tile = pl.program_id(0), pl.program_id(1)
    i32, f32, half = jnp.int32, jnp.float32, tiles.inputs // 2
    expert = experts_ref[tile]
    width = pl.num_programs(0) * tiles.columns
    num_pairs = jax.lax.div(i32(out_ref.shape[0]), width)

    @pl.when(expert < weights[0][0].shape[0])
    def _():
        pairs = pairs_ref[tile, pl.ds(0, tiles.rows)]
        is_row = (pairs < num_pairs)[:, None]
        row = jnp.where(pairs < num_pairs, pairs, 0)
        first = jax.lax.div(row, jnp.full_like(row, pairs_a_row))[:, None] * num_inputs

        def add(i, carry):
            even = first + (i * half + jnp.arange(half, dtype=i32))[None, :] * 2
            mask = jnp.broadcast_to(is_row, (tiles.rows, half))
            planes = [
                plgpu.load(input_ref.at[even + i32(plane)], mask=mask,
                           other=jnp.zeros((), input_ref.dtype))
                for plane in range(2)
            ]  # fmt: skip
            return tuple(
                acc + _times(planes, refs, expert, i, columns, tiles, interpret)
                for acc, refs in zip(carry, weights, strict=True)
            )

        columns = pl.ds(part * tiles.columns, tiles.columns)
        init = (jnp.zeros((tiles.rows, tiles.columns), f32),) * len(weights)
        result = finish(*jax.lax.fori_loop(0, num_inputs // 2 // half, add, init))
        # Rows without a pair point past the end: interpreted, a masked store writes back what it
        # found, and must not do so where another row stores.
        places = pairs[:, None] * width + part * tiles.columns
        places = places + jnp.arange(tiles.columns, dtype=i32)[None, :]
        plgpu.store(
            out_ref.at[places],
            result.astype(out_ref.dtype),
            mask=jnp.broadcast_to(is_row, result.shape),
        )


def _down_kernel(
    ids_ref, combine_ref, is_used_ref, hidden_ref, packed_ref, scale_ref, *refs, tiles, interpret,
):  # fmt: skip
    *shared_refs, out_ref = refs
    part = pl.program_id(0)
    T, A = ids_ref.shape
    num_pairs, _, half_inputs, _ = hidden_ref.shape
    M, i32 = padded_rows(T), jnp.int32
    zero = part * 0
    columns = pl.ds(part * tiles.columns, tiles.columns)
    half = tiles.inputs // 2
    steps = half_inputs // half
    is_row = (zero + jnp.arange(M, dtype=i32) < T)[:, None]
    choices = next_power_of_two(A)
    is_choice = is_row & (jnp.arange(choices, dtype=i32) < A)[None, :]
    index = pl.ds(zero, M), pl.ds(zero, choices)
    ids = plgpu.load(ids_ref.at[index], mask=is_choice, other=i32(-1))
    combine = plgpu.load(combine_ref.at[index], mask=is_choice, other=jnp.float32(0.0))
    pairs = jnp.arange(next_power_of_two(num_pairs), dtype=i32)
    used = plgpu.load(
        is_used_ref.at[pl.ds(zero, pairs.shape[0])], mask=pairs < num_pairs, other=i32(0)
    )
    end = jnp.max(jnp.where(used != 0, pairs + 1, 0))

    def add(i, acc):
        # Masked loads rather than a condition around them: those are fetched ahead of their use.
        pair = jax.lax.div(i, i32(steps))
        step = i - pair * steps
        is_used = is_used_ref[pair] != 0
        expert = jnp.where(
            is_used, ids_ref[jax.lax.div(pair, i32(A)), jax.lax.rem(pair, i32(A))], 0
        )
        share = jnp.sum(jnp.where(ids == expert, combine, 0.0), axis=1)
        planes = [
            plgpu.load(
                hidden_ref.at[pair, pl.ds(zero, M), pl.ds(step * half, half), jnp.int32(plane)],
                mask=jnp.broadcast_to(is_row & is_used, (M, half)),
                other=jnp.zeros((), hidden_ref.dtype),
            )
            for plane in range(2)
        ]
        y = _times(
            planes, (packed_ref, scale_ref), expert, step, columns, tiles, interpret, is_used
        )
        return acc + share[:, None] * y

    acc = jnp.zeros((M, tiles.columns), jnp.float32)
    if shared_refs:
        acc = _shared_product(shared_refs, acc, pl.ds(zero, M), is_row, columns, interpret)
    acc = jax.lax.fori_loop(i32(0), end * steps, add, acc)
    plgpu.store(
        out_ref.at[pl.ds(zero, M), columns],
        acc.astype(out_ref.dtype),
        mask=jnp.broadcast_to(is_row, acc.shape),
    )


def _shared_product(refs, acc, rows, is_row, columns, interpret):
    """acc and the shared expert's columns of these rows; the refs are those of a `SharedExpert`."""
    gate_ref, up_ref, down_ref = refs
    F = gate_ref.shape[1]
    inputs = min(SHARED_INPUTS, largest_power_of_two_in(F))

    def add(i, acc):
        here = pl.ds(i * inputs, inputs)
        mask = jnp.broadcast_to(is_row, (is_row.shape[0], inputs))
        gate, up = (
            plgpu.load(ref.at[rows, here], mask=mask, other=jnp.zeros((), ref.dtype))
            for ref in (gate_ref, up_ref)
        )
        gate_f32 = gate.astype(jnp.float32)
        hidden = (gate_f32 * jax.nn.sigmoid(gate_f32) * up.astype(jnp.float32)).astype(gate.dtype)
        return acc + matmul(hidden, down_ref[here, columns].astype(gate.dtype), interpret)

    return jax.lax.fori_loop(0, F // inputs, add, acc)


def _times(planes, refs, expert, step, columns, tiles, interpret, is_used=None):
    """Even and odd inputs times one step's nibbles, in float32."""
    packed_ref, scale_ref = refs
    half, groups = tiles.inputs // 2, tiles.inputs // GROUP_SIZE
    width = tiles.columns

    def load(ref, rows):
        here = ref.at[expert, pl.ds(step * rows, rows), columns]
        if is_used is None:
            return plgpu.load(here)
        mask = jnp.broadcast_to(is_used, (rows, width))
        return plgpu.load(here, mask=mask, other=jnp.zeros((), ref.dtype))

    weights = unpack.planes(
        load(packed_ref, half), load(scale_ref, groups), planes[0].dtype, interpret=interpret
    )
    return sum(matmul(x, weight, interpret) for x, weight in zip(planes, weights, strict=True))
