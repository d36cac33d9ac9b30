"""Quantising expert weights to INT4 with one scale for 32 inputs, and its training-time twin.

Symmetric, round to nearest even, range -7..7 (the grid the published model was trained on is
reported to leave out -8), scales rounded to bfloat16 before they are used, as they are stored.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE

LARGEST = 7


def quantize_int4(
    weight: Float[Array, "*E in out"],
) -> tuple[Int8[Array, "*E in out"], Float[Array, "*E groups out"]]:
    """Integers in -7..7 and their bfloat16 scales, largest magnitude of a group over 7."""
    grouped = _grouped(weight.astype(jnp.float32))
    scale = (jnp.max(jnp.abs(grouped), axis=-2) / LARGEST).astype(jnp.bfloat16)
    scale_f32 = scale.astype(jnp.float32)[..., None, :]
    q = jnp.round(grouped / jnp.where(scale_f32 == 0.0, 1.0, scale_f32))
    return jnp.clip(q, -LARGEST, LARGEST).astype(jnp.int8).reshape(weight.shape), scale


def dequantize_int4(
    q: Int8[Array, "*E in out"], scale: Float[Array, "*E groups out"]
) -> Float[Array, "*E in out"]:
    """q times its group's scale, in float32."""
    values = _grouped(q.astype(jnp.float32)) * scale.astype(jnp.float32)[..., None, :]
    return values.reshape(q.shape)


def fake_quantize(weight: Float[Array, "*E in out"]) -> Float[Array, "*E in out"]:
    """The values the quantised weight would have; the gradient passes straight through."""
    rounded = dequantize_int4(*quantize_int4(weight)).astype(weight.dtype)
    return weight + jax.lax.stop_gradient(rounded - weight)


def _grouped(x: jax.Array) -> jax.Array:
    *lead, width, out = x.shape
    return x.reshape(*lead, width // GROUP_SIZE, GROUP_SIZE, out)
