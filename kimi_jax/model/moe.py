"""Mixture of experts: the sigmoid router and the sum of routed and shared experts.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): scores are sigmoids; a bias balances the load by
entering the choice of experts and nothing else; the chosen scores, without the bias, are normalised
and scaled. Everything the router decides with is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul import ExpertWeights, expert_ffn, num_experts
from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight
from kimi_jax.axes import Rules
from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import Keys, Mlp, partial_mlp, weight


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


class Routing(NamedTuple):
    """Each token's experts (the lower id first among equals) and their shares of its output."""

    expert_ids: Int[Array, "T A"]
    combine_f32: Float[Array, "T A"]


def route(
    x: Float[Array, "T D"],
    gate: Float[Array, "D E"],
    bias_f32: Float[Array, " E"],
    cfg: ModelConfig,
) -> Routing:
    """Top experts by sigmoid score plus bias; shares from the scores alone."""
    f32 = jnp.float32
    # HIGHEST: the default precision rounds float32 operands on accelerators.
    logits_f32 = jnp.matmul(x.astype(f32), gate.astype(f32), precision=jax.lax.Precision.HIGHEST)
    scores_f32 = jax.nn.sigmoid(logits_f32)
    choice_f32 = _best_groups(scores_f32 + bias_f32, cfg)
    _, ids = jax.lax.top_k(choice_f32, cfg.num_experts_per_tok)
    shares_f32 = jnp.take_along_axis(scores_f32, ids, axis=-1)
    if cfg.norm_topk_prob:
        shares_f32 = shares_f32 / (jnp.sum(shares_f32, axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, shares_f32 * cfg.routed_scaling_factor)


def _best_groups(choice_f32: Float[Array, "T E"], cfg: ModelConfig) -> Float[Array, "T E"]:
    """Experts outside the best `topk_group` groups cannot be chosen (-inf, even below zero)."""
    if cfg.n_group == 1:
        return choice_f32
    T = choice_f32.shape[0]
    grouped = choice_f32.reshape(T, cfg.n_group, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, kept = jax.lax.top_k(jnp.sum(best_two, axis=-1), cfg.topk_group)
    keep = jnp.any(jax.nn.one_hot(kept, cfg.n_group, dtype=jnp.bool_), axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice_f32.shape)


def moe_layer(
    moe: Moe,
    cfg: ModelConfig,
    x: Float[Array, "B T D"],
    is_real: Bool[Array, "B T"] | None,
    rules: Rules,
) -> tuple[Float[Array, "B T D"], Routing]:
    """Shared expert plus the share-weighted routed experts; padding tokens choose no expert.

    Each device runs its own experts, or its part of each one's width, and its part of the shared
    expert; one sum over devices completes both.
    """
    with jax.named_scope("moe"):
        B, T, D = x.shape
        flat = x.reshape(B * T, D)
        bias_f32 = moe.e_score_correction_bias[...]
        routing = route(flat, moe.gate[...], bias_f32, cfg)
        experts = moe.experts.arrays()
        E_local = num_experts(experts)
        # Ids of experts held elsewhere fall outside 0..E_local-1, and so do those of padding.
        ids = routing.expert_ids - rules.shard_index("E") * E_local
        if is_real is not None:
            ids = jnp.where(is_real.reshape(-1, 1), ids, -1)
        out_f32 = expert_ffn(flat, experts, ids, routing.combine_f32)
        out = out_f32.astype(x.dtype).reshape(B, T, D)
        if cfg.n_shared_experts:
            out = out + partial_mlp(moe.shared_experts, x)
        return rules.sum(out, "E F"), routing


def _array(weight: nnx.Param | Int4Linear) -> jax.Array | Int4Weight:
    if isinstance(weight, Int4Linear):
        return Int4Weight(weight.packed[...], weight.scale[...])
    return weight[...]
