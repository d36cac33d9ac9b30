"""A residual sum, its RMSNorm, and linear products of the result: the contract, in plain jnp.

    x' = x + delta
    h  = x' / sqrt(mean(x'^2) + eps) * gain
    y  = h W                                   for each of some matrices W

One op, since on a GPU at few tokens each of its parts by itself costs a launch.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_ROWS = 16
"""Up to here a narrower matrix is widened in the loop that multiplies; beyond, all of it first."""

UNROLLED = 8
"""Inputs such a loop adds up at a time. Of 16, XLA:CPU would copy the bits first."""

BLOCK_VALUES = 1 << 18
"""Of a narrower matrix, what is multiplied at a time: it stays in a core's own cache."""


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
    rows = math.prod(x.shape[:-1])
    is_narrow = x.dtype == jnp.float32 and kernel.dtype == jnp.bfloat16
    if is_narrow and rows <= FEW_ROWS and x.shape[-1] % UNROLLED == 0:
        return _widening(x.reshape(rows, -1), kernel).reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _widening(x: Float[Array, "T D"], kernel: Float[Array, "D F"]) -> Float[Array, "T F"]:
    """The product with a bfloat16 matrix that is widened in the loop that multiplies.

    A float32 copy would be written and read for every product. All rows of x go over a block of the
    matrix while it lies in a core's cache, then over the next.
    """
    T, (D, F) = x.shape[0], kernel.shape
    most = max(1, BLOCK_VALUES // (F * UNROLLED))
    height = max(n for n in range(1, most + 1) if D // UNROLLED % n == 0)
    ones = jnp.ones((1, height), jnp.float32)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        block, row = i // T, i % T
        # XLA would take the view of the bits, as a copy of the whole matrix, out of the loop.
        kernel_here, block = jax.lax.optimization_barrier((kernel, block))
        bits = kernel_here.view(jnp.uint16).reshape(D // UNROLLED, UNROLLED, F)
        grouped = x.reshape(T, D // UNROLLED, UNROLLED)
        grouped = jax.lax.dynamic_slice(grouped, (row, block * height, 0), (1, height, UNROLLED))[0]
        products = []
        for j in range(UNROLLED):
            cut = jax.lax.dynamic_slice(bits, (block * height, j, 0), (height, 1, F))[:, 0]
            widened = jax.lax.bitcast_convert_type(cut.astype(jnp.uint32) << 16, jnp.float32)
            products.append(grouped[:, j, None] * widened)
        sums = [functools.reduce(jnp.add, products[k::2]) for k in range(2)]
        # A product with ones: XLA:CPU's own sums along columns are slow.
        new = jax.lax.dynamic_slice_in_dim(out, row, 1) + jnp.matmul(ones, sums[0] + sums[1])
        return jax.lax.dynamic_update_slice_in_dim(out, new, row, 0)

    blocks = D // UNROLLED // height
    return jax.lax.fori_loop(0, blocks * T, add, jnp.zeros((T, F), jnp.float32))


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
