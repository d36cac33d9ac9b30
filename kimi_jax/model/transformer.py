"""The text model: embedding, blocks, final norm, head; inference and training by one `forward`.

Layers are an unrolled list: a whole step is then one launch graph on a GPU. Hidden-state taps name
the residual stream *entering* a layer; tap `num_hidden_layers` is the stream after the last layer,
before the final norm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.norm_linear import norm_linear
from kimi_jax.axes import WHOLE, Rules, pytree_dataclass
from kimi_jax.config import ModelConfig
from kimi_jax.model import mla, moe, rope
from kimi_jax.model.attention import TreeRows
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.layers import (
    Keys,
    KeySequence,
    Mlp,
    gain,
    gated_linear,
    matmul_f32,
    rms_norm,
    take_rows,
    weight,
)
from kimi_jax.model.mla import Attention, Compressed, attention_layer
from kimi_jax.model.moe import Moe, MoeInputs, Routing, moe_layer


class Block(nnx.Module):
    """Weights of one transformer layer."""

    def __init__(self, cfg: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: Keys):
        D = cfg.hidden_size
        self.input_layernorm = gain("D", D, dtype)
        self.self_attn = Attention(cfg, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = gain("D", D, dtype)
        if cfg.is_moe_layer(layer):
            self.mlp = Moe(cfg, dtype=dtype, rngs=rngs)
        else:
            self.mlp = Mlp(D, cfg.intermediate_size, dtype=dtype, rngs=rngs)


class Kimi(nnx.Module):
    """Weights of the text model, named as in the checkpoint.

    `dtype` is the parameters' type; the router's bias is float32 and packed INT4 is uint8.
    """

    def __init__(self, cfg: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        D, V = cfg.hidden_size, cfg.vocab_size
        self.cfg = cfg
        keys = KeySequence(rngs)
        # Rows about as large as what the blocks add: much smaller ones are lost under it.
        self.embed_tokens = weight(keys, "V D", (V, D), dtype, 4)
        layers = range(cfg.num_hidden_layers)
        self.layers = nnx.List([Block(cfg, i, dtype=dtype, rngs=keys) for i in layers])
        self.norm = gain("D", D, dtype)
        if not cfg.tie_word_embeddings:
            self.lm_head = weight(keys, "D V", (D, V), dtype, D)


@pytree_dataclass
class Forward:
    """What one pass over T tokens gives.

    `hidden` is the stream after the last layer, before the final norm; `taps` are the tapped
    streams in the order asked for; `routing` lists each MoE layer's choices.
    """

    hidden: Float[Array, "B T D"]
    taps: tuple[Float[Array, "B T D"], ...]
    cache: LatentCache | None
    routing: tuple[Routing, ...]


def forward(
    model: Kimi,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: LatentCache | None = None,
    *,
    is_real: Bool[Array, "B T"] | None = None,
    taps: tuple[int, ...] = (),
    rules: Rules = WHOLE,
    is_prefill: bool = False,
    tree: TreeRows | None = None,
    first: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Forward:
    """Runs all layers over T new tokens a row.

    With a cache, positions of a row are consecutive, each token's row is written into the slot of
    its position, and a token attends to every slot up to its own. Without one, the tokens are whole
    sequences (training, scoring). `is_real` marks padding, which chooses no expert; its output and
    cache rows are meaningless. `is_prefill` picks the attention form for many queries. With `tree`
    the tokens are a draft tree's nodes: positions repeat, and it says which slots are theirs and
    what they see. With `first`, and without a cache, a row holds sequences one after the other:
    a token sees those from the place `first` gives up to its own.

    Raises:
        ValueError: a tap outside 0..num_hidden_layers.
    """
    cfg = model.cfg
    for tap in taps:
        if not 0 <= tap <= cfg.num_hidden_layers:
            raise ValueError(
                f"tap {tap} names no stream of this model: 0..{cfg.num_hidden_layers - 1} enter a "
                f"layer, {cfg.num_hidden_layers} follows the last"
            )
    # The embedding may be stored narrower than the model computes.
    x = embed(model.embed_tokens[...], tokens, rules).astype(model.norm[...].dtype)
    angles = rope.cos_sin(positions, cfg.rope, cfg.qk_rope_head_dim)

    # Without a cache this has to be differentiable, and kernels are not. (Those of INT4 experts may
    # run all the same: such weights have no gradient.)
    implementation = "xla" if cache is None else None
    # What a layer adds to the stream is added where the next norm is taken, in one op.
    norm = functools.partial(norm_linear, eps=cfg.rms_norm_eps, implementation=implementation)

    def run_block(block: Block, x: jax.Array, added: jax.Array | None, layer_cache: Any):
        attn, mlp = block.self_attn, block.mlp
        # Scopes as of what a norm's products are made for: a profile counts them there.
        with jax.named_scope("mla"):
            x, _, products = norm(x, added, block.input_layernorm[...], mla.input_kernels(attn))
        attended, layer_cache = attention_layer(
            attn,
            cfg,
            Compressed(*products),
            layer_cache,
            positions,
            angles,
            rules,
            is_prefill=is_prefill,
            tree=tree,
            first=first,
        )
        scale = block.post_attention_layernorm[...]
        if isinstance(mlp, Moe):
            with jax.named_scope("moe"):
                kernels, dtypes = moe.input_kernels(mlp, x.dtype)
                after, h, products = norm(x, attended, scale, kernels, dtypes=dtypes)
            inputs = MoeInputs(h, *products)
            out, routing = moe_layer(
                mlp, cfg, inputs, is_real, rules, router_implementation=implementation
            )
        else:
            with jax.named_scope("mlp"):
                kernels = mlp.gate_proj[...], mlp.up_proj[...]
                after, _, (gate, up) = norm(x, attended, scale, kernels)
            out, routing = gated_linear(mlp, gate, up, rules), None
        return x, after, out, layer_cache, routing

    if remat:
        run_block = nnx.remat(run_block)
    added = None
    entering = {}
    cache_layers = []
    routings = []
    for i, block in enumerate(model.layers):
        layer_cache = None if cache is None else cache.layers[i]
        with jax.named_scope(f"layer_{i}"):
            entering[i], x, added, layer_cache, routing = run_block(block, x, added, layer_cache)
        cache_layers.append(layer_cache)
        if routing is not None:
            routings.append(routing)
    x = x if added is None else x + added
    entering[cfg.num_hidden_layers] = x
    return Forward(
        hidden=x,
        taps=tuple(entering[tap] for tap in taps),
        cache=None if cache is None else LatentCache(layers=tuple(cache_layers)),
        routing=tuple(routings),
    )


def embed(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], rules: Rules
) -> Float[Array, "B T D"]:
    """The tokens' embedding rows; each device looks up the part of the vocabulary it holds."""
    if not rules.mesh_axes("V"):
        return take_rows(table, tokens)
    local = tokens - rules.shard_index("V") * table.shape[0]
    held = (local >= 0) & (local < table.shape[0])
    rows = take_rows(table, jnp.where(held, local, 0))
    return rules.sum(jnp.where(held[..., None], rows, jnp.zeros_like(rows)), "V")


def logits(model: Kimi, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Final norm and head, in float32, over this device's part of the vocabulary."""
    with jax.named_scope("head"):
        h = rms_norm(hidden, model.norm[...], model.cfg.rms_norm_eps)
        return matmul_f32(h, head(model))


def head(model: Kimi) -> Float[Array, "D V"]:
    """The output matrix: its own, or the embedding's transpose where they are tied."""
    return model.embed_tokens[...].T if model.cfg.tie_word_embeddings else model.lm_head[...]
