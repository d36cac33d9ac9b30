"""The routed experts' feed-forward products: the contract, in plain jnp.

    out[t] = sum_a combine[t, a] * down_e(silu(gate_e x[t]) * up_e x[t]),   e = expert_ids[t, a]

Weights are either floating point or INT4 in the kernel layout. An expert no token chose is never
read. A pair whose id lies outside 0..E-1 (padding, or an expert of another device) costs nothing.
Few tokens run every used expert over all of them; many are sorted into blocks of one expert each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight, nibble_planes

FEW_TOKENS = 16
"""Up to here a used expert runs over all tokens; beyond, tokens are sorted by expert."""

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
"""Rows of a sorted block, by how many an expert gets on average: a matrix is dequantised once a
block, and rows a block has too many are wasted."""

ExpertWeight = Float[Array, "E in out"] | Int4Weight


class ExpertWeights(NamedTuple):
    """The three matrices of every expert of this device."""

    gate_proj: ExpertWeight
    up_proj: ExpertWeight
    down_proj: ExpertWeight


def expert_ffn(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    combine_f32: Float[Array, "T A"],
) -> Float[Array, "T D"]:
    """Weighted sum of the chosen experts' outputs, in float32; differentiable for float weights."""
    if isinstance(experts.gate_proj, Int4Weight):
        return _by_count(x, experts, expert_ids, combine_f32)
    return _differentiable(x, experts, expert_ids, combine_f32)


def num_experts(experts: ExpertWeights) -> int:
    """Experts held by this device."""
    weight = experts.down_proj
    return (weight.packed if isinstance(weight, Int4Weight) else weight).shape[0]


def expert_product(
    x: Float[Array, "T in"], weight: ExpertWeight, expert: Int[Array, ""]
) -> Float[Array, "T out"]:
    """x times one expert's matrix, accumulated in float32, in float32."""
    if not isinstance(weight, Int4Weight):
        one = jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        return jnp.matmul(x, one.astype(x.dtype), preferred_element_type=jnp.float32)
    packed = jax.lax.dynamic_index_in_dim(weight.packed, expert, keepdims=False)
    scale = jax.lax.dynamic_index_in_dim(weight.scale, expert, keepdims=False)
    rows, out = packed.shape
    scale_f32 = scale.astype(jnp.float32)[:, None, :]

    def plane(q: jax.Array) -> jax.Array:
        grouped = q.astype(jnp.float32).reshape(-1, GROUP_SIZE // 2, out)
        return (grouped * scale_f32).reshape(rows, out).astype(x.dtype)

    even, odd = (plane(q) for q in nibble_planes(packed))
    f32 = jnp.float32
    return jnp.matmul(x[:, 0::2], even, preferred_element_type=f32) + jnp.matmul(
        x[:, 1::2], odd, preferred_element_type=f32
    )


def _ffn(x: jax.Array, experts: ExpertWeights, expert: jax.Array) -> jax.Array:
    gate_f32 = expert_product(x, experts.gate_proj, expert)
    up_f32 = expert_product(x, experts.up_proj, expert)
    return expert_product(
        (jax.nn.silu(gate_f32) * up_f32).astype(x.dtype), experts.down_proj, expert
    )


def _one_token(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> jax.Array:
    E = num_experts(experts)

    def add(a: jax.Array, out_f32: jax.Array) -> jax.Array:
        def run() -> jax.Array:
            return out_f32 + combine_f32[a] * _ffn(x, experts, ids[a])

        return jax.lax.cond((ids[a] >= 0) & (ids[a] < E), run, lambda: out_f32)

    return jax.lax.fori_loop(0, ids.shape[0], add, jnp.zeros(x.shape, jnp.float32))


def _few_tokens(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> jax.Array:
    E = num_experts(experts)
    chosen = ids[:, :, None] == jnp.arange(E, dtype=ids.dtype)
    combine_by_expert_f32 = jnp.sum(jnp.where(chosen, combine_f32[:, :, None], 0.0), axis=1)
    used = jnp.any(chosen, axis=(0, 1))
    (used_first,) = jnp.nonzero(used, size=min(E, ids.size), fill_value=0)

    def add(i: jax.Array, out_f32: jax.Array) -> jax.Array:
        expert = used_first[i]
        share_f32 = jax.lax.dynamic_index_in_dim(combine_by_expert_f32, expert, axis=1)
        return out_f32 + share_f32 * _ffn(x, experts, expert)

    count = jnp.sum(used.astype(jnp.int32))
    return jax.lax.fori_loop(0, count, add, jnp.zeros(x.shape, jnp.float32))


class _Sorted(NamedTuple):
    """Pairs (token, choice) sorted by expert, and the blocks of one expert each they are cut into.

    Absent pairs come last and belong to no block.
    """

    tokens: Int[Array, " padded_pairs"]
    place: Int[Array, "T A"]
    group_start: Int[Array, " E"]
    group_end: Int[Array, " E"]
    first_block: Int[Array, " E"]
    last_block: Int[Array, " E"]
    block_rows: int

    def block(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Block i's expert, its first sorted row, and which of its rows are the expert's own."""
        expert = jnp.searchsorted(self.last_block, i, side="right").astype(jnp.int32)
        start = self.group_start[expert] + (i - self.first_block[expert]) * self.block_rows
        rows = start + jnp.arange(self.block_rows, dtype=jnp.int32)
        return expert, start, rows < self.group_end[expert]


def _sort_by_expert(ids: Int[Array, "T A"], E: int) -> _Sorted:
    T, A = ids.shape
    flat = ids.reshape(-1).astype(jnp.int32)
    flat = jnp.where((flat >= 0) & (flat < E), flat, E)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros((E + 1,), jnp.int32).at[flat].add(1)[:E]
    block_rows = block_rows_for(T * A, E)
    blocks = (sizes + block_rows - 1) // block_rows
    group_end = jnp.cumsum(sizes)
    last_block = jnp.cumsum(blocks)
    return _Sorted(
        # A last block may run past the pairs; its extra rows read token 0 and are never used.
        tokens=jnp.pad(order // A, (0, block_rows)),
        place=jnp.zeros_like(order).at[order].set(jnp.arange(T * A, dtype=jnp.int32)).reshape(T, A),
        group_start=group_end - sizes,
        group_end=group_end,
        first_block=last_block - blocks,
        last_block=last_block,
        block_rows=block_rows,
    )


def block_rows_for(num_pairs: int, E: int) -> int:
    """Rows of a block: the power of two at or under an expert's mean share, within the bounds."""
    mean = max(1, num_pairs // E)
    return min(max(1 << (mean.bit_length() - 1), SMALLEST_BLOCK), LARGEST_BLOCK)


def _by_count(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> jax.Array:
    if x.shape[0] == 1:
        return _one_token(x, experts, ids[0], combine_f32[0])
    if x.shape[0] <= FEW_TOKENS:
        return _few_tokens(x, experts, ids, combine_f32)
    return _many_tokens_forward(x, experts, ids, combine_f32)[0]


_differentiable = jax.custom_vjp(_by_count)
"""For gradients, any number of tokens goes the way of many."""


def _many_tokens_forward(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> tuple[jax.Array, tuple]:
    E = num_experts(experts)
    pairs = _sort_by_expert(ids, E)
    x_sorted = x[pairs.tokens]

    def run(i: jax.Array, y_sorted_f32: jax.Array) -> jax.Array:
        expert, start, _ = pairs.block(i)
        y_f32 = _ffn(
            jax.lax.dynamic_slice_in_dim(x_sorted, start, pairs.block_rows), experts, expert
        )
        # Rows past the group's end are written too; the next group's block comes later and wins.
        return jax.lax.dynamic_update_slice_in_dim(y_sorted_f32, y_f32, start, 0)

    y_sorted_f32 = jnp.zeros((*pairs.tokens.shape, x.shape[1]), jnp.float32)
    y_sorted_f32 = jax.lax.fori_loop(0, pairs.last_block[-1], run, y_sorted_f32)
    share_f32 = jnp.where((ids >= 0) & (ids < E), combine_f32, 0.0)
    out_f32 = jnp.einsum("ta,tad->td", share_f32, y_sorted_f32[pairs.place])
    return out_f32, (x, experts, ids, combine_f32, y_sorted_f32)


def _many_tokens_backward(residuals: tuple, d_out_f32: jax.Array) -> tuple:
    # The forward loop's length is dynamic, so JAX cannot reverse it; each block's products are
    # run again and differentiated in a loop over the same blocks. Only gathers, no scatters.
    x, experts, ids, combine_f32, y_sorted_f32 = residuals
    E = num_experts(experts)
    pairs = _sort_by_expert(ids, E)
    is_here = (ids >= 0) & (ids < E)
    share_f32 = jnp.where(is_here, combine_f32, 0.0)
    share_sorted_f32 = jnp.zeros(pairs.tokens.shape, jnp.float32)
    share_sorted_f32 = share_sorted_f32.at[pairs.place.reshape(-1)].set(share_f32.reshape(-1))
    x_sorted = x[pairs.tokens]
    d_y_sorted_f32 = d_out_f32[pairs.tokens] * share_sorted_f32[:, None]

    def run(i: jax.Array, carry: tuple) -> tuple:
        d_x_sorted, d_experts = carry
        expert, start, is_own = pairs.block(i)
        one = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, expert, 1), experts)
        rows = jax.lax.dynamic_slice_in_dim(x_sorted, start, pairs.block_rows)
        _, pull = jax.vjp(lambda x, w: _ffn(x, w, jnp.zeros((), jnp.int32)), rows, one)
        d_y_f32 = jax.lax.dynamic_slice_in_dim(d_y_sorted_f32, start, pairs.block_rows)
        d_rows, d_one = pull(jnp.where(is_own[:, None], d_y_f32, 0.0))
        d_x_sorted = jax.lax.dynamic_update_slice_in_dim(d_x_sorted, d_rows, start, 0)
        return d_x_sorted, jax.tree.map(
            lambda total, d: _add_at(total, d, expert), d_experts, d_one
        )

    start = (jnp.zeros_like(x_sorted), jax.tree.map(jnp.zeros_like, experts))
    d_x_sorted, d_experts = jax.lax.fori_loop(0, pairs.last_block[-1], run, start)
    d_x_pairs = jnp.where(is_here[:, :, None], d_x_sorted[pairs.place], jnp.zeros((), x.dtype))
    d_combine = jnp.einsum("td,tad->ta", d_out_f32, y_sorted_f32[pairs.place])
    no_gradient = np.zeros(ids.shape, jax.dtypes.float0)
    return jnp.sum(d_x_pairs, axis=1), d_experts, no_gradient, jnp.where(is_here, d_combine, 0.0)


_differentiable.defvjp(_many_tokens_forward, _many_tokens_backward)


def _add_at(total: jax.Array, one: jax.Array, at: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(total, at, 1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + one, at, 0)
