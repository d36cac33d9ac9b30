"""EAGLE-3 drafters, Llama-style and MLA-style: one layer over the target's hidden states.

Row i pairs the target's feature of position i with the token at position i+1, sits at position i
(RoPE and cache slot), and predicts the token at i+2 (EAGLE-3, arXiv 2503.01840, section 3.1):

    g = fc(concat of the tapped streams)      true features; while drafting, the row before's m
    u = [input_layernorm(embed(token)) | hidden_norm(g)]
    h = g + attention(u)                      (hidden_norm(g) + ... with `norm_before_residual`)
    m = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(m))

m is carried to the next draft step, or norm(m) with `norm_output` (EAGLE-3.1). The drafter may
borrow the target's embedding and head; its vocabulary may be a part of the target's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from kernels_pallas.mla_attention.reference import visible_slots
from kimi_jax.axes import WHOLE, Rules
from kimi_jax.config import ModelConfig
from kimi_jax.model import rope, transformer
from kimi_jax.model.attention import TreeRows, attend_blocked
from kimi_jax.model.cache import CACHE_AXES, write_rows
from kimi_jax.model.layers import (
    Keys,
    KeySequence,
    Mlp,
    gain,
    linear,
    matmul_f32,
    mlp_layer,
    rms_norm,
    weight,
)
from kimi_jax.model.mla import Attention, attention_layer, compress
from kimi_jax.model.transformer import Kimi
from spec.eagle3.config import DrafterConfig

Cache = tuple[jax.Array, ...]
"""What rows leave behind: latent rows [B*S, C+R], or keys and values [B*S, P, H] each."""


class LlamaAttention(nnx.Module):
    """Weights of the Llama-style drafter's attention; its input is twice the width."""

    def __init__(self, cfg: DrafterConfig, *, dtype: jnp.dtype, rngs: Keys):
        D, N, P, H = (
            cfg.hidden_size,
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
        )
        self.q_proj = weight(rngs, "D N H", (2 * D, N, H), dtype, 2 * D)
        self.k_proj = weight(rngs, "D P H", (2 * D, P, H), dtype, 2 * D)
        self.v_proj = weight(rngs, "D P H", (2 * D, P, H), dtype, 2 * D)
        self.o_proj = weight(rngs, "N H D", (N, H, D), dtype, N * H)


class Eagle3(nnx.Module):
    """Weights of a drafter, named as published.

    `draft_to_target` gives the target id of each draft id; None where they are the same.
    """

    def __init__(
        self,
        cfg: DrafterConfig,
        *,
        has_own_embedding: bool,
        has_own_head: bool,
        has_map: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        D, V, W = cfg.hidden_size, cfg.vocab_size, cfg.draft_vocab_size
        Z, wide = len(cfg.taps), cfg.target_hidden_size
        keys = KeySequence(rngs)
        if has_own_embedding:
            self.embed_tokens = weight(keys, "V D", (V, D), dtype, 4)
        if cfg.use_aux_hidden_state:
            self.fc = weight(keys, "ZD D", (Z * wide, D), dtype, Z * wide)
        if cfg.fc_norm:
            self.fc_norm = nnx.List([gain("D", wide, dtype) for _ in range(Z)])
        if cfg.norm_before_fc:
            self.input_norm = gain("ZD", Z * wide, dtype)
        self.input_layernorm = gain("D", D, dtype)
        self.hidden_norm = gain("D", D, dtype)
        if cfg.mla is not None:
            self.self_attn = Attention(cfg.mla, dtype=dtype, rngs=keys, input_width=2 * D)
        else:
            self.self_attn = LlamaAttention(cfg, dtype=dtype, rngs=keys)
        self.post_attention_layernorm = gain("D", D, dtype)
        self.mlp = Mlp(D, cfg.intermediate_size, dtype=dtype, rngs=keys)
        self.norm = gain("D", D, dtype)
        if has_own_head:
            self.lm_head = weight(keys, "D W", (D, W), dtype, D)
        if has_map:
            self.draft_to_target = nnx.Variable(jnp.arange(W, dtype=jnp.int32), axes="W_all")


def empty_cache(cfg: DrafterConfig, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
    """Zeros for `capacity` slots a row."""
    slots = batch * capacity
    if cfg.mla is not None:
        return (jnp.zeros((slots, cfg.mla.latent_width), dtype),)
    shape = (slots, cfg.num_key_value_heads, cfg.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def cache_axes(cfg: DrafterConfig) -> tuple[str, ...]:
    """The axes of `empty_cache`'s arrays."""
    return (CACHE_AXES,) if cfg.mla is not None else ("BS P H", "BS P H")


def target_taps(cfg: DrafterConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target's streams `features` reads: the last one alone without auxiliary states."""
    return cfg.taps if cfg.use_aux_hidden_state else (target.num_hidden_layers,)


def features(
    model: Eagle3, cfg: DrafterConfig, taps: tuple[Float[Array, "B T D"], ...], target: Kimi
) -> Float[Array, "B T D"]:
    """The drafter's input feature of each position, from the target's tapped streams."""
    dtype = model.norm[...].dtype
    if not cfg.use_aux_hidden_state:
        (last,) = taps
        return rms_norm(last, target.norm[...], target.cfg.rms_norm_eps).astype(dtype)
    return fuse(model, cfg, [tap.astype(dtype) for tap in taps])


def fuse(
    model: Eagle3, cfg: DrafterConfig, taps: Sequence[Float[Array, "B T D"]]
) -> Float[Array, "B T D"]:
    """`fc` over the tapped streams, normalised as the configuration says, in their dtype."""
    parts = list(taps)
    if cfg.fc_norm:
        norms = [scale[...] for scale in model.fc_norm]
        parts = [rms_norm(p, s, cfg.rms_norm_eps) for p, s in zip(parts, norms, strict=True)]
    joined = jnp.concatenate(parts, axis=-1)
    if cfg.norm_before_fc:
        joined = rms_norm(joined, model.input_norm[...], cfg.rms_norm_eps)
    return linear(joined, model.fc[...])


def forward(
    model: Eagle3,
    cfg: DrafterConfig,
    feature: Float[Array, "B T D"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: Cache,
    target: Kimi,
    *,
    rules: Rules,
    is_prefill: bool = False,
    tree: TreeRows | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Runs T rows; what each carries to the next draft step, and the cache with their rows.

    Args:
        feature: from `features`, or what the row before carried.
        next_tokens: target ids of the tokens one position after the rows'.
        positions: consecutive in a batch row; a row attends to slots 0..position.
        target: lends its embedding where the drafter has none.
        is_prefill: picks the attention form for many queries.
        tree: says where rows of a draft tree lie and what they see; their positions repeat.
    """
    with jax.named_scope("eagle3"):
        own = getattr(model, "embed_tokens", None)
        table = target.embed_tokens if own is None else own
        embedded = transformer.embed(table[...], next_tokens, rules)

        def attend(pair: Float[Array, "B T DD"]) -> tuple[Float[Array, "B T D"], Cache]:
            attn = model.self_attn
            if not isinstance(attn, Attention):
                return _llama_attention(
                    attn, cfg, pair, cache, positions, rules, is_prefill=is_prefill, tree=tree
                )
            assert cfg.mla is not None
            angles = rope.cos_sin(positions, cfg.rope, cfg.mla.qk_rope_head_dim)
            attended, rows = attention_layer(
                attn,
                cfg.mla,
                compress(attn, pair),
                cache[0],
                positions,
                angles,
                rules,
                is_prefill=is_prefill,
                tree=tree,
            )
            assert rows is not None  # a cache was given
            return attended, (rows,)

        return run_layer(model, cfg, feature, embedded, attend, rules)


def run_layer(
    model: Eagle3,
    cfg: DrafterConfig,
    feature: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    attend: Callable[[Float[Array, "B T DD"]], tuple[Float[Array, "B T D"], Any]],
    rules: Rules = WHOLE,
) -> tuple[Float[Array, "B T D"], Any]:
    """What each row carries on, and what `attend` gave beside its output.

    `attend` is the layer's attention, over whatever the rows see; it takes [embedding | feature].
    """
    eps = cfg.rms_norm_eps
    embedded = embedded.astype(feature.dtype)
    normed = rms_norm(feature, model.hidden_norm[...], eps)
    pair = jnp.concatenate([rms_norm(embedded, model.input_layernorm[...], eps), normed], -1)
    attended, kept = attend(pair)
    h = (normed if cfg.norm_before_residual else feature) + attended
    m = h + mlp_layer(model.mlp, rms_norm(h, model.post_attention_layernorm[...], eps), rules)
    return (rms_norm(m, model.norm[...], eps) if cfg.norm_output else m), kept


def draft_logits(
    model: Eagle3, cfg: DrafterConfig, carried: Float[Array, "*B D"], target: Kimi
) -> Float[Array, "*B W"]:
    """Float32 logits over this device's part of the draft vocabulary, from what a row carried."""
    own = getattr(model, "lm_head", None)
    head = transformer.head(target) if own is None else own[...]
    return head_logits(model, cfg, carried, head)


def head_logits(
    model: Eagle3, cfg: DrafterConfig, carried: Float[Array, "*B D"], head: Float[Array, "D W"]
) -> Float[Array, "*B W"]:
    """The same with a head given."""
    h = carried if cfg.norm_output else rms_norm(carried, model.norm[...], cfg.rms_norm_eps)
    return matmul_f32(h, head)


def to_target_ids(model: Eagle3, draft_ids: Int32[Array, "*B"]) -> Int32[Array, "*B"]:
    """Target ids of draft ids."""
    table = getattr(model, "draft_to_target", None)
    return draft_ids if table is None else table[...][draft_ids]


def to_target_logits(
    model: Eagle3, logits_f32: Float[Array, "B W"], vocab_size: int
) -> Float[Array, "B V"]:
    """Draft logits over the target's vocabulary; -inf for tokens the drafter does not know."""
    table = getattr(model, "draft_to_target", None)
    if table is None:
        return logits_f32
    whole = jnp.full((logits_f32.shape[0], vocab_size), -jnp.inf, jnp.float32)
    return whole.at[:, table[...]].set(logits_f32)


def llama_heads(
    attn: LlamaAttention,
    cfg: DrafterConfig,
    x: Float[Array, "B T DD"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T P H"], Float[Array, "B T P H"]]:
    """Queries, keys and values; RoPE over the whole head of the first two."""
    cos, sin = rope.cos_sin(positions, cfg.rope, cfg.head_dim)
    q = _rotate_half(linear(x, attn.q_proj[...]), cos, sin)
    k = _rotate_half(linear(x, attn.k_proj[...]), cos, sin)
    return q, k, linear(x, attn.v_proj[...])


def _llama_attention(
    attn: LlamaAttention,
    cfg: DrafterConfig,
    x: Float[Array, "B T DD"],
    cache: Cache,
    positions: Int[Array, "B T"],
    rules: Rules,
    *,
    is_prefill: bool,
    tree: TreeRows | None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Grouped-query attention over the cache, its rows written."""
    B, T, _ = x.shape
    H, scale = cfg.head_dim, cfg.head_dim**-0.5
    q, k, v = llama_heads(attn, cfg, x, positions)
    start = positions[:, 0] if tree is None else tree.start
    keys = write_rows(cache[0], k, start)
    values = write_rows(cache[1], v, start)
    N, P = q.shape[2], keys.shape[1]
    k_rows, v_rows = (c.reshape(B, -1, P, H) for c in (keys, values))
    if is_prefill:
        assert tree is None

        def keys_values(first: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
            def cut(rows: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(rows, first, count, axis=1)
                return jnp.repeat(part.swapaxes(1, 2), N // P, axis=1).astype(q.dtype)

            return cut(k_rows).swapaxes(2, 3), cut(v_rows)

        out = attend_blocked(
            q.swapaxes(1, 2),
            keys_values,
            positions,
            num_slots=k_rows.shape[1],
            value_width=H,
            scale=scale,
        ).swapaxes(1, 2)
    else:
        # [B, P, T*N/P, H]: the queries of one key head are rows of one product.
        grouped = q.reshape(B, T, P, N // P, H).transpose(0, 2, 1, 3, 4).reshape(B, P, -1, H)
        k_heads, v_heads = (rows.transpose(0, 2, 1, 3) for rows in (k_rows, v_rows))
        scores_f32 = scale * jnp.einsum(
            "bpqh,bpsh->bpqs",
            grouped,
            k_heads.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )
        last = positions if tree is None else tree.last
        seen = visible_slots(last, k_rows.shape[1], None if tree is None else tree.mask)
        seen = jnp.repeat(seen, N // P, axis=1)[:, None]
        weights_f32 = jax.nn.softmax(jnp.where(seen, scores_f32, -jnp.inf), axis=-1)
        out = jnp.matmul(
            weights_f32.astype(q.dtype),
            v_heads.astype(q.dtype),
            preferred_element_type=jnp.float32,
        ).astype(q.dtype)
        out = out.reshape(B, P, T, N // P, H).transpose(0, 2, 1, 3, 4)
    o_proj = attn.o_proj[...]
    y = linear(out.reshape(B, T, -1), o_proj.reshape(-1, o_proj.shape[-1]))
    return rules.sum(y, "N"), (keys, values)


def _rotate_half(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """RoPE on the pairs (i, i + H/2), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)
