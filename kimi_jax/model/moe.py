"""Mixture of experts: the sum of the experts the router chose and the shared one.

Everything the router decides with is float32 (`kernels_pallas/router/reference.py` says how).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kernels_pallas.dispatch import Implementation
from kernels_pallas.grouped_matmul import ExpertWeights, SharedExpert, expert_ffn, num_experts
from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight
from kernels_pallas.router import Choosing, Routing, choose_experts
from kimi_jax.axes import Rules
from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import Keys, Mlp, weight


class Int4Linear(nnx.Module):
    """One matrix of every expert, INT4 in the kernel layout (zeros until loaded)."""

    def __init__(self, axes: str, shape: tuple[int, int, int], scale_dtype: jnp.dtype):
        E, width, out = shape
        self.packed = nnx.Param(jnp.full((E, width // 2, out), 0x88, jnp.uint8), axes=axes)
        self.scale = nnx.Param(jnp.zeros((E, width // GROUP_SIZE, out), scale_dtype), axes=axes)


class Experts(nnx.Module):
    """Weights of the routed experts: floating point, or INT4 where the config is quantised."""

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: Keys):
        E, D, F = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        if cfg.quantization is not None:
            self.gate_proj = Int4Linear("E D F", (E, D, F), dtype)
            self.up_proj = Int4Linear("E D F", (E, D, F), dtype)
            self.down_proj = Int4Linear("E F D", (E, F, D), dtype)
        else:
            self.gate_proj = weight(rngs, "E D F", (E, D, F), dtype, D)
            self.up_proj = weight(rngs, "E D F", (E, D, F), dtype, D)
            self.down_proj = weight(rngs, "E F D", (E, F, D), dtype, F)

    def arrays(self) -> ExpertWeights:
        """The weights as the expert products take them."""
        return ExpertWeights(*map(_array, (self.gate_proj, self.up_proj, self.down_proj)))


class Moe(nnx.Module):
    """Weights of a mixture-of-experts layer."""

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: Keys):
        D, E = cfg.hidden_size, cfg.n_routed_experts
        # Scores start close together, so that the balancing bias can tell experts apart.
        self.gate = weight(rngs, "D E_all", (D, E), dtype, 25 * D)
        # Never rounded to bfloat16: biases a hundredth apart would change the chosen experts.
        self.e_score_correction_bias = nnx.Param(jnp.zeros((E,), jnp.float32), axes="E_all")
        self.experts = Experts(cfg, dtype=dtype, rngs=rngs)
        if cfg.n_shared_experts:
            shared_width = cfg.moe_intermediate_size * cfg.n_shared_experts
            self.shared_experts = Mlp(D, shared_width, dtype=dtype, rngs=rngs)


class MoeInputs(NamedTuple):
    """What a layer takes of its tokens: themselves, the router's logits, and the shared expert's
    two first products (None where there is none)."""

    x: Float[Array, "B T D"]
    logits_f32: Float[Array, "B T E"]
    gate: Float[Array, "B T F"] | None = None
    up: Float[Array, "B T F"] | None = None


class InputKernels(NamedTuple):
    """Matrices whose products with x make `MoeInputs`, in order, and the products' dtypes."""

    kernels: tuple[Float[Array, "D _"], ...]
    dtypes: tuple[jnp.dtype, ...]


def input_kernels(moe: Moe, dtype: jnp.dtype) -> InputKernels:
    """Of tokens of this dtype; the router's product is float32."""
    f32 = jnp.dtype(jnp.float32)
    shared = getattr(moe, "shared_experts", None)
    if shared is None:
        return InputKernels((moe.gate[...],), (f32,))
    kernels = moe.gate[...], shared.gate_proj[...], shared.up_proj[...]
    return InputKernels(kernels, (f32, dtype, dtype))


def choosing(cfg: ModelConfig) -> Choosing:
    """How this model chooses experts."""
    return Choosing(
        num_experts_per_tok=cfg.num_experts_per_tok,
        n_group=cfg.n_group,
        topk_group=cfg.topk_group,
        norm_topk_prob=cfg.norm_topk_prob,
        routed_scaling_factor=cfg.routed_scaling_factor,
    )


def moe_layer(
    moe: Moe,
    cfg: ModelConfig,
    inputs: MoeInputs,
    is_real: Bool[Array, "B T"] | None,
    rules: Rules,
    *,
    router_implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T D"], Routing]:
    """Shared expert plus the share-weighted routed experts; padding tokens choose no expert.

    Each device runs its own experts, or its part of each one's width, and its part of the shared
    expert; one sum over devices completes both.
    """
    with jax.named_scope("moe"):
        B, T, D = inputs.x.shape
        x, logits_f32 = (a.reshape(B * T, -1) for a in inputs[:2])
        real = None if is_real is None else is_real.reshape(-1)
        routing = choose_experts(
            logits_f32,
            moe.e_score_correction_bias[...],
            real,
            choosing(cfg),
            implementation=router_implementation,
        )
        experts = moe.experts.arrays()
        # Ids of experts held elsewhere fall outside 0..E_local-1.
        ids = routing.expert_ids - rules.shard_index("E") * num_experts(experts)
        shared = None
        if inputs.gate is not None and inputs.up is not None:
            gate, up = (a.reshape(B * T, -1) for a in (inputs.gate, inputs.up))
            shared = SharedExpert(gate, up, moe.shared_experts.down_proj[...])
        out = expert_ffn(x, experts, ids, routing.combine_f32, shared)
        return rules.sum(out.reshape(B, T, D), "E F"), routing


def _array(weight: nnx.Param | Int4Linear) -> jax.Array | Int4Weight:
    if isinstance(weight, Int4Linear):
        return Int4Weight(weight.packed[...], weight.scale[...])
    return weight[...]
