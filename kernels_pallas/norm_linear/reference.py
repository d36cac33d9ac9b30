"""A residual sum, its RMSNorm, and linear products of the result: the contract, in plain jnp.

    x' = x + delta
    h  = x' / sqrt(mean(x'^2) + eps) * gain
    y  = h W                                   for each of some matrices W

One op, since on a GPU at few tokens each of its parts by itself costs a launch.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_ROWS = 16
"""Up to here a narrower matrix is widened in the loop that multiplies; beyond, block by block."""

UNROLLED = 8
"""Inputs such a loop adds up at a time. Of 16, XLA:CPU would copy the bits first."""

BLOCK_VALUES = 1 << 18
"""Of a narrower matrix, what few rows are multiplied with at a time: a core's own cache."""

WIDE_BLOCK_VALUES = 1 << 20
"""And what many rows are, whose products take longer than the widening."""


class Normed(NamedTuple):
    """What `norm_linear` gives: the stream, its norm, and the norm's products in order."""

    x: Float[Array, "*B D"]
    h: Float[Array, "*B D"]
    products: tuple[Float[Array, "*B _"], ...]


def norm_linear(
    x: Float[Array, "*B D"],
    delta: Float[Array, "*B D"] | None,
    gain: Float[Array, " D"],
    kernels: Sequence[Float[Array, "D _"]],
    *,
    eps: float,
    dtypes: Sequence[jnp.dtype] | None = None,
) -> Normed:
    """The op as this module describes it; statistics and sums of products in float32.

    Args:
        delta: None adds nothing, and gives `x` back.
        dtypes: of each product, x's by default. A float32 product of narrower operands multiplies
            h, as it is rounded, exactly: the router decides with it.
    """
    x = x if delta is None else x + delta
    h = rms_norm(x, gain, eps)
    wanted = [x.dtype] * len(kernels) if dtypes is None else dtypes
    pairs = zip(kernels, wanted, strict=True)
    return Normed(x, h, tuple(product(h, kernel, dtype) for kernel, dtype in pairs))


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) in float32, cast back, then times the gain."""
    x_f32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    return (x_f32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * scale.astype(x.dtype)


def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] times kernel [in, *out], accumulated in float32, in x's dtype."""
    out = matmul_f32(x, kernel.reshape(kernel.shape[0], -1)).astype(x.dtype)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:])


def matmul_f32(x: Float[Array, "*B D"], kernel: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """The product, accumulated in float32, in float32; of a kernel narrower than x exactly."""
    is_narrow = x.dtype == jnp.float32 and kernel.dtype == jnp.bfloat16
    if is_narrow and x.size:
        flat = x.reshape(-1, x.shape[-1])
        return _widening(flat, kernel).reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _widening(x: Float[Array, "T D"], kernel: Float[Array, "D F"]) -> Float[Array, "T F"]:
    """The product with a bfloat16 matrix that is widened a block at a time.

    XLA would keep float32 copies of a whole program's matrices at once, and write and read them for
    every product.
    """
    if x.shape[0] <= FEW_ROWS and x.shape[1] % UNROLLED == 0:
        return _few_rows(x, kernel)
    return _many_rows(x, kernel)


def _widening_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    return _widening(x, kernel), (x, kernel)


def _widening_backward(operands: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX sees no dependence on a matrix through its bits.
    x, kernel = operands
    d_x = jnp.matmul(d_out, kernel.astype(d_out.dtype).T)
    return d_x, jnp.matmul(x.T, d_out).astype(kernel.dtype)


_widening.defvjp(_widening_forward, _widening_backward)


# Unrolled: traced once for all matrices of one shape.
@functools.partial(jax.jit, inline=True)
def _few_rows(x: Float[Array, "T D"], kernel: Float[Array, "D F"]) -> Float[Array, "T F"]:
    """Widened in the loop that multiplies: all rows of x go over a block of the matrix while it
    lies in a core's cache, then over the next."""
    T, (D, F) = x.shape[0], kernel.shape
    height = _largest_divisor(D // UNROLLED, BLOCK_VALUES // (F * UNROLLED))
    ones = jnp.ones((1, height), jnp.float32)
    grouped = x.reshape(T, D // UNROLLED, UNROLLED)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        block, row = i // T, i % T
        bits, block = _bits(kernel, block)
        bits = bits.reshape(D // UNROLLED, UNROLLED, F)
        here = jax.lax.dynamic_slice(grouped, (row, block * height, 0), (1, height, UNROLLED))[0]
        products = []
        for j in range(UNROLLED):
            cut = jax.lax.dynamic_slice(bits, (block * height, j, 0), (height, 1, F))[:, 0]
            products.append(here[:, j, None] * _widened(cut))
        sums = [functools.reduce(jnp.add, products[k::2]) for k in range(2)]
        # A product with ones: XLA:CPU's own sums along columns are slow.
        new = jax.lax.dynamic_slice_in_dim(out, row, 1) + jnp.matmul(ones, sums[0] + sums[1])
        return jax.lax.dynamic_update_slice_in_dim(out, new, row, 0)

    blocks = D // UNROLLED // height
    return jax.lax.fori_loop(0, blocks * T, add, jnp.zeros((T, F), jnp.float32))


def _many_rows(x: Float[Array, "T D"], kernel: Float[Array, "D F"]) -> Float[Array, "T F"]:
    """Widened a block of columns at a time, each of them a product of its own."""
    D, F = kernel.shape
    # Of a single block XLA makes no loop, and then keeps its copy beside all others.
    width = _largest_divisor(F, min(WIDE_BLOCK_VALUES // D, F // 2))

    def write(block: jax.Array, out: jax.Array) -> jax.Array:
        bits, block = _bits(kernel, block)
        cut = jax.lax.dynamic_slice(bits, (0, block * width), (D, width))
        new = jnp.matmul(x, _widened(cut))
        return jax.lax.dynamic_update_slice(out, new, (0, block * width))

    return jax.lax.fori_loop(0, F // width, write, jnp.zeros((x.shape[0], F), jnp.float32))


def _bits(kernel: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA would take the view, as a copy of the whole matrix, out of a loop it does not change in.
    kernel, block = jax.lax.optimization_barrier((kernel, block))
    return kernel.view(jnp.uint16), block


def _widened(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _largest_divisor(of: int, limit: int) -> int:
    return max(n for n in range(1, max(1, limit) + 1) if of % n == 0)


def product(h: Float[Array, "*B D"], kernel: Float[Array, "D _"], dtype: jnp.dtype) -> jax.Array:
    """`linear`, in this dtype; in float32 of narrower operands, their exact products."""
    if not is_exact(h.dtype, dtype):
        return linear(h, kernel).astype(dtype)
    f32 = jnp.float32
    # HIGHEST: the default precision rounds float32 operands on accelerators.
    return jnp.matmul(h.astype(f32), kernel.astype(f32), precision=jax.lax.Precision.HIGHEST)


def is_exact(operands: jnp.dtype, result: jnp.dtype) -> bool:
    """Whether a product in this dtype takes its operands as they are, unrounded, into float32."""
    return jnp.dtype(result) == jnp.float32 and jnp.dtype(operands) != jnp.float32
