"""What every block is made of: weights with named axes, linear products, RMSNorm, the gated MLP."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.axes import Rules


class KeySequence:
    """Fresh keys from one, by a Python counter.

    `nnx.Rngs` counts in a variable; under a trace, a thousand keys from it take ten seconds.
    """

    def __init__(self, rngs: nnx.Rngs):
        self._key = rngs.params()
        self._count = 0

    def params(self) -> jax.Array:
        """The next key."""
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


Keys = nnx.Rngs | KeySequence


def weight(
    rngs: Keys, axes: str, shape: tuple[int, ...], dtype: jnp.dtype, fan_in: int
) -> nnx.Param:
    """A normally distributed weight of standard deviation fan_in^-1/2, its axes named."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(value.astype(dtype), axes=axes)


def gain(axes: str, width: int, dtype: jnp.dtype) -> nnx.Param:
    """A norm's weight, ones."""
    return nnx.Param(jnp.ones((width,), dtype), axes=axes)


def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] times kernel [in, *out], accumulated in float32, in x's dtype."""
    flat = kernel.reshape(kernel.shape[0], -1).astype(x.dtype)
    out = jnp.matmul(x, flat, preferred_element_type=jnp.float32).astype(x.dtype)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:])


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) in float32, cast back, then times the gain."""
    x_f32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    return (x_f32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * scale.astype(x.dtype)


class Mlp(nnx.Module):
    """Weights of a gated feed-forward layer."""

    def __init__(self, D: int, F: int, *, dtype: jnp.dtype, rngs: Keys):
        self.gate_proj = weight(rngs, "D F", (D, F), dtype, D)
        self.up_proj = weight(rngs, "D F", (D, F), dtype, D)
        self.down_proj = weight(rngs, "F D", (F, D), dtype, F)


def partial_mlp(mlp: Mlp, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """This device's part of down(silu(gate x) * up x), to be summed over "F"."""
    gate = linear(x, mlp.gate_proj[...])
    up = linear(x, mlp.up_proj[...])
    return linear(jax.nn.silu(gate) * up, mlp.down_proj[...])


def mlp_layer(mlp: Mlp, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
    """The dense feed-forward layer: down(silu(gate x) * up x)."""
    with jax.named_scope("mlp"):
        return rules.sum(partial_mlp(mlp, x), "F")


def take_rows(table: Float[Array, "X *row"], at: Int[Array, "B T"]) -> Float[Array, "B T *row"]:
    """table[at]. XLA:CPU has no bfloat16 gather and would widen the whole table: take its bits."""
    if table.dtype != jnp.bfloat16:
        return table[at]
    return jax.lax.bitcast_convert_type(table.view(jnp.uint16)[at], jnp.bfloat16)
