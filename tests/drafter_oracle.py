"""Both EAGLE-3 drafters in plain numpy float64, written from the published description alone.

Independent of the implementation, as `oracles` is of the target's: config.json is a dict, keys and
values are full, and attention loops over rows and heads. One layer; Llama-style (rotate-half RoPE,
grouped heads) or MLA-style (interleaved YaRN), told apart by the tensors the file holds.

Row i of a drafter has the target's feature i, token i + 1 and position i (`shifted`).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from oracles import Tensors, rms_norm, rotate, silu, softmax, yarn_inv_freq, yarn_mscale
from safetensors.numpy import load_file

LAYER = "layers.0"
ATTENTION = f"{LAYER}.self_attn"


class Past(NamedTuple):
    """Keys and values of earlier rows, rotated; MLA as if it were plain attention of N heads."""

    keys: np.ndarray  # [S, kv heads, key width]
    values: np.ndarray  # [S, kv heads, value width]

    def first(self, num_rows: int) -> "Past":
        """The oldest `num_rows` rows, as after rejecting all later ones."""
        return Past(self.keys[:num_rows], self.values[:num_rows])


class Rows(NamedTuple):
    """What the drafter computes for T consecutive rows."""

    carried: np.ndarray  # [T, D], the feature of each row's successor in a chain
    logits: np.ndarray  # [T, W]
    past: Past  # the rows given and these


def read_drafter(folder: str | Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors, `midlayer.` renamed to `layers.0.`; weights as float64.

    `d2t` stays int64 and `t2d` bool, as published.
    """
    folder = Path(folder)
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(path).items():
            if name.startswith("midlayer."):
                name = f"{LAYER}.{name.removeprefix('midlayer.')}"
            if name in tensors:
                raise ValueError(f"{folder} holds {name} twice")
            tensors[name] = value if name in ("d2t", "t2d") else value.astype(np.float64)
    return json.loads((folder / "config.json").read_text()), tensors


def shifted(token_ids) -> np.ndarray:
    """Ids [T] that T rows embed, of T + 1 known tokens t_0..t_T: row i has token i + 1.

    Row i goes with the target's feature i and position i, and predicts token i + 2. A prompt of T
    tokens and the first token sampled after it are T + 1 tokens and so T rows; so are a cycle's
    newest token, not yet in the cache, and the tokens the cycle emitted (positions then start at
    the committed length).
    """
    return np.asarray(token_ids)[1:]


def features(tensors: Tensors, config: dict[str, Any], taps: list[np.ndarray]) -> np.ndarray:
    """Features [T, D] of the target's tapped states [T, H], lowest layer first."""
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        (state,) = taps
        return np.asarray(state, np.float64)
    eps = config["rms_norm_eps"]
    states = [np.asarray(tap, np.float64) for tap in taps]
    norm_each = config.get("fc_norm") or config.get("use_aux_norm")
    norm_all = config.get("norm_before_fc")
    if norm_each and norm_all:
        raise ValueError("fc_norm and norm_before_fc exclude each other")
    if norm_each:
        states = [
            rms_norm(state, tensors[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)
        ]
    joined = np.concatenate(states, axis=-1)
    if norm_all:
        joined = rms_norm(joined, tensors["input_norm.weight"], eps)
    return joined @ tensors["fc.weight"].T


def rows(
    tensors: Tensors,
    config: dict[str, Any],
    g: np.ndarray,
    token_ids,
    positions,
    past: Past | None = None,
    *,
    embedding: np.ndarray | None = None,
    head: np.ndarray | None = None,
) -> Rows:
    """One pass over rows with features `g` [T, D] and target ids [T]: causal, after all of `past`.

    `embedding` and `head`, both [V, H], are the target's, used where the file has none.
    """
    eps = config["rms_norm_eps"]
    embed = _own_or_target(tensors, "embed_tokens.weight", embedding)
    e = embed[np.asarray(token_ids)]
    g = np.asarray(g, np.float64)
    normed = rms_norm(g, tensors[f"{LAYER}.hidden_norm.weight"], eps)
    residual = normed if config.get("norm_before_residual") else g
    e = rms_norm(e, tensors[f"{LAYER}.input_layernorm.weight"], eps)
    u = np.concatenate([e, normed], axis=-1)
    attended, past = _attention(tensors, config, u, np.asarray(positions), past)
    h = residual + attended
    x = rms_norm(h, tensors[f"{LAYER}.post_attention_layernorm.weight"], eps)
    gate, up, down = (tensors[f"{LAYER}.mlp.{k}_proj.weight"] for k in ("gate", "up", "down"))
    m = h + (silu(x @ gate.T) * (x @ up.T)) @ down.T
    out = rms_norm(m, tensors["norm.weight"], eps)
    logits = out @ _own_or_target(tensors, "lm_head.weight", head).T
    wanted = config.get("draft_vocab_size") or config["vocab_size"]
    if logits.shape[1] != wanted:
        raise ValueError(f"the head has {logits.shape[1]} rows, config.json says {wanted}")
    return Rows(out if config.get("norm_output") else m, logits, past)


def draft_to_target(tensors: Tensors, config: dict[str, Any]) -> np.ndarray:
    """Target ids [W] of the draft ids; the published `d2t` holds offsets, none means all equal."""
    V = config["vocab_size"]
    W = config.get("draft_vocab_size") or V
    if "d2t" not in tensors:
        if W != V:
            raise ValueError(f"{W} draft ids of {V} target ids need d2t")
        return np.arange(W)
    return np.arange(W) + tensors["d2t"]


def rotate_half(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Llama's RoPE: channels i and i + R/2 of [T, N, R] turn by position times inv_freq[i]."""
    half, out = x.shape[-1] // 2, np.empty_like(x)
    for i in range(half):
        angle = positions.astype(np.float64)[:, None] * inv_freq[i]
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _own_or_target(tensors: Tensors, name: str, target: np.ndarray | None) -> np.ndarray:
    if name in tensors:
        return tensors[name]
    if target is None:
        raise ValueError(f"the drafter has no {name}: pass the target's")
    return np.asarray(target, np.float64)


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    # transformers 5 writes both into rope_parameters; scaling counts only where a type names it.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config["rope_theta"] if "rope_theta" in config else rope["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn", "deepseek_yarn"):
        raise ValueError(f"no oracle of RoPE type {kind!r}")
    return theta, None if kind == "default" else rope


def _attention(tensors, config, u, positions, past):
    is_mla = f"{ATTENTION}.kv_a_proj_with_mqa.weight" in tensors
    q, k, v, scale = (_mla if is_mla else _llama)(tensors, config, u, positions)
    if past is not None:
        k = np.concatenate([past.keys, k])
        v = np.concatenate([past.values, v])
    T, N = q.shape[:2]
    before, group = len(k) - T, N // k.shape[1]
    out = np.zeros((T, N, v.shape[2]))
    for t in range(T):
        seen = before + t + 1
        for n in range(N):
            weights = softmax(k[:seen, n // group] @ q[t, n] * scale)
            out[t, n] = weights @ v[:seen, n // group]
    o_proj = tensors[f"{ATTENTION}.o_proj.weight"]
    return out.reshape(T, -1) @ o_proj.T, Past(k, v)


def _llama(tensors, config, u, positions):
    N = config["num_attention_heads"]
    num_kv = config.get("num_key_value_heads") or N
    width = config.get("head_dim") or config["hidden_size"] // N
    theta, scaling = _rope(config)
    if scaling is not None:
        raise ValueError(f"a Llama-style drafter has plain RoPE, got {scaling}")
    inv_freq = theta ** (-2 * np.arange(width // 2) / width)
    q, k, v = (
        (u @ tensors[f"{ATTENTION}.{name}_proj.weight"].T).reshape(len(u), heads, width)
        for name, heads in (("q", N), ("k", num_kv), ("v", num_kv))
    )
    q, k = rotate_half(q, positions, inv_freq), rotate_half(k, positions, inv_freq)
    return q, k, v, width**-0.5


def _mla(tensors, config, u, positions):
    T, N = len(u), config["num_attention_heads"]
    U, R, H = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    C, eps = config["kv_lora_rank"], config["rms_norm_eps"]
    theta, scaling = _rope(config)
    scaling = scaling or {"factor": 1.0}
    m = yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0.0))
    magnitude = yarn_mscale(scaling["factor"], scaling.get("mscale", 1.0)) / m
    turn = (positions, yarn_inv_freq(R, theta, **scaling), magnitude)

    def weight(name):
        return tensors[f"{ATTENTION}.{name}.weight"]

    latent = rms_norm(u @ weight("q_a_proj").T, weight("q_a_layernorm"), eps)
    q = (latent @ weight("q_b_proj").T).reshape(T, N, U + R)
    q = np.concatenate([q[..., :U], rotate(q[..., U:], *turn)], axis=-1)
    kv_a = u @ weight("kv_a_proj_with_mqa").T
    latent = rms_norm(kv_a[:, :C], weight("kv_a_layernorm"), eps)
    kv = (latent @ weight("kv_b_proj").T).reshape(T, N, U + H)
    k_pe = np.repeat(rotate(kv_a[:, C:], *turn)[:, None], N, axis=1)
    k = np.concatenate([kv[..., :U], k_pe], axis=-1)
    return q, k, kv[..., U:], (U + R) ** -0.5 * m * m
