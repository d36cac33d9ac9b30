"""The choice of experts from the router's logits: the contract, in plain jnp.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): scores are sigmoids; a bias balances the load by
entering the choice of experts and nothing else; the chosen scores, without the bias, are normalised
and scaled. Everything is float32.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Choosing:
    """How experts are chosen, in the spelling of the published configuration."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


class Routing(NamedTuple):
    """Each token's experts (the lower id first among equals) and their shares of its output."""

    expert_ids: Int[Array, "T A"]
    combine_f32: Float[Array, "T A"]


def choose_experts(
    logits_f32: Float[Array, "T E"],
    bias_f32: Float[Array, " E"],
    is_real: Bool[Array, " T"] | None,
    choosing: Choosing,
) -> Routing:
    """Top experts by sigmoid score plus bias; shares from the scores alone.

    Padding, where `is_real` is False, chooses no expert: its ids are -1.
    """
    scores_f32 = jax.nn.sigmoid(logits_f32)
    choice_f32 = _best_groups(scores_f32 + bias_f32, choosing)
    _, ids = jax.lax.top_k(choice_f32, choosing.num_experts_per_tok)
    shares_f32 = jnp.take_along_axis(scores_f32, ids, axis=-1)
    if choosing.norm_topk_prob:
        shares_f32 = shares_f32 / (jnp.sum(shares_f32, axis=-1, keepdims=True) + 1e-20)
    if is_real is not None:
        ids = jnp.where(is_real[:, None], ids, -1)
    return Routing(ids, shares_f32 * choosing.routed_scaling_factor)


def _best_groups(choice_f32: Float[Array, "T E"], choosing: Choosing) -> Float[Array, "T E"]:
    """Experts outside the best `topk_group` groups cannot be chosen (-inf, even below zero)."""
    if choosing.n_group == 1:
        return choice_f32
    T = choice_f32.shape[0]
    grouped = choice_f32.reshape(T, choosing.n_group, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, kept = jax.lax.top_k(jnp.sum(best_two, axis=-1), choosing.topk_group)
    keep = jnp.any(jax.nn.one_hot(kept, choosing.n_group, dtype=jnp.bool_), axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice_f32.shape)
