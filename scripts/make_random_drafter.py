"""Writes a random EAGLE-3 drafter in the published layout, small, for tests and benches.

    python scripts/make_random_drafter.py --target kimi_jax/demo --kind llama --out OUT

It drafts noise: of use for measuring what a cycle costs, not what it gives. Ends with one JSON
line.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401, numpy knows "bfloat16" by it
import numpy as np

from kimi_jax.config import ModelConfig, RopeConfig
from spec.eagle3 import checkpoint
from spec.eagle3.config import DrafterConfig, mla_config


def tiny_drafter_config(
    kind: Literal["llama", "mla"], target: ModelConfig, **changes: Any
) -> DrafterConfig:
    """A drafter of the target's width and vocabulary, its other sizes small and unlike.

    As published, a Llama-style one has a reduced vocabulary and an MLA-style one the target's.

    Args:
        kind: "llama" or "mla".
        target: taps are its first, middle and last boundary.
        changes: other values of `DrafterConfig`'s fields, or of `DrafterConfig.mla`'s.
    """
    names = {field.name for field in dataclasses.fields(DrafterConfig)}
    own = {name: value for name, value in changes.items() if name in names}
    of_mla = {name: value for name, value in changes.items() if name not in names}
    num_layers = target.num_hidden_layers
    fields: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 4 if kind == "llama" else target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if kind == "llama" else own.get("num_attention_heads", 4),
        "head_dim": 8 if kind == "llama" else 0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.max_position_embeddings,
        "rope": RopeConfig(theta=10000.0) if kind == "llama" else target.rope,
        "taps": tuple(sorted({0, num_layers // 2, num_layers})),
        **own,
    }
    if not fields.get("use_aux_hidden_state", True):
        fields["taps"] = ()
    if kind == "mla" and "mla" not in own:
        shared = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "max_position_embeddings",
            "rope",
            "rms_norm_eps",
        )
        sizes = {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        }
        fields["mla"] = mla_config(**{name: fields[name] for name in shared}, **(sizes | of_mla))
    elif of_mla:
        raise TypeError(f"no fields of this drafter: {sorted(of_mla)}")
    return DrafterConfig(kind=kind, **fields)


def random_drafter(
    cfg: DrafterConfig,
    *,
    seed: int = 0,
    own_embedding: bool = True,
    own_head: bool = True,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Parameters by path: normal over the root of the fan-in, norms near 1, a scattered map."""
    rng = np.random.default_rng(seed)
    rows = checkpoint.parameters(cfg, has_own_embedding=own_embedding, has_own_head=own_head)
    out = {}
    for path, row in rows.items():
        value = rng.standard_normal(row.shape)
        if len(row.shape) == 1:
            value = 1.0 + 0.1 * value
        else:
            # Published tensors are [out, in].
            value /= np.sqrt(row.published_shape[-1])
        out[path] = value.astype(np.dtype(dtype))
    V, W = cfg.vocab_size, cfg.draft_vocab_size
    if W < V:
        # The last id is always there, so that the map is never 0..W-1.
        ids = rng.choice(V - 1, W - 1, replace=False)
        out[checkpoint.MAP] = np.sort(np.append(ids, V - 1)).astype(np.int32)
    return out


def write_random_drafter(
    folder: str | Path,
    cfg: DrafterConfig,
    *,
    seed: int = 0,
    own_embedding: bool = True,
    own_head: bool = True,
    layer_prefix: str = "midlayer.",
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Writes `random_drafter` as published, and gives it."""
    arrays = random_drafter(
        cfg, seed=seed, own_embedding=own_embedding, own_head=own_head, dtype=dtype
    )
    checkpoint.write_drafter(folder, cfg, arrays, layer_prefix=layer_prefix)
    return arrays


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--kind", choices=("llama", "mla"), default="llama")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    try:
        cfg = tiny_drafter_config(args.kind, ModelConfig.from_folder(args.target))
        arrays = write_random_drafter(args.out, cfg, seed=args.seed, dtype=args.dtype)
    except (ValueError, OSError) as error:
        parser.exit(1, f"make_random_drafter.py: error: {error}\n")
    print(
        json.dumps(
            {
                "out": str(args.out),
                "kind": args.kind,
                "seed": args.seed,
                "parameters": sum(a.size for path, a in arrays.items() if path != checkpoint.MAP),
                "config": cfg.to_dict(),
            }
        )
    )


if __name__ == "__main__":
    main()
