"""A tiny model in the published layout, random to the last bit, written by the project's writer."""

import dataclasses
import json
import socket
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint import table, writer
from kimi_jax.config import ModelConfig, QuantizationConfig, RopeConfig

IGNORE = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)


@pytest.fixture
def cfg() -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=96,
        moe_intermediate_size=256,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_attention_heads=8,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        max_position_embeddings=128,
        rope=RopeConfig(),
        quantization=QuantizationConfig(ignore=IGNORE),
    )


@pytest.fixture
def plain_cfg(cfg) -> ModelConfig:
    return dataclasses.replace(cfg, quantization=None)


@pytest.fixture
def make_params():
    def make(cfg: ModelConfig, dtype=ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        rows = table.parameters(cfg, is_int4=cfg.quantization is not None)
        out = {}
        for path, row in rows.items():
            if row.kind == "words":
                out[path] = rng.integers(0, 256, row.shape, np.uint8)
            else:
                kind = np.float32 if row.kind == "float32" else dtype
                out[path] = rng.standard_normal(row.shape).astype(kind)
        return out

    return make


@pytest.fixture
def tensors(make_params):
    """Published tensors of a random model, as plain arrays to be spoilt by tests."""

    def make(cfg: ModelConfig, prefix: str = "", **kwargs) -> dict[str, np.ndarray]:
        exported = writer.export_params(make_params(cfg, **kwargs), cfg, prefix=prefix)
        return {name: lazy.make() for name, lazy in exported}

    return make


@pytest.fixture
def save(tmp_path):
    """Writes tensors as a folder of three shards or so."""

    def save(tensors: dict[str, np.ndarray], cfg: ModelConfig, name: str = "model") -> Path:
        total = sum(value.nbytes for value in tensors.values())
        return writer.write_checkpoint(
            tmp_path / name, tensors.items(), cfg.to_dict(), max_shard_bytes=total // 3 + 1
        )

    return save


@pytest.fixture
def rewrite_index():
    def rewrite(folder: Path, change) -> None:
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        change(data["weight_map"])
        path.write_text(json.dumps(data))

    return rewrite


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
