"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its two forms.

    c = norm(W_dkv x), k_rope = rope(W_kr x)                 what the cache keeps of a token
    q = W_uq norm(W_dq x) = [q_nope | rope(q_rope)]          per head
    naive:     k = [W_uk c | k_rope], v = W_uv c, out = softmax(scale q k) v
    absorbed:  q' = W_uk^T q_nope, out = W_uv (softmax(scale (q' c + q_rope k_rope)) c)

The forms are equal. Naive does less arithmetic a score and is used where there are many queries
(training, prefill); absorbed reads the cache as it lies and is used for few queries (decoding,
verification). `kv_b_proj` of the checkpoint is kept as its two halves, W_uk and W_uv.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.mla_attention import mla_attention, mla_attention_with_lse
from kernels_pallas.mla_attention.reference import merge_parts
from kernels_pallas.mla_inputs import mla_inputs
from kernels_pallas.mla_inputs.reference import latent_rows, per_head
from kernels_pallas.norm_linear import norm_linear
from kimi_jax.axes import WHOLE, Rules
from kimi_jax.config import ModelConfig
from kimi_jax.model import rope
from kimi_jax.model.attention import TreeRows, attend_blocked
from kimi_jax.model.cache import write_rows
from kimi_jax.model.layers import Keys, gain, linear, rms_norm, weight


class Attention(nnx.Module):
    """Weights of one attention layer; `input_width` where its input is not the model's width."""

    def __init__(
        self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: Keys, input_width: int | None = None
    ):
        D, N, Q, C = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
        U, R, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        width = input_width or D
        self.q_a_proj = weight(rngs, "D Q", (width, Q), dtype, width)
        self.q_a_layernorm = gain("Q", Q, dtype)
        self.q_b_proj = weight(rngs, "Q N UR", (Q, N, U + R), dtype, Q)
        self.kv_a_proj_with_mqa = weight(rngs, "D CR", (width, C + R), dtype, width)
        self.kv_a_layernorm = gain("C", C, dtype)
        self.kv_b_proj_k = weight(rngs, "N U C", (N, U, C), dtype, C)
        self.kv_b_proj_v = weight(rngs, "N C H", (N, C, H), dtype, C)
        self.o_proj = weight(rngs, "N H D", (N, H, D), dtype, N * H)


class Compressed(NamedTuple):
    """A call's two first products: what queries are made from, and what the cache keeps."""

    q_a: Float[Array, "B T Q"]
    kv_a: Float[Array, "B T CR"]


class Projected(NamedTuple):
    """A call's queries, and the rows its tokens leave in the cache."""

    q_nope: Float[Array, "B T N U"]
    q_rope: Float[Array, "B T N R"]
    rows: Float[Array, "B T CR"]


def input_kernels(attn: Attention) -> tuple[Float[Array, "D _"], ...]:
    """Matrices whose products with the layer's input make `Compressed`, in order."""
    return attn.q_a_proj[...], attn.kv_a_proj_with_mqa[...]


def compress(attn: Attention, x: Float[Array, "B T width"]) -> Compressed:
    """The two first products of an input that is normalised already."""
    return Compressed(*(linear(x, kernel) for kernel in input_kernels(attn)))


def project(
    attn: Attention, cfg: ModelConfig, inputs: Compressed, cos: jax.Array, sin: jax.Array
) -> Projected:
    """Queries of this device's heads and the tokens' latent rows, RoPE applied to both."""
    U, eps = cfg.qk_nope_head_dim, cfg.latent_norm_eps
    q = linear(rms_norm(inputs.q_a, attn.q_a_layernorm[...], eps), attn.q_b_proj[...])
    return Projected(
        q_nope=q[..., :U],
        q_rope=rope.rotate(q[..., U:], cos, sin),
        rows=latent_rows(inputs.kv_a, attn.kv_a_layernorm[...], cos, sin, eps=eps),
    )


def attend_absorbed(
    attn: Attention,
    cfg: ModelConfig,
    inputs: Compressed,
    cache: Float[Array, "BS CR"],
    positions: Int[Array, "B T"],
    angles: tuple[jax.Array, jax.Array],
    rules: Rules = WHOLE,
    tree: TreeRows | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "BS CR"]]:
    """Attention over slots 0..position, the heads' key and value maps folded into q and out; and
    the cache with the tokens' rows.

    Rows of a draft tree see what `tree` says instead.
    """
    eps, w_q = cfg.latent_norm_eps, attn.q_b_proj[...]
    flat = w_q.reshape(w_q.shape[0], -1)
    q = norm_linear(inputs.q_a, None, attn.q_a_layernorm[...], (flat,), eps=eps).products[0]
    q_latent, q_rope, cache = mla_inputs(
        q.reshape(*q.shape[:2], *w_q.shape[1:]),
        inputs.kv_a,
        attn.kv_a_layernorm[...],
        attn.kv_b_proj_k[...],
        *angles,
        cache,
        positions[:, 0] if tree is None else tree.start,
        eps=eps,
        share=rules.share(),
    )
    last, mask = (positions, None) if tree is None else (tree.last, tree.mask)
    operands, scale = (q_latent, q_rope, cache, last), cfg.softmax_scale
    if rules.mesh_axes("S"):
        context = _attend_shares(*operands, rules, scale=scale, tree_mask=mask)
    else:
        context = mla_attention(*operands, scale=scale, tree_mask=mask)
    return per_head(context, attn.kv_b_proj_v[...].astype(context.dtype)), cache


def _attend_shares(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    rules: Rules,
    *,
    scale: float,
    tree_mask: Array | None,
) -> Float[Array, "B T N C"]:
    """`mla_attention` over a cache whose slots are shared out.

    Each device attends the queries of all heads over its own slots; then the parts of a head meet
    on the device that has it. Two exchanges, of queries and of parts with their log-sum-exp.
    """
    axes, share = rules.mesh_axes("S"), rules.share()
    assert axes == rules.mesh_axes("N")
    B, T, N, C = q_latent.shape
    q = jax.lax.all_gather(jnp.concatenate([q_latent, q_rope], -1), axes, axis=2, tiled=True)
    parts, lse_f32 = mla_attention_with_lse(
        q[..., :C],
        q[..., C:],
        cache,
        share.last(last),
        scale=scale,
        tree_mask=None if tree_mask is None else share.tree_mask(tree_mask, last[:, 0]),
    )
    # The log-sum-exp travels beside the values, its bits as one or two of their kind.
    bits = jax.lax.bitcast_convert_type(lse_f32, parts.dtype).reshape(B, T, share.count * N, -1)
    outgoing = jnp.concatenate([parts, bits], -1).reshape(B, T, share.count, N, -1)
    met = jax.lax.all_to_all(outgoing, axes, split_axis=2, concat_axis=0)
    bits = met[..., C:] if parts.dtype.itemsize < 4 else met[..., C]
    return merge_parts(met[..., :C], jax.lax.bitcast_convert_type(bits, jnp.float32))


def attend_naive(
    attn: Attention,
    cfg: ModelConfig,
    queries: Projected,
    rows: Float[Array, "B S CR"],
    visible: Array,
) -> Float[Array, "B T N H"]:
    """Attention over expanded keys and values; `visible` [B, T, S] says who sees what."""
    k, v = expand(attn, cfg, rows.astype(queries.q_nope.dtype))
    q = _heads_first(queries)
    scores_f32 = jnp.matmul(q, k, preferred_element_type=jnp.float32) * cfg.softmax_scale
    weights_f32 = jax.nn.softmax(jnp.where(visible[:, None], scores_f32, -jnp.inf), axis=-1)
    out_f32 = jnp.matmul(weights_f32.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out_f32.astype(v.dtype).swapaxes(1, 2)


def attend_naive_blocked(
    attn: Attention,
    cfg: ModelConfig,
    queries: Projected,
    cache: Float[Array, "BS CR"],
    positions: Int[Array, "B T"],
    first: Int[Array, "B T"] | None = None,
    rules: Rules = WHOLE,
) -> Float[Array, "B T N H"]:
    """`attend_naive` over cache slots first..position, a block of keys expanded at a time.

    Where slots are shared out, the latent rows of each block are gathered.
    """
    B, shares = queries.q_nope.shape[0], rules.num_shards("S")
    slots_of_rows = cache.reshape(B, -1, cache.shape[1])

    def keys_values(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        own = (start // shares, count // shares)
        rows = jax.lax.dynamic_slice_in_dim(slots_of_rows, *own, axis=1)
        if shares > 1:
            # [B, own slots, devices, C+R]: a device's slot j is slot j * devices + its index.
            rows = jax.lax.all_gather(rows, rules.mesh_axes("S"), axis=2)
            rows = rows.reshape(B, count, -1)
        return expand(attn, cfg, rows.astype(queries.q_nope.dtype))

    out = attend_blocked(
        _heads_first(queries),
        keys_values,
        positions,
        num_slots=slots_of_rows.shape[1] * shares,
        value_width=cfg.v_head_dim,
        scale=cfg.softmax_scale,
        first=first,
    )
    return out.swapaxes(1, 2)


def attention_layer(
    attn: Attention,
    cfg: ModelConfig,
    inputs: Compressed,
    cache: Float[Array, "BS CR"] | None,
    positions: Int[Array, "B T"],
    angles: tuple[jax.Array, jax.Array],
    rules: Rules,
    *,
    is_prefill: bool = False,
    tree: TreeRows | None = None,
    first: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "BS CR"] | None]:
    """One attention layer and the cache with its tokens' rows written.

    Without a cache the T tokens are a whole sequence: causal, naive, differentiable; or several,
    one after the other, where `first` gives the place of each token's first, and not differentiable
    then. Rows of a draft tree are written and see as `tree` says; they are never a prefill.
    """
    with jax.named_scope("mla"):
        assert tree is None or (cache is not None and not is_prefill)
        assert first is None or cache is None
        if cache is not None and not is_prefill:
            out, cache = attend_absorbed(attn, cfg, inputs, cache, positions, angles, rules, tree)
        else:
            queries = project(attn, cfg, inputs, *angles)
            if cache is not None:
                cache = write_rows(cache, queries.rows, positions[:, 0], rules.share())
                out = attend_naive_blocked(attn, cfg, queries, cache, positions, rules=rules)
            elif first is not None:
                places = jnp.arange(positions.shape[1], dtype=jnp.int32)
                places = jnp.broadcast_to(places, positions.shape)
                rows = queries.rows.reshape(-1, queries.rows.shape[-1])
                out = attend_naive_blocked(attn, cfg, queries, rows, places, first)
            else:
                visible = positions[:, :, None] >= positions[:, None, :]
                out = attend_naive(attn, cfg, queries, queries.rows, visible)
        flat = out.reshape(*out.shape[:2], -1)
        o_proj = attn.o_proj[...]
        y = linear(flat, o_proj.reshape(-1, o_proj.shape[-1]))
        return rules.sum(y, "N"), cache


def _heads_first(queries: Projected) -> Float[Array, "B N T UR"]:
    """Both parts of the queries, heads before tokens."""
    return jnp.concatenate([queries.q_nope, queries.q_rope], axis=-1).swapaxes(1, 2)


def expand(
    attn: Attention, cfg: ModelConfig, rows: Float[Array, "B S CR"]
) -> tuple[Float[Array, "B N UR S"], Float[Array, "B N S H"]]:
    """Keys (each a column) and values of every head."""
    B, S, _ = rows.shape
    latent, k_rope = rows[..., : cfg.kv_lora_rank], rows[..., cfg.kv_lora_rank :]
    w_uk, w_uv = attn.kv_b_proj_k[...].astype(rows.dtype), attn.kv_b_proj_v[...].astype(rows.dtype)
    f32 = jnp.float32
    k_nope = jnp.einsum("nuc,bsc->bnus", w_uk, latent, preferred_element_type=f32)
    v = jnp.einsum("bsc,nch->bnsh", latent, w_uv, preferred_element_type=f32)
    shared = (B, w_uk.shape[0], cfg.qk_rope_head_dim, S)
    k_rope = jnp.broadcast_to(k_rope.swapaxes(1, 2)[:, None], shared)
    return jnp.concatenate([k_nope.astype(rows.dtype), k_rope], axis=2), v.astype(rows.dtype)
