"""What every block is made of: weights with named axes, and the gated MLP."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.norm_linear.reference import linear as linear
from kernels_pallas.norm_linear.reference import matmul_f32 as matmul_f32
from kernels_pallas.norm_linear.reference import rms_norm as rms_norm
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


class Mlp(nnx.Module):
    """Weights of a gated feed-forward layer."""

    def __init__(self, D: int, F: int, *, dtype: jnp.dtype, rngs: Keys):
        self.gate_proj = weight(rngs, "D F", (D, F), dtype, D)
        self.up_proj = weight(rngs, "D F", (D, F), dtype, D)
        self.down_proj = weight(rngs, "F D", (F, D), dtype, F)


def mlp_layer(mlp: Mlp, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
    """The dense feed-forward layer: down(silu(gate x) * up x)."""
    gate, up = linear(x, mlp.gate_proj[...]), linear(x, mlp.up_proj[...])
    return gated_linear(mlp, gate, up, rules)


def gated_linear(
    mlp: Mlp, gate: Float[Array, "B T F"], up: Float[Array, "B T F"], rules: Rules
) -> Float[Array, "B T D"]:
    """The rest of the layer once its two first products are taken: down(silu(gate) * up)."""
    with jax.named_scope("mlp"):
        return rules.sum(linear(jax.nn.silu(gate) * up, mlp.down_proj[...]), "F")


def take_rows(table: Float[Array, "X *row"], at: Int[Array, "B T"]) -> Float[Array, "B T *row"]:
    """table[at]. XLA:CPU has no bfloat16 gather and would widen the whole table: take its bits."""
    if table.dtype != jnp.bfloat16:
        return table[at]
    # XLA would take the view of the bits, as a copy of the whole table, out of a decoding loop.
    table, at = jax.lax.optimization_barrier((table, at))
    return jax.lax.bitcast_convert_type(table.view(jnp.uint16)[at], jnp.bfloat16)
