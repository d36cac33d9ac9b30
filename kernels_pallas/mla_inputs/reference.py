"""What absorbed attention needs of a call's projections: the contract, in plain jnp.

DeepSeek-V2 (arXiv 2405.04434, section 2.1.2), of each token and head:

    row        = [norm(c) | rope(k_rope)]         into the cache, kv = [c | k_rope]
    q_latent   = W_uk^T q_nope                    q = [q_nope | q_rope]
    q_rope'    = rope(q_rope)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.norm_linear.reference import rms_norm
from kernels_pallas.slots import ALL, Share, write_rows


class MlaInputs(NamedTuple):
    """Absorbed queries, and the cache with the tokens' rows."""

    q_latent: Float[Array, "B T N C"]
    q_rope: Float[Array, "B T N R"]
    cache: Float[Array, "BS CR"]


def mla_inputs(
    q: Float[Array, "B T N UR"],
    kv: Float[Array, "B T CR"],
    gain: Float[Array, " C"],
    w_uk: Float[Array, "N U C"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    cache: Float[Array, "BS CR"],
    start: Int[Array, " B"],
    *,
    eps: float,
    share: Share = ALL,
) -> MlaInputs:
    """The op as this module describes it; batch row b's rows go to slots start[b]..start[b]+T.

    `start + T` must not pass the capacity: it would reach into the next row's slots. Of a cache
    that holds a `share` of the slots, rows of other slots are not written.
    """
    U, C = w_uk.shape[1:]
    return MlaInputs(
        q_latent=per_head(q[..., :U], w_uk.astype(q.dtype)),
        q_rope=rotate(q[..., U:], cos, sin),
        cache=write_rows(cache, latent_rows(kv, gain, cos, sin, eps=eps), start, share),
    )


def latent_rows(
    kv: Float[Array, "B T CR"],
    gain: Float[Array, " C"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    eps: float,
) -> Float[Array, "B T CR"]:
    """What tokens leave in the cache: the latent after its norm, the shared key after RoPE."""
    C = gain.shape[0]
    latent = rms_norm(kv[..., :C], gain, eps)
    return jnp.concatenate([latent, rotate(kv[..., C:], cos, sin)], axis=-1)


def rotate(
    x: Float[Array, "B T *N R"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T *N R"]:
    """Rotates each interleaved pair by its angle, in float32; same dtype and layout as x."""
    even = x[..., 0::2].astype(jnp.float32)
    odd = x[..., 1::2].astype(jnp.float32)
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    out = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return out.reshape(x.shape).astype(x.dtype)


def per_head(x: Float[Array, "B T N X"], w: Float[Array, "N X Y"]) -> Float[Array, "B T N Y"]:
    """Each head's own product. Heads lead the batched product: XLA:CPU is 10x slower otherwise."""
    B, T, N, X = x.shape
    heads_first = x.reshape(B * T, N, X).swapaxes(0, 1)
    out = jnp.matmul(heads_first, w, preferred_element_type=jnp.float32).astype(x.dtype)
    return out.swapaxes(0, 1).reshape(B, T, N, -1)
