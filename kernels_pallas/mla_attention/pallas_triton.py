"""Absorbed MLA attention of few queries as two kernels: split over the cache, then merge.

Flash-decoding (Dao et al. 2023) over DeepSeek-V2's latent cache (arXiv 2405.04434, section 2.1.2).
A block takes `rows` of the T*N query rows of a batch row and one part of the slots they see, and
keeps an online softmax (arXiv 2205.14135, algorithm 1):

    score[m, s] = scale * (q_latent[m] . latent[s] + q_rope[m] . rope[s])
    largest' = max(largest, max_s score),  shrink = exp(largest - largest')
    total' = shrink total + sum_s exp(score - largest')
    acc'   = shrink acc   + sum_s exp(score - largest') latent[s]

The latent row is read once and serves as key and as value. The parts follow the text's length, not
the capacity: slots past what the block's queries see are never read. The merge weights the parts by
exp(largest - the largest of all) and gives the log-sum-exp too.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.kernel_ops import ceil_div, is_power_of_two, matmul, next_power_of_two
from kernels_pallas.tiles import MlaTiles

WORD_BITS = 32
"""Slots of a draft tree one int32 of its packed mask stands for."""

NOTHING_SEEN = -1e30
"""The largest score of a row that saw nothing: finite, so that it shrinks by exp(0), not by nan."""

MERGED_VALUES = 8192
"""Float32 values a block of the merge holds: 64 registers of 128 threads."""


def obstacle(
    q_latent: Float[Array, "B T N C"], q_rope: Float[Array, "B T N R"], cache: Float[Array, "BS CR"]
) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    C, R = q_latent.shape[-1], q_rope.shape[-1]
    if not (is_power_of_two(C) and is_power_of_two(R) and min(C, R) >= 16):
        return f"the latent's width {C} and the rotated width {R} must be powers of two from 16 on"
    if cache.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the cache is {cache.dtype}, and the kernel reads bfloat16 and float32"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "tiles", "interpret"))
def mla_attention_with_lse(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    tree_mask: Bool[Array, "B T X"] | None = None,
    *,
    scale: float,
    tiles: MlaTiles,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """What the reference of this name says, on operands without an `obstacle`."""
    B, T, N, C = q_latent.shape
    S = cache.shape[0] // B
    num_rows = T * N
    num_blocks = ceil_div(num_rows, tiles.rows)
    num_splits = _num_splits(tiles, B * num_blocks, S)
    queries = [q.astype(cache.dtype).reshape(B, num_rows, -1) for q in (q_latent, q_rope)]
    masks = [] if tree_mask is None else [pack_bits(tree_mask)]
    f32 = jnp.float32
    padded_rows = num_blocks * tiles.rows
    stats = jax.ShapeDtypeStruct((B, padded_rows, num_splits), f32)
    acc = jax.ShapeDtypeStruct((B, num_splits, padded_rows, C), f32)
    parts = pl.pallas_call(
        functools.partial(
            _split_kernel,
            T=T,
            N=N,
            X=0 if tree_mask is None else tree_mask.shape[-1],
            S=S,
            scale=scale,
            tiles=tiles,
            interpret=interpret,
        ),
        out_shape=(acc, stats, stats),
        grid=(num_splits, num_blocks, B),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="mla_attention_split",
    )(*queries, cache, last.astype(jnp.int32), *masks)
    width = min(C, max(16, MERGED_VALUES // num_splits))
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, num_splits=num_splits, width=width),
        out_shape=(
            jax.ShapeDtypeStruct((B, num_rows, C), q_latent.dtype),
            jax.ShapeDtypeStruct((B, num_rows), f32),
        ),
        grid=(C // width, num_rows, B),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="mla_attention_merge",
    )(*parts)
    return out.reshape(B, T, N, C), lse.reshape(B, T, N)


def pack_bits(mask: Bool[Array, "B T X"]) -> Int[Array, "B T words"]:
    """Bit x % 32 of word x // 32 says whether slot x of the tree is seen."""
    B, T, X = mask.shape
    words = ceil_div(X, WORD_BITS)
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, words * WORD_BITS - X)))
    bits = padded.reshape(B, T, words, WORD_BITS).astype(jnp.uint32)
    shifted = bits << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(shifted, axis=-1, dtype=jnp.uint32), jnp.int32)


def _num_splits(tiles: MlaTiles, num_others: int, S: int) -> int:
    """Splits of each of `num_others` groups of rows: about one block a core, a power of two."""
    useful = next_power_of_two(ceil_div(S, tiles.least_chunk))
    return max(1, min(tiles.num_splits // next_power_of_two(num_others), useful))


def _split_kernel(q_latent_ref, q_rope_ref, cache_ref, last_ref, *refs, T, N, X, S, scale, tiles,
                  interpret):  # fmt: skip
    *bits_refs, acc_ref, largest_ref, total_ref = refs
    split, block, b = (pl.program_id(axis) for axis in range(3))
    C, R = q_latent_ref.shape[-1], q_rope_ref.shape[-1]
    M, i32, f32 = tiles.rows, jnp.int32, jnp.float32

    # Rows past the last are padding: they go along with the last token and are never read.
    rows = block * M + jnp.arange(M, dtype=i32)
    token = jnp.minimum(jax.lax.div(rows, jnp.full((M,), N, i32)), T - 1)
    last = last_ref[b, token]
    first = last_ref[b, 0] + 1
    end = jnp.max(last) + 1 if X == 0 else jnp.maximum(jnp.max(last) + 1, first + X)
    words = [ref[b, token, w] for ref in bits_refs for w in range(ref.shape[-1])]

    share = jax.lax.div(end + (pl.num_programs(0) - 1), pl.num_programs(0))
    share = jnp.maximum(share, tiles.least_chunk)
    share = jax.lax.div(share + (tiles.keys - 1), i32(tiles.keys)) * tiles.keys
    start = split * share
    stop = jnp.minimum(start + share, end)

    is_row = (rows < T * N)[:, None]
    own = pl.ds(block * M, M)

    def load(ref, index, mask, width):
        mask = jnp.broadcast_to(mask, (mask.shape[0], width))
        return plgpu.load(ref.at[index], mask=mask, other=0.0)

    q_latent = load(q_latent_ref, (b, own, pl.ds(0, C)), is_row, C)
    q_rope = load(q_rope_ref, (b, own, pl.ds(0, R)), is_row, R)

    def attend(i, carry):
        acc, largest, total = carry
        slots = start + i * tiles.keys + jnp.arange(tiles.keys, dtype=i32)
        is_slot = (slots < stop)[:, None]
        here = pl.ds(b * S + start + i * tiles.keys, tiles.keys)
        latent = load(cache_ref, (here, pl.ds(0, C)), is_slot, C)
        rope = load(cache_ref, (here, pl.ds(C, R)), is_slot, R)
        scores = matmul(q_latent, latent.T, interpret) + matmul(q_rope, rope.T, interpret)
        seen = slots[None, :] <= last[:, None]
        for w, word in enumerate(words):
            bit = slots[None, :] - first - w * WORD_BITS
            is_in = (bit >= 0) & (bit < min(WORD_BITS, X - w * WORD_BITS))
            set_bit = jax.lax.shift_right_logical(
                jnp.broadcast_to(word[:, None], (M, tiles.keys)),
                jnp.broadcast_to(jnp.where(is_in, bit, 0), (M, tiles.keys)),
            )
            seen = seen | (is_in & ((set_bit & 1) != 0))
        seen = seen & (slots < stop)[None, :]
        scores = jnp.where(seen, scores * scale, NOTHING_SEEN)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        # A row that has seen nothing yet would add exp(0) for every slot.
        weights = jnp.where(seen, jnp.exp(scores - new_largest[:, None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        update = matmul(weights.astype(latent.dtype), latent, interpret)
        total = total * shrink + jnp.sum(weights, axis=1)
        return acc * shrink[:, None] + update, new_largest, total

    num_tiles = jax.lax.div(jnp.maximum(stop - start, 0) + (tiles.keys - 1), i32(tiles.keys))
    init = jnp.zeros((M, C), f32), jnp.full((M,), NOTHING_SEEN, f32), jnp.zeros((M,), f32)
    acc, largest, total = jax.lax.fori_loop(i32(0), num_tiles, attend, init)
    largest_ref[b, own, split] = largest
    total_ref[b, own, split] = total

    # The merge skips parts whose total is zero, so that of an empty split need not be written.
    @pl.when(num_tiles > 0)
    def _():
        acc_ref[b, split, own, pl.ds(0, C)] = acc


def _merge_kernel(acc_ref, largest_ref, total_ref, out_ref, lse_ref, *, num_splits, width):
    part, row, b = (pl.program_id(axis) for axis in range(3))
    splits, columns = pl.ds(0, num_splits), pl.ds(part * width, width)
    largest, total = largest_ref[b, row, splits], total_ref[b, row, splits]
    # A NaN is used: it has to come out again.
    is_used = total != 0
    top = jnp.max(jnp.where(is_used, largest, NOTHING_SEEN))
    weight = jnp.where(is_used, jnp.exp(largest - top), 0.0)
    sum_all = jnp.sum(weight * total)
    mask = jnp.broadcast_to(is_used[:, None], (num_splits, width))
    acc = plgpu.load(acc_ref.at[b, splits, row, columns], mask=mask, other=0.0)
    context = jnp.sum(weight[:, None] * acc, axis=0)
    is_any = sum_all != 0
    divisor = jnp.where(is_any, sum_all, 1.0)
    out_ref[b, row, columns] = (context / divisor).astype(out_ref.dtype)

    @pl.when(part == 0)
    def _():
        lse_ref[b, row] = jnp.where(is_any, top + jnp.log(divisor), -jnp.inf)
