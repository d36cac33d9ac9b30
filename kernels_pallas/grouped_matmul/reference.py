"""The routed experts' feed-forward products: the contract, in plain jnp.

    out[t] = sum_a combine[t, a] * down_e(silu(gate_e x[t]) * up_e x[t]),   e = expert_ids[t, a]

and, where there is a shared expert, down(silu(gate[t]) * up[t]) of it besides. Weights are either
floating point or INT4 in the kernel layout. An expert no token chose costs nothing, nor does a pair
whose id lies outside 0..E-1 (padding, or an expert of another device). Of few tokens, every pair is
run by itself, so that a token's result does not depend on its neighbours; many tokens are sorted
into blocks of one expert each.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight, nibble_planes
from kernels_pallas.norm_linear.reference import linear

FEW_TOKENS = 32
"""Up to here every pair is run by itself; beyond, tokens are sorted."""

SMALL_MATRIX = 1 << 13
"""Bytes of one expert's INT4 matrix: under it nothing is gained that pays for a longer compile."""

BLOCK_ROWS = 32
"""Rows of a sorted block: rows a group's last block has too many are wasted."""

ExpertWeight = Float[Array, "E in out"] | Int4Weight


class ExpertWeights(NamedTuple):
    """The three matrices of every expert of this device."""

    gate_proj: ExpertWeight
    up_proj: ExpertWeight
    down_proj: ExpertWeight


class SharedExpert(NamedTuple):
    """The expert every token takes: its two first products of the tokens, and its last matrix."""

    gate: Float[Array, "T F"]
    up: Float[Array, "T F"]
    down_proj: Float[Array, "F D"]


def expert_ffn(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    combine_f32: Float[Array, "T A"],
    shared: SharedExpert | None = None,
) -> Float[Array, "T D"]:
    """Weighted sum of the experts' outputs, added up in float32, in x's dtype.

    Differentiable where the weights are floating point.
    """
    is_packed = isinstance(experts.gate_proj, Int4Weight)
    run = _by_count if is_packed else _differentiable
    out = run(x, experts, expert_ids, combine_f32).astype(x.dtype)
    return out if shared is None else out + shared_ffn(shared)


def shared_ffn(shared: SharedExpert) -> Float[Array, "T D"]:
    """The shared expert's part, in the dtype of its products."""
    return linear(jax.nn.silu(shared.gate) * shared.up, shared.down_proj)


def num_experts(experts: ExpertWeights) -> int:
    """Experts held by this device."""
    weight = experts.down_proj
    return (weight.packed if isinstance(weight, Int4Weight) else weight).shape[0]


class _Planes(NamedTuple):
    """One expert's matrix in floating point.

    Plane i of n holds inputs i, i+n, ...: one plane for float weights, the even and the odd inputs
    for INT4, which are never put together.
    """

    planes: tuple[Float[Array, "in_n out"], ...]

    def times(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """The product, accumulated in float32, in float32."""
        n = len(self.planes)
        parts = [
            jnp.matmul(x[:, i::n], plane, preferred_element_type=jnp.float32)
            for i, plane in enumerate(self.planes)
        ]
        return functools.reduce(jnp.add, parts)


def _planes(weight: ExpertWeight, expert: Int[Array, ""], dtype: jnp.dtype) -> _Planes:
    """One expert's matrix in this dtype."""
    if not isinstance(weight, Int4Weight):
        return _Planes((_of_expert(weight, expert).astype(dtype),))
    packed, scale = _of_expert(weight.packed, expert), _of_expert(weight.scale, expert)
    half_rows, out = packed.shape
    scale_f32 = scale.astype(jnp.float32)[:, None, :]

    def plane(q: jax.Array) -> jax.Array:
        grouped = q.astype(jnp.float32).reshape(-1, GROUP_SIZE // 2, out)
        return (grouped * scale_f32).reshape(half_rows, out).astype(dtype)

    return _Planes(tuple(plane(q) for q in nibble_planes(packed)))


def _of_expert(array: jax.Array, expert: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)


def _gated(gate_f32: jax.Array, up_f32: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (jax.nn.silu(gate_f32) * up_f32).astype(dtype)


def _ffn(x: jax.Array, gate: _Planes, up: _Planes, down: _Planes) -> jax.Array:
    return down.times(_gated(gate.times(x), up.times(x), x.dtype))


def _ffn_of_matrices(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
    return _ffn(x, *(_Planes((w.astype(x.dtype),)) for w in matrices))


# Unrolled: traced once for all layers.
@functools.partial(jax.jit, inline=True)
def _times(x: Float[Array, "1 in"], weight: ExpertWeight, expert: jax.Array) -> jax.Array:
    """One token times one expert's matrix, in float32.

    In float32, where the product of an INT4 weight is not rounded, integers are multiplied and each
    group's sum is scaled: sum_i x_i (n_i - 8) s is s (sum_i x_i n_i - 8 sum_i x_i). One loop then
    reads the matrix as it is stored and no dequantised copy is written: half the time on XLA:CPU.
    """
    if not isinstance(weight, Int4Weight) or x.dtype != jnp.float32 or _is_small(weight):
        return _planes(weight, expert, x.dtype).times(x)
    num_groups, half_group, out = x.shape[1] // GROUP_SIZE, GROUP_SIZE // 2, weight.packed.shape[2]
    grouped = x.reshape(num_groups, half_group, 2)
    packed = weight.packed.reshape(-1, num_groups, half_group, out)
    products = []
    for i in range(half_group):
        # Each row by itself: the loop then runs along the columns, in vectors. Cut out together
        # they would be copied first.
        row = jax.lax.dynamic_slice(packed, (expert, 0, i, 0), (1, num_groups, 1, out))
        nibbles = row.reshape(num_groups, out).astype(jnp.int32)
        # The high nibble where it stands is 16 times itself; a sixteenth of x is exact.
        products.append((nibbles & 0x0F).astype(jnp.float32) * grouped[:, i, :1])
        products.append((nibbles & 0xF0).astype(jnp.float32) * (grouped[:, i, 1:] / 16))
    # Four chains of sums, none of which waits for another.
    sums = [functools.reduce(jnp.add, products[i::4]) for i in range(4)]
    eights = 8 * jnp.sum(grouped, axis=(1, 2))[:, None]
    scale_f32 = _of_expert(weight.scale, expert).astype(jnp.float32)
    scaled = (functools.reduce(jnp.add, sums) - eights) * scale_f32
    # A product with ones: XLA:CPU's own sums along columns are slow.
    return jnp.matmul(jnp.ones((1, num_groups), jnp.float32), scaled)


def _is_small(weight: Int4Weight) -> bool:
    return math.prod(weight.packed.shape[1:]) < SMALL_MATRIX


def _by_pairs(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> jax.Array:
    flat_ids, share_f32 = ids.reshape(-1), combine_f32.reshape(-1)
    is_here = (flat_ids >= 0) & (flat_ids < num_experts(experts))
    (here,) = jnp.nonzero(is_here, size=ids.size, fill_value=0)

    def add(i: jax.Array, out_f32: jax.Array) -> jax.Array:
        pair = here[i]
        token, expert = pair // ids.shape[1], flat_ids[pair]
        row = jax.lax.dynamic_slice_in_dim(x, token, 1)
        gate_f32, up_f32 = (_times(row, w, expert) for w in experts[:2])
        y_f32 = _times(_gated(gate_f32, up_f32, x.dtype), experts.down_proj, expert)
        old_f32 = jax.lax.dynamic_slice_in_dim(out_f32, token, 1)
        new_f32 = old_f32 + share_f32[pair] * y_f32
        return jax.lax.dynamic_update_slice_in_dim(out_f32, new_f32, token, 0)

    count = jnp.sum(is_here.astype(jnp.int32))
    return jax.lax.fori_loop(0, count, add, jnp.zeros(x.shape, jnp.float32))


class _Sorted(NamedTuple):
    """Pairs (token, choice) sorted by expert, absent pairs last."""

    tokens: Int[Array, " padded_pairs"]
    place: Int[Array, "T A"]
    group_start: Int[Array, " E"]
    group_end: Int[Array, " E"]
    used: Int[Array, " at_most_E"]
    num_used: Int[Array, ""]

    def over_groups(self, run: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Folds `run(expert, carry)` over the used experts, in order."""
        return jax.lax.fori_loop(0, self.num_used, lambda i, c: run(self.used[i], c), carry)

    def over_blocks(
        self, expert: jax.Array, run: Callable[[jax.Array, jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Folds `run(first_row, is_own, carry)` over the blocks of one expert's group.

        `is_own` says which of the block's rows are the group's: the last block runs past its end.
        """
        start, end = self.group_start[expert], self.group_end[expert]

        def run_block(i: jax.Array, carry: Any) -> Any:
            first = start + i * BLOCK_ROWS
            return run(first, first + jnp.arange(BLOCK_ROWS, dtype=jnp.int32) < end, carry)

        return jax.lax.fori_loop(0, (end - start + BLOCK_ROWS - 1) // BLOCK_ROWS, run_block, carry)


def _sort_by_expert(ids: Int[Array, "T A"], E: int) -> _Sorted:
    T, A = ids.shape
    flat = ids.reshape(-1).astype(jnp.int32)
    flat = jnp.where((flat >= 0) & (flat < E), flat, E)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros((E + 1,), jnp.int32).at[flat].add(1)[:E]
    group_end = jnp.cumsum(sizes)
    (used,) = jnp.nonzero(sizes, size=min(E, T * A), fill_value=0)
    return _Sorted(
        # A last block may run past the pairs; its extra rows read token 0 and are never used.
        tokens=jnp.pad(order // A, (0, BLOCK_ROWS)),
        place=jnp.zeros_like(order).at[order].set(jnp.arange(T * A, dtype=jnp.int32)).reshape(T, A),
        group_start=group_end - sizes,
        group_end=group_end,
        used=used.astype(jnp.int32),
        num_used=jnp.sum((sizes > 0).astype(jnp.int32)),
    )


def _by_count(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> jax.Array:
    if x.shape[0] <= FEW_TOKENS:
        return _by_pairs(x, experts, ids, combine_f32)
    return _many_tokens_forward(x, experts, ids, combine_f32)[0]


_differentiable = jax.custom_vjp(_by_count)
"""For gradients, any number of tokens goes the way of many."""


def _many_tokens_forward(
    x: jax.Array, experts: ExpertWeights, ids: jax.Array, combine_f32: jax.Array
) -> tuple[jax.Array, tuple]:
    E = num_experts(experts)
    pairs = _sort_by_expert(ids, E)
    x_sorted = x[pairs.tokens]

    def run_group(expert: jax.Array, y_sorted_f32: jax.Array) -> jax.Array:
        matrices = [_planes(w, expert, x.dtype) for w in experts]

        def run_block(first: jax.Array, _: jax.Array, y_sorted_f32: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(x_sorted, first, BLOCK_ROWS)
            y_f32 = _ffn(rows, *matrices)
            # Rows past the group's end are written too; the next group comes later and wins.
            return jax.lax.dynamic_update_slice_in_dim(y_sorted_f32, y_f32, first, 0)

        return pairs.over_blocks(expert, run_block, y_sorted_f32)

    y_sorted_f32 = jnp.zeros((*pairs.tokens.shape, x.shape[1]), jnp.float32)
    y_sorted_f32 = pairs.over_groups(run_group, y_sorted_f32)
    share_f32 = jnp.where((ids >= 0) & (ids < E), combine_f32, 0.0)
    out_f32 = jnp.einsum("ta,tad->td", share_f32, y_sorted_f32[pairs.place])
    return out_f32, (x, experts, ids, combine_f32, y_sorted_f32)


def _many_tokens_backward(residuals: tuple, d_out_f32: jax.Array) -> tuple:
    # The forward loops' lengths are dynamic, so JAX cannot reverse them; each block's products are
    # run again and differentiated in loops over the same blocks. Only gathers, no scatters.
    x, experts, ids, combine_f32, y_sorted_f32 = residuals
    E = num_experts(experts)
    pairs = _sort_by_expert(ids, E)
    is_here = (ids >= 0) & (ids < E)
    share_f32 = jnp.where(is_here, combine_f32, 0.0)
    share_sorted_f32 = jnp.zeros(pairs.tokens.shape, jnp.float32)
    share_sorted_f32 = share_sorted_f32.at[pairs.place.reshape(-1)].set(share_f32.reshape(-1))
    x_sorted = x[pairs.tokens]
    d_y_sorted_f32 = d_out_f32[pairs.tokens] * share_sorted_f32[:, None]

    def run_group(expert: jax.Array, carry: tuple) -> tuple:
        d_x_sorted, d_experts = carry
        one = [jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in experts]

        def run_block(first: jax.Array, is_own: jax.Array, carry: tuple) -> tuple:
            d_x_sorted, d_one = carry
            rows = jax.lax.dynamic_slice_in_dim(x_sorted, first, BLOCK_ROWS)
            _, pull = jax.vjp(_ffn_of_matrices, rows, one)
            d_y_f32 = jax.lax.dynamic_slice_in_dim(d_y_sorted_f32, first, BLOCK_ROWS)
            d_rows, d_block = pull(jnp.where(is_own[:, None], d_y_f32, 0.0))
            d_x_sorted = jax.lax.dynamic_update_slice_in_dim(d_x_sorted, d_rows, first, 0)
            return d_x_sorted, jax.tree.map(jnp.add, d_one, d_block)

        start = (d_x_sorted, jax.tree.map(jnp.zeros_like, one))
        d_x_sorted, d_one = pairs.over_blocks(expert, run_block, start)
        d_experts = ExpertWeights(
            *(
                jax.lax.dynamic_update_index_in_dim(d, o, expert, 0)
                for d, o in zip(d_experts, d_one, strict=True)
            )
        )
        return d_x_sorted, d_experts

    start = (jnp.zeros_like(x_sorted), jax.tree.map(jnp.zeros_like, experts))
    d_x_sorted, d_experts = pairs.over_groups(run_group, start)
    d_x_pairs = jnp.where(is_here[:, :, None], d_x_sorted[pairs.place], jnp.zeros((), x.dtype))
    d_combine = jnp.einsum("td,tad->ta", d_out_f32, y_sorted_f32[pairs.place])
    no_gradient = np.zeros(ids.shape, jax.dtypes.float0)
    return jnp.sum(d_x_pairs, axis=1), d_experts, no_gradient, jnp.where(is_here, d_combine, 0.0)


_differentiable.defvjp(_many_tokens_forward, _many_tokens_backward)
