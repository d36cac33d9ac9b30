"""`norm_linear` of few rows in one kernel: every block makes the norm it needs by itself.

The products of all matrices share a grid, so that none is stacked beside another in memory. Since
one factor scales a whole row of h, a block multiplies with x' * gain and scales the result:

    y = (x' * gain) W / sqrt(mean(x'^2) + eps)

which takes one pass over the row. A product that has to be exact (the router's) is the exception:
its blocks go over the row once more, for the factor, and multiply h as it is rounded. One block for
each row writes x' and h.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from kernels_pallas.kernel_ops import (
    FEWEST_ROWS,
    MOST_ROWS,
    largest_power_of_two_in,
    matmul,
    padded_rows,
    rows_to_load,
)
from kernels_pallas.norm_linear.reference import Normed, is_exact
from kernels_pallas.tiles import LinearTiles

ROW_PIECE = 1024
"""Values of a row written at a time."""

FEWEST_INPUTS = 16


def obstacle(x: Float[Array, "*B D"], kernels: Sequence[Float[Array, "D _"]]) -> str | None:
    """Why the kernel cannot take these operands; None if it can."""
    D = x.shape[-1]
    rows = x.size // D
    if rows > MOST_ROWS:
        return f"{rows} rows, and the kernel is for at most {MOST_ROWS}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the stream is {x.dtype}, and the kernel takes bfloat16 and float32"
    if largest_power_of_two_in(D) < FEWEST_INPUTS:
        return f"a width of {D} is no multiple of {FEWEST_INPUTS}"
    for kernel in kernels:
        if largest_power_of_two_in(kernel.shape[1]) < FEWEST_INPUTS:
            return f"a product {kernel.shape[1]} wide is no multiple of {FEWEST_INPUTS}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "dtypes", "tiles", "interpret"))
def norm_linear(
    x: Float[Array, "*B D"],
    delta: Float[Array, "*B D"] | None,
    gain: Float[Array, " D"],
    kernels: tuple[Float[Array, "D _"], ...],
    *,
    eps: float,
    dtypes: tuple[jnp.dtype, ...],
    tiles: LinearTiles,
    interpret: bool = False,
) -> Normed:
    """What the reference of this name says, on operands without an `obstacle`."""
    *lead, D = x.shape
    rows = x.size // D
    flat = [a.reshape(rows, D) for a in (x, delta) if a is not None]
    columns = [min(tiles.columns, largest_power_of_two_in(k.shape[1])) for k in kernels]
    blocks = [k.shape[1] // c for k, c in zip(kernels, columns, strict=True)]
    widest = max((_wider(x.dtype, k.dtype).itemsize for k in kernels), default=2)
    # Tiles are given for 2-byte values and few rows: others take no more shared memory.
    M = padded_rows(rows)
    inputs = max(FEWEST_INPUTS, tiles.inputs * 2 // widest * FEWEST_ROWS // M)
    inputs = min(inputs, largest_power_of_two_in(D))
    struct = jax.ShapeDtypeStruct
    streams = [struct((rows, D), x.dtype)] * len(flat)  # x' only where it is not x itself
    outs = pl.pallas_call(
        functools.partial(
            _kernel,
            num_streams=len(flat),
            columns=columns,
            blocks=blocks,
            inputs=inputs,
            eps=eps,
            interpret=interpret,
        ),
        out_shape=(
            *streams,
            *(struct((rows, k.shape[1]), d) for k, d in zip(kernels, dtypes, strict=True)),
        ),
        grid=(sum(blocks) + rows,),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="norm_linear",
    )(*flat, gain, *kernels)
    outs = [out.reshape(*lead, out.shape[-1]) for out in outs]
    h, products = outs[len(flat) - 1], outs[len(flat) :]
    return Normed(x if delta is None else outs[0], h, tuple(products))


def _kernel(*refs, num_streams, columns, blocks, inputs, eps, interpret):
    num = len(columns)
    stream_refs, gain_ref, refs = refs[:num_streams], refs[num_streams], refs[num_streams + 1 :]
    kernel_refs, row_refs, out_refs = refs[:num], refs[num : num + num_streams], refs[-num:]
    part = pl.program_id(0)
    D = gain_ref.shape[0]
    first = 0
    for kernel_ref, out_ref, width, count in zip(
        kernel_refs, out_refs, columns, blocks, strict=True
    ):
        pl.when((part >= first) & (part < first + count))(
            functools.partial(
                _product,
                stream_refs,
                gain_ref,
                kernel_ref,
                out_ref,
                part - first,
                width,
                inputs,
                eps,
                interpret,
            )
        )
        first += count
    pl.when(part >= first)(
        functools.partial(_write_row, stream_refs, gain_ref, row_refs, part - first, D, eps)
    )


def _wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    return one if one.itemsize >= other.itemsize else other


def _product(stream_refs, gain_ref, kernel_ref, out_ref, block, width, inputs, eps, interpret):
    num_rows, D = stream_refs[0].shape
    M = padded_rows(num_rows)
    f32, dtype = jnp.float32, _wider(stream_refs[0].dtype, kernel_ref.dtype)
    rows, is_row = rows_to_load(M, num_rows, block)
    columns = pl.ds(block * width, width)

    def load(i):
        here = pl.ds(i * inputs, inputs)
        mask = jnp.broadcast_to(is_row[:, None], (M, inputs))
        return _sum([plgpu.load(r.at[rows, here], mask=mask, other=0.0) for r in stream_refs])

    def gain(i, kind):
        return gain_ref[pl.ds(i * inputs, inputs)].astype(kind)[None, :]

    def times(h, i):
        weights = kernel_ref[pl.ds(i * inputs, inputs), columns]
        return matmul(h.astype(dtype), weights.astype(dtype), interpret)

    def square(i, squares):
        x_f32 = load(i).astype(f32)
        return squares + jnp.sum(x_f32 * x_f32, axis=1)

    def add(i, carry):
        acc, squares = carry
        x_f32 = load(i).astype(f32)
        acc = acc + times(x_f32 * gain(i, f32), i)
        return acc, squares + jnp.sum(x_f32 * x_f32, axis=1)

    steps = D // inputs
    none, zeros = jnp.zeros((M,), f32), jnp.zeros((M, width), f32)
    if is_exact(stream_refs[0].dtype, out_ref.dtype):
        squares = jax.lax.fori_loop(0, steps, square, none)
        factor = jax.lax.rsqrt(squares / D + eps)[:, None]

        def add_exact(i, acc):
            x = load(i)
            h = (x.astype(f32) * factor).astype(x.dtype) * gain(i, x.dtype)
            return acc + times(h, i)

        y = jax.lax.fori_loop(0, steps, add_exact, zeros)
    else:
        acc, squares = jax.lax.fori_loop(0, steps, add, (zeros, none))
        y = acc * jax.lax.rsqrt(squares / D + eps)[:, None]
    mask = jnp.broadcast_to(is_row[:, None], y.shape)
    plgpu.store(out_ref.at[rows, columns], y.astype(out_ref.dtype), mask=mask)


def _write_row(stream_refs, gain_ref, row_refs, row, D, eps):
    piece = min(ROW_PIECE, largest_power_of_two_in(D))
    f32, dtype = jnp.float32, stream_refs[0].dtype

    def load(i):
        here = pl.ds(i * piece, piece)
        return here, _sum([ref[row, here] for ref in stream_refs])

    def add(i, squares):
        x_f32 = load(i)[1].astype(f32)
        return squares + x_f32 * x_f32

    squares = jax.lax.fori_loop(0, D // piece, add, jnp.zeros((piece,), f32))
    factor = jax.lax.rsqrt(jnp.sum(squares) / D + eps)

    def write(i, carry):
        here, x = load(i)
        for ref in row_refs[:-1]:
            ref[row, here] = x
        # As the reference rounds.
        h = (x.astype(f32) * factor).astype(dtype) * gain_ref[here].astype(dtype)
        row_refs[-1][row, here] = h
        return carry

    jax.lax.fori_loop(0, D // piece, write, 0)


def _sum(parts):
    """The residual sum, rounded as the stream is kept."""
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
