"""Absorbed MLA attention over the latent cache: the contract, in plain jnp.

Multi-query attention with one latent head (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): keys are
the cached rows [latent | rotated key], values their latent part.

    score[n, s] = scale * (q_latent[n] . latent[s] + q_rope[n] . rope[s])
    out[n]      = sum_s softmax_s(score[n, s]) latent[s]

The log-sum-exp of the scores lets attention over the parts of a cache be put together later:
out = sum_parts exp(lse_part - lse) out_part, with lse the log-sum-exp of the parts' own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def mla_attention(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    tree_mask: Bool[Array, "B T X"] | None = None,
) -> Float[Array, "B T N C"]:
    """Attends slots 0..last of each query; softmax in float32, result in the query's dtype.

    Row b's slots are `cache[b*S:(b+1)*S]`, and the new tokens' own are among them already. Slots a
    query does not see are never read as more than a zero weight, so they may hold anything finite.

    Args:
        last: the last slot of the text each query sees: its own position, tokens being a text.
        tree_mask: for the branches of a draft tree, which of the X slots after the text a query
            sees besides; `last` is then the same for all queries of a row.
    """
    attend = functools.partial(_attend, scale=scale, C=q_latent.shape[-1])
    out = _over_batch(attend, q_latent, q_rope, cache, last, tree_mask)
    return out.reshape(q_latent.shape).astype(q_latent.dtype)


def mla_attention_with_lse(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    tree_mask: Bool[Array, "B T X"] | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """`mla_attention`, and the log-sum-exp of each query's scores in float32.

    A query may see nothing here (`last` -1): its output is zero and its log-sum-exp -inf.
    """
    attend = functools.partial(_attend_with_lse, scale=scale, C=q_latent.shape[-1])
    out, lse = _over_batch(attend, q_latent, q_rope, cache, last, tree_mask)
    return out.reshape(q_latent.shape).astype(q_latent.dtype), lse.reshape(q_latent.shape[:3])


def merge_parts(
    parts: Float[Array, "X B T N C"], lse_f32: Float[Array, "X B T N"]
) -> Float[Array, "B T N C"]:
    """Attention over all of a cache from attention over X parts of it, as this module's head says.

    In float32, the result in the parts' dtype; zero for a query that saw nothing anywhere.
    """
    # A finite stand-in where nothing is seen: -inf less -inf would be nan.
    largest_f32 = jnp.maximum(jnp.max(lse_f32, axis=0), -1e30)
    weights_f32 = jnp.exp(lse_f32 - largest_f32)[..., None]
    total_f32 = jnp.maximum(jnp.sum(weights_f32, axis=0), jnp.finfo(jnp.float32).tiny)
    out_f32 = jnp.sum(weights_f32 * parts.astype(jnp.float32), axis=0) / total_f32
    return out_f32.astype(parts.dtype)


def visible_slots(
    last: Int[Array, "B T"], num_slots: int, tree_mask: Bool[Array, "B T X"] | None = None
) -> Bool[Array, "B T S"]:
    """Which of a row's S slots each query sees, as `mla_attention` describes it."""
    slots = jnp.arange(num_slots, dtype=last.dtype)
    text = slots <= last[..., None]
    if tree_mask is None:
        return text
    first = last[:, 0] + 1

    def put(text: Bool[Array, "T S"], mask: Bool[Array, "T X"], first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(text, mask, first, axis=1)

    return jax.vmap(put)(text, tree_mask, first)


def _over_batch(
    attend: Any,
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    tree_mask: Bool[Array, "B T X"] | None,
) -> Any:
    """`attend(queries, slots, visible)` of every batch row, its queries as T*N rows."""
    B, T, N, _ = q_latent.shape
    S = cache.shape[0] // B
    query = jnp.concatenate([q_latent, q_rope], axis=-1).astype(cache.dtype)
    query = query.reshape(B, T * N, -1)
    seen = jnp.repeat(visible_slots(last, S, tree_mask), N, axis=1)
    if B == 1:
        # Products of matrices, not a batch of one: XLA:CPU then reads the cache where it lies.
        return attend(query[0], cache, seen[0])
    return jax.vmap(attend)(query, cache.reshape(B, S, -1), seen)


def _attend(
    query: Float[Array, "TN CR"],
    cache: Float[Array, "S CR"],
    visible: Bool[Array, "TN S"],
    scale: float,
    C: int,
) -> Float[Array, "TN C"]:
    f32 = jnp.float32
    scores_f32 = jnp.matmul(query, cache.T, preferred_element_type=f32) * scale
    weights_f32 = jax.nn.softmax(jnp.where(visible, scores_f32, -jnp.inf), axis=-1)
    # The product runs over the cache's full width and is cut afterwards: cutting the cache first
    # makes XLA copy it, one copy a layer and step.
    context = jnp.matmul(weights_f32.astype(cache.dtype), cache, preferred_element_type=f32)
    return context[:, :C]


def _attend_with_lse(
    query: Float[Array, "TN CR"],
    cache: Float[Array, "S CR"],
    visible: Bool[Array, "TN S"],
    scale: float,
    C: int,
) -> tuple[Float[Array, "TN C"], Float[Array, " TN"]]:
    scores_f32 = jnp.matmul(query, cache.T, preferred_element_type=jnp.float32) * scale
    lse = jax.nn.logsumexp(jnp.where(visible, scores_f32, -jnp.inf), axis=-1)
    # A finite stand-in where nothing is seen: -inf less -inf would be nan.
    weights_f32 = jnp.where(visible, jnp.exp(scores_f32 - jnp.maximum(lse, -1e30)[:, None]), 0.0)
    weights = weights_f32.astype(cache.dtype)
    context = jnp.matmul(weights, cache, preferred_element_type=jnp.float32)
    return context[:, :C], lse
