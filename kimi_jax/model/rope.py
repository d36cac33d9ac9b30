"""Rotary position embedding with YaRN (arXiv 2309.00071, section 3), in the interleaved layout.

Pair i of a rotated width R is channels (2i, 2i+1), as the checkpoint's weights expect. Angles,
cosines and sines are float32, computed from positions at each call: nothing is cached.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.mla_inputs.reference import rotate as rotate
from kimi_jax.config import RopeConfig, yarn_mscale


def inverse_frequencies(rope: RopeConfig, width: int) -> Float[np.ndarray, " half"]:
    """Radians a position, for the width/2 pairs: YaRN's blend of f and f / factor."""
    pair = np.arange(width // 2)
    extrapolated = rope.theta ** (-2.0 * pair / width)
    if rope.factor <= 1.0:
        return extrapolated.astype(np.float32)

    def correction_dim(rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (2.0 * math.pi * rotations)
        return width * math.log(wavelengths) / (2.0 * math.log(rope.theta))

    low = max(math.floor(correction_dim(rope.beta_fast)), 0)
    high = min(math.ceil(correction_dim(rope.beta_slow)), width - 1)
    ramp = np.clip((pair - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    blended = extrapolated / rope.factor * ramp + extrapolated * (1.0 - ramp)
    return blended.astype(np.float32)


def cos_sin(
    positions: Int[Array, "B T"], rope: RopeConfig, width: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every pair's angle, times YaRN's m(mscale) / m(mscale_all_dim)."""
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, width)
    m = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return jnp.cos(angles) * m, jnp.sin(angles) * m
