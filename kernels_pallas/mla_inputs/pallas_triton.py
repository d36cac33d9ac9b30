"""`mla_inputs` in one launch: blocks that absorb a head's queries, and one that writes a token's
cache slot.

A head's first block rotates the head's queries too. Pairs of a rotation are read as the two planes
of a view of the same memory, since the lowering cannot take every second value of what it loaded.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.kernel_ops import (
    MOST_ROWS,
    is_power_of_two,
    largest_power_of_two_in,
    matmul,
    padded_rows,
    rows_to_load,
)
from kernels_pallas.mla_inputs.reference import MlaInputs
from kernels_pallas.tiles import LinearTiles


def obstacle(
    q: Float[Array, "B T N UR"], w_uk: Float[Array, "N U C"], cache: Float[Array, "BS CR"]
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    B, T = q.shape[:2]
    U, C = w_uk.shape[1:]
    R = q.shape[-1] - U
    if B * T > MOST_ROWS:
        return f"{B * T} rows, and the kernel is for at most {MOST_ROWS}"
    if not all(is_power_of_two(width) and width >= 16 for width in (U, C, R)):
        return f"the widths {U} of a head, {C} and {R} of a row must be powers of two from 16 on"
    for name, dtype in (("queries", q.dtype), ("cache", cache.dtype)):
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"the {name} are {dtype}, and the kernel takes bfloat16 and float32"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "num_shares", "tiles", "interpret"))
def mla_inputs(
    q: Float[Array, "B T N UR"],
    kv: Float[Array, "B T CR"],
    gain: Float[Array, " C"],
    w_uk: Float[Array, "N U C"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    cache: Float[Array, "BS CR"],
    start: Int[Array, " B"],
    index: Int[Array, ""] | int = 0,
    *,
    eps: float,
    num_shares: int = 1,
    tiles: LinearTiles,
    interpret: bool = False,
) -> MlaInputs:
    """What the reference of this name says, on operands without an `obstacle`.

    `index` and `num_shares` are the cache's share of the slots.
    """
    B, T, N, UR = q.shape
    U, C = w_uk.shape[1:]
    rows, R = B * T, UR - U
    columns = min(tiles.columns, largest_power_of_two_in(C))
    q, kv = q.reshape(rows, N, UR), kv.reshape(rows, C + R)
    struct = jax.ShapeDtypeStruct
    operands = (
        q,
        q.reshape(rows, N, UR // 2, 2),
        kv,
        kv.reshape(rows, (C + R) // 2, 2),
        gain,
        w_uk,
        cos.reshape(rows, R // 2),
        sin.reshape(rows, R // 2),
        start.astype(jnp.int32),
        *([] if num_shares == 1 else [jnp.asarray(index, jnp.int32).reshape(1)]),
        cache,
    )
    q_latent, q_rope, cache = pl.pallas_call(
        functools.partial(
            _kernel,
            T=T,
            U=U,
            columns=columns,
            inputs=min(tiles.inputs, U),
            eps=eps,
            num_shares=num_shares,
            interpret=interpret,
        ),
        out_shape=(
            struct((rows, N, C), q.dtype),
            struct((rows, N, R), q.dtype),
            struct(cache.shape, cache.dtype),
        ),
        grid=(N * (C // columns) + rows,),
        input_output_aliases={len(operands) - 1: 2},
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="mla_inputs",
    )(*operands)
    return MlaInputs(q_latent.reshape(B, T, N, C), q_rope.reshape(B, T, N, R), cache)


def _kernel(
    q_ref, q_pairs_ref, kv_ref, kv_pairs_ref, gain_ref, w_uk_ref, cos_ref, sin_ref, start_ref,
    *refs, T, U, columns, inputs, eps, num_shares, interpret,
):  # fmt: skip
    # The cache comes in as well as out, and before it the share's index where there is one.
    *index_ref, _, q_latent_ref, q_rope_ref, cache_ref = refs
    part = pl.program_id(0)
    num_rows, N, C = q_latent_ref.shape
    half = cos_ref.shape[1]
    parts_a_head = C // columns
    head = jax.lax.div(part, jnp.int32(parts_a_head))
    place = part - head * parts_a_head
    f32 = jnp.float32

    def turned(even, odd, cos, sin):
        even, odd = even.astype(f32), odd.astype(f32)
        both = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return both.reshape(*even.shape[:-1], 2 * half)

    @pl.when(head < N)
    def _():
        M = padded_rows(num_rows)
        rows, is_row = rows_to_load(M, num_rows, part)
        own = pl.ds(place * columns, columns)

        def load(ref, width, *index):
            mask = jnp.broadcast_to(is_row[:, None], (M, width))
            return plgpu.load(ref.at[(rows, *index)], mask=mask, other=0.0)

        def store(ref, value, *index):
            mask = jnp.broadcast_to(is_row[:, None], value.shape)
            plgpu.store(ref.at[(rows, *index)], value.astype(ref.dtype), mask=mask)

        def add(i, acc):
            here = pl.ds(i * inputs, inputs)
            x = load(q_ref, inputs, head, here)
            return acc + matmul(x, w_uk_ref[head, here, own].astype(x.dtype), interpret)

        acc = jax.lax.fori_loop(0, U // inputs, add, jnp.zeros((M, columns), f32))
        store(q_latent_ref, acc, head, own)

        @pl.when(place == 0)
        def _():
            pair, every = pl.ds(U // 2, half), pl.ds(0, half)
            even, odd = (load(q_pairs_ref, half, head, pair, jnp.int32(p)) for p in range(2))
            angles = (load(ref, half, every) for ref in (cos_ref, sin_ref))
            store(q_rope_ref, turned(even, odd, *angles), head, pl.ds(0, 2 * half))

    @pl.when(head >= N)
    def _():
        row = part - N * parts_a_head
        b = jax.lax.div(row, jnp.int32(T))
        S = cache_ref.shape[0] // start_ref.shape[0]
        slot = start_ref[b] + row - b * T
        is_here = slot >= 0
        if num_shares > 1:
            index = index_ref[0][0]
            is_here &= jax.lax.rem(slot, jnp.int32(num_shares)) == index
            slot = jax.lax.div(slot, jnp.int32(num_shares))
        latent, every = pl.ds(0, C), pl.ds(0, half)
        c_f32 = kv_ref[row, latent].astype(f32)
        factor = jax.lax.rsqrt(jnp.sum(c_f32 * c_f32) / C + eps)
        # As the reference rounds: before the gain, and again to the cache's type.
        normed = (c_f32 * factor).astype(kv_ref.dtype) * gain_ref[latent].astype(kv_ref.dtype)
        even, odd = (kv_pairs_ref[row, pl.ds(C // 2, half), jnp.int32(p)] for p in range(2))
        key = turned(even, odd, cos_ref[row, every], sin_ref[row, every]).astype(kv_ref.dtype)

        # Another row's slots are never written, whatever `start` is.
        @pl.when(is_here & (slot < S))
        def _():
            cache_ref[b * S + slot, latent] = normed.astype(cache_ref.dtype)
            cache_ref[b * S + slot, pl.ds(C, 2 * half)] = key.astype(cache_ref.dtype)
