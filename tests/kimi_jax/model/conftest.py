"""A tiny model that has every part, its weights for the numpy oracle, and comparison helpers."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from kernels_pallas.grouped_matmul.layout import kernel_to_words
from kimi_jax import published
from kimi_jax.config import ModelConfig, QuantizationConfig, RopeConfig
from kimi_jax.model.moe import Int4Linear, Moe
from kimi_jax.model.transformer import Kimi

F32 = jnp.dtype("float32")


TINY = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    num_attention_heads=8,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
    max_position_embeddings=128,
    # The four pairs get ramps of 0, 1/3, 2/3 and 1, and prompts pass the original length.
    rope=RopeConfig(
        theta=100.0,
        factor=4.0,
        beta_fast=4.0,
        beta_slow=0.5,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=32,
    ),
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    # Far from rms_norm_eps, so that a norm with the other's epsilon is seen.
    latent_norm_eps=1e-2,
)
VARIANTS: dict[str, ModelConfig] = {
    "plain": TINY,
    "int4": dataclasses.replace(TINY, quantization=QuantizationConfig(), num_hidden_layers=2),
    "tied, no shared expert": dataclasses.replace(
        TINY, tie_word_embeddings=True, n_shared_experts=0, num_hidden_layers=2
    ),
    "groups, two shared experts, unlike mscales": dataclasses.replace(
        TINY,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        n_shared_experts=2,
        num_hidden_layers=2,
        rope=dataclasses.replace(TINY.rope, mscale_all_dim=0.5),
    ),
}


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    return TINY


@pytest.fixture(scope="session")
def k25() -> ModelConfig:
    """Kimi-K2.5 as published."""
    return ModelConfig.from_dict(published.K25)


@pytest.fixture(scope="session")
def variants() -> dict[str, ModelConfig]:
    return VARIANTS


class OneKey(nnx.Rngs):
    """One key for every weight: counting them, under a trace, is what takes the time."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


@pytest.fixture(scope="session")
def shape_rngs():
    """Makes the random keys of a module that is only looked at for its shapes."""
    return lambda: OneKey(0)


def fill(make: Callable[[], nnx.Module], seed: int) -> nnx.Module:
    """The module with random weights to the last norm, made by numpy: nothing is compiled.

    Gains differ from one, router biases choose, INT4 has every integer; other weights have the
    standard deviation the model starts with.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def value(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = [key.key for key in path if hasattr(key, "key")][-1]
        if name == "packed":
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        if name == "scale":
            out = 0.01 + 0.03 * rng.random(leaf.shape)
        elif name.endswith("norm"):
            out = 1 + 0.2 * rng.normal(size=leaf.shape)
        elif name == "e_score_correction_bias":
            out = 0.2 * rng.normal(size=leaf.shape)
        else:
            # The axes summed over: the first, of experts the second, of some the last or two.
            cut = {"kv_b_proj_k": slice(-1, None), "o_proj": slice(2)}.get(
                name, slice(1) if len(leaf.shape) == 2 or name == "q_b_proj" else slice(1, 2)
            )
            deviation = 1 if name == "embed_tokens" else math.prod(leaf.shape[cut]) ** -0.5
            out = deviation * rng.normal(size=leaf.shape)
        return jnp.asarray(out.astype(leaf.dtype))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, state))


@pytest.fixture(scope="session")
def fill_module():
    return fill


@functools.cache
def make_model(cfg: ModelConfig) -> Kimi:
    return fill(lambda: Kimi(cfg, dtype=F32, rngs=OneKey(0)), seed=7)


@pytest.fixture(scope="session")
def model_of():
    return make_model


def oracle_tensors(model: Kimi) -> dict[str, np.ndarray]:
    """The model's weights under their published names, matrices [out, in] again."""
    cfg, out = model.cfg, {}

    def put(name: str, value) -> None:
        out[f"{name}.weight"] = np.asarray(value)

    def put_mlp(at: str, mlp) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            put(f"{at}.{name}", getattr(mlp, name)[...].T)

    def put_experts(at: str, moe: Moe) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = getattr(moe.experts, name)
            for e in range(cfg.n_routed_experts):
                place = f"{at}.experts.{e}.{name}"
                if isinstance(weight, Int4Linear):
                    words = kernel_to_words(np.asarray(weight.packed[...][e]))
                    out[f"{place}.weight_packed"] = words
                    out[f"{place}.weight_scale"] = np.asarray(weight.scale[...][e].T)
                    out[f"{place}.weight_shape"] = np.array([len(words), words.shape[1] * 8])
                else:
                    put(place, weight[...][e].T)

    put("model.embed_tokens", model.embed_tokens[...])
    put("model.norm", model.norm[...])
    if not cfg.tie_word_embeddings:
        put("lm_head", model.lm_head[...].T)
    for i, block in enumerate(model.layers):
        at, attn = f"model.layers.{i}", block.self_attn
        for name in ("input_layernorm", "post_attention_layernorm"):
            put(f"{at}.{name}", getattr(block, name)[...])
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            put(f"{at}.self_attn.{name}", getattr(attn, name)[...])
        put(f"{at}.self_attn.q_a_proj", attn.q_a_proj[...].T)
        put(f"{at}.self_attn.q_b_proj", attn.q_b_proj[...].reshape(cfg.q_lora_rank, -1).T)
        put(f"{at}.self_attn.kv_a_proj_with_mqa", attn.kv_a_proj_with_mqa[...].T)
        # Per head the rows of k_nope, then those of v.
        k, v = attn.kv_b_proj_k[...], attn.kv_b_proj_v[...].swapaxes(1, 2)
        kv_b = np.concatenate([k, v], axis=1).reshape(-1, cfg.kv_lora_rank)
        put(f"{at}.self_attn.kv_b_proj", kv_b)
        put(f"{at}.self_attn.o_proj", attn.o_proj[...].reshape(-1, cfg.hidden_size).T)
        if isinstance(block.mlp, Moe):
            put(f"{at}.mlp.gate", block.mlp.gate[...].T)
            bias = np.asarray(block.mlp.e_score_correction_bias[...])
            out[f"{at}.mlp.gate.e_score_correction_bias"] = bias
            put_experts(f"{at}.mlp", block.mlp)
            if cfg.n_shared_experts:
                put_mlp(f"{at}.mlp.shared_experts", block.mlp.shared_experts)
        else:
            put_mlp(f"{at}.mlp", block.mlp)
    return out


@pytest.fixture(scope="session")
def oracle_forward():
    """The numpy oracle on a model's weights: logits, hidden states and experts of a prompt."""

    @functools.cache
    def forward(cfg: ModelConfig, tokens: tuple[int, ...]):
        return oracles.forward(oracle_tensors(make_model(cfg)), cfg.to_dict(), tokens)

    return forward
