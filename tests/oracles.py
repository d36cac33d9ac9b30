"""The whole text model in plain numpy float64, written from the published description alone.

Slow, naive and independent: it imports nothing of this project, reads config.json as a dict,
attends over full keys and values, loops over tokens, heads' groups and experts, unpacks INT4 one
nibble at a time. Tests compare the real implementations with it.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


class Forward(NamedTuple):
    """What one pass over a prompt computes."""

    logits: np.ndarray  # [T, V]
    hidden: np.ndarray  # [L + 1, T, D]: entering layer i, and leaving the last (before the norm)
    experts: dict[int, np.ndarray]  # MoE layer -> chosen experts [T, A], best choice first


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], Tensors]:
    """The text part of config.json, flat, and all text tensors without `language_model.`."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return config.get("text_config", config), strip_prefix(tensors)


def strip_prefix(tensors: Tensors) -> Tensors:
    """The same tensors with names as in a text-only checkpoint."""
    return {name.removeprefix("language_model."): value for name, value in tensors.items()}


def unpack_int4(words: np.ndarray, width: int) -> np.ndarray:
    """Integers -8..7 of published words: input 8j+k in bits 4k..4k+3 of word j, plus 8."""
    out = np.zeros((words.shape[0], width), np.int8)
    for row in range(words.shape[0]):
        for i in range(width):
            word = int(words[row, i // 8]) & 0xFFFFFFFF
            out[row, i] = ((word >> (4 * (i % 8))) & 0xF) - 8
    return out


def pack_int4(q: np.ndarray) -> np.ndarray:
    """Inverse of `unpack_int4`, the same way; nibbles past the last input hold 8 (q = 0)."""
    rows, width = q.shape
    out = np.zeros((rows, -(-width // 8)), np.uint32)
    for row in range(rows):
        for i in range(out.shape[1] * 8):
            value = int(q[row, i]) + 8 if i < width else 8
            out[row, i // 8] |= np.uint32(value << (4 * (i % 8)))
    return out.view(np.int32)


def dequantize_int4(words: np.ndarray, scale: np.ndarray, width: int) -> np.ndarray:
    """float64 weights [out, in]: each integer times the scale of its 32 inputs."""
    q = _unpack_table(words)[:, :width].astype(np.float64)
    return q * np.repeat(scale.astype(np.float64), 32, axis=1)[:, :width]


def _unpack_table(words: np.ndarray) -> np.ndarray:
    # `unpack_int4` at the speed whole models need; tests hold the two equal.
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32(0xF)
    return nibbles.reshape(words.shape[0], -1).astype(np.int8) - np.int8(8)


def yarn_inv_freq(
    dim: int,
    theta: float,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_max_position_embeddings: int = 4096,
    **_: Any,
) -> np.ndarray:
    """The dim/2 angular steps a position: extrapolated, interpolated, or between the two."""

    def dimension(rotations: float) -> float:
        wavelength = original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = float(min(math.ceil(dimension(beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    out = np.zeros(dim // 2)
    for i in range(dim // 2):
        extrapolated = theta ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out[i] = extrapolated / factor * ramp + extrapolated * (1 - ramp)
    return out if factor != 1.0 else theta ** (-2 * np.arange(dim // 2) / dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rotate(
    x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, magnitude: float = 1.0
) -> np.ndarray:
    """Interleaved RoPE: channels 2i and 2i+1 of [T, ..., R] turn by position times inv_freq[i]."""
    angle = positions.astype(np.float64)[:, None] * inv_freq
    angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), -1)
    even, odd, out = x[..., 0::2], x[..., 1::2], np.empty_like(x)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out * magnitude


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def route(
    logits: np.ndarray,
    bias: np.ndarray,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Experts [T, A], best choice first (ties: lower id), and the weights of their outputs."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        score = 1 / (1 + np.exp(-row))
        choice = score + bias
        groups = choice.reshape(n_group, -1).copy()
        if n_group > 1:
            best_two = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            kept = np.argsort(-best_two, kind="stable")[:topk_group]
            groups[np.setdiff1d(np.arange(n_group), kept)] = -np.inf
        chosen = np.argsort(-groups.reshape(-1), kind="stable")[:top_k]
        weight = score[chosen]
        if norm_topk_prob:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(chosen)
        weights.append(weight * scaling)
    return np.array(ids), np.array(weights)


class _Weights:
    """Tensors as float64 matrices [out, in], packed or not."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors

    def __call__(self, name: str) -> np.ndarray:
        packed = self.tensors.get(f"{name}.weight_packed")
        if packed is None:
            return self.tensors[f"{name}.weight"].astype(np.float64)
        width = int(self.tensors[f"{name}.weight_shape"][1])
        return dequantize_int4(packed, self.tensors[f"{name}.weight_scale"], width)


def _attention(x, at, weights, config, positions, turn, scale):
    T, N = len(x), config["num_attention_heads"]
    U, R, H = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    C, eps = config["kv_lora_rank"], config.get("latent_norm_eps", 1e-6)
    latent = rms_norm(x @ weights(f"{at}.q_a_proj").T, weights(f"{at}.q_a_layernorm"), eps)
    q = (latent @ weights(f"{at}.q_b_proj").T).reshape(T, N, U + R)
    q = np.concatenate([q[..., :U], rotate(q[..., U:], positions, *turn)], axis=-1)
    kv_a = x @ weights(f"{at}.kv_a_proj_with_mqa").T
    latent = rms_norm(kv_a[:, :C], weights(f"{at}.kv_a_layernorm"), eps)
    kv = (latent @ weights(f"{at}.kv_b_proj").T).reshape(T, N, U + H)
    k_pe = np.repeat(rotate(kv_a[:, C:], positions, *turn)[:, None], N, axis=1)
    k = np.concatenate([kv[..., :U], k_pe], axis=-1)
    out = np.zeros((T, N, H))
    for t in range(T):
        for n in range(N):
            out[t, n] = softmax(k[: t + 1, n] @ q[t, n] * scale) @ kv[: t + 1, n, U:]
    return out.reshape(T, N * H) @ weights(f"{at}.o_proj").T


def _mlp(x, at, weights):
    hidden = silu(x @ weights(f"{at}.gate_proj").T) * (x @ weights(f"{at}.up_proj").T)
    return hidden @ weights(f"{at}.down_proj").T


def _moe(x, at, weights, config):
    ids, scales = route(
        x @ weights(f"{at}.gate").T,
        weights.tensors[f"{at}.gate.e_score_correction_bias"].astype(np.float64),
        config["num_experts_per_tok"],
        n_group=config.get("n_group") or 1,
        topk_group=config.get("topk_group") or 1,
        norm_topk_prob=config.get("norm_topk_prob", True),
        scaling=config["routed_scaling_factor"],
    )
    out = _mlp(x, f"{at}.shared_experts", weights) if config["n_shared_experts"] else 0 * x
    for expert in range(config["n_routed_experts"]):
        tokens, places = np.nonzero(ids == expert)
        if len(tokens):
            y = _mlp(x[tokens], f"{at}.experts.{expert}", weights)
            out[tokens] += scales[tokens, places, None] * y
    return out, ids


def forward(tensors: Tensors, config: dict[str, Any], tokens) -> Forward:
    """Logits, tapped hidden states and routing of one prompt that starts at position 0."""
    weights, tokens = _Weights(strip_prefix(tensors)), np.asarray(tokens)
    rope = config.get("rope_scaling") or {"factor": 1.0, "mscale_all_dim": 0.0}
    R, eps = config["qk_rope_head_dim"], config["rms_norm_eps"]
    inv_freq = yarn_inv_freq(R, config["rope_theta"], **rope)
    m = yarn_mscale(rope["factor"], rope.get("mscale_all_dim", 0.0))
    # 1 as published, where mscale = mscale_all_dim.
    magnitude = yarn_mscale(rope["factor"], rope.get("mscale", 1.0)) / m
    scale, turn = (config["qk_nope_head_dim"] + R) ** -0.5 * m * m, (inv_freq, magnitude)
    positions, experts, taps = np.arange(len(tokens)), {}, []
    h = weights("model.embed_tokens")[tokens]
    for layer in range(config["num_hidden_layers"]):
        taps.append(h)
        at = f"model.layers.{layer}"
        x = rms_norm(h, weights(f"{at}.input_layernorm"), eps)
        h = h + _attention(x, f"{at}.self_attn", weights, config, positions, turn, scale)
        x = rms_norm(h, weights(f"{at}.post_attention_layernorm"), eps)
        if layer < config["first_k_dense_replace"]:
            h = h + _mlp(x, f"{at}.mlp", weights)
        else:
            y, experts[layer] = _moe(x, f"{at}.mlp", weights, config)
            h = h + y
    taps.append(h)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    logits = rms_norm(h, weights("model.norm"), eps) @ weights(head).T
    return Forward(logits, np.stack(taps), experts)
