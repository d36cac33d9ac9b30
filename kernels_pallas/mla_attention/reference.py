"""Absorbed MLA attention over the latent cache: the contract, in plain jnp.

Multi-query attention with one latent head (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): keys are
the cached rows [latent | rotated key], values their latent part.

    score[n, s] = scale * (q_latent[n] . latent[s] + q_rope[n] . rope[s])
    out[n]      = sum_s softmax_s(score[n, s]) latent[s]
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mla_attention(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "B S CR"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> Float[Array, "B T N C"]:
    """Attends slots 0..position of each row; softmax in float32, result in the query's dtype.

    The new tokens' own rows are already in the cache. Slots past a query's position are never
    read as more than a zero weight, so they may hold anything finite.
    """
    C = q_latent.shape[-1]
    S = cache.shape[1]
    query = jnp.concatenate([q_latent, q_rope], axis=-1).astype(cache.dtype)
    scores_f32 = jnp.einsum("btnc,bsc->btns", query, cache, preferred_element_type=jnp.float32)
    visible = jnp.arange(S, dtype=positions.dtype) <= positions[:, :, None, None]
    weights_f32 = jax.nn.softmax(jnp.where(visible, scores_f32 * scale, -jnp.inf), axis=-1)
    # The product runs over the cache's full width and is cut afterwards: cutting the cache first
    # makes XLA copy it, one copy a layer and step.
    context = jnp.einsum(
        "btns,bsc->btnc",
        weights_f32.astype(cache.dtype),
        cache,
        preferred_element_type=jnp.float32,
    )
    return context[..., :C].astype(q_latent.dtype)
