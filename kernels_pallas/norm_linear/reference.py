"""A residual sum, its RMSNorm, and linear products of the result: the contract, in plain jnp.

    x' = x + delta
    h  = x' / sqrt(mean(x'^2) + eps) * gain
    y  = h W                                   for each of some matrices W

One op, since on a GPU at few tokens each of its parts by itself costs a launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
    flat = kernel.reshape(kernel.shape[0], -1).astype(x.dtype)
    out = jnp.matmul(x, flat, preferred_element_type=jnp.float32).astype(x.dtype)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:])


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
