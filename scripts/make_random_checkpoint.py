"""Random checkpoints in the published Kimi-K2.5 layout, for tests, benches and dry runs.

    python scripts/make_random_checkpoint.py OUT --preset tiny
    python scripts/make_random_checkpoint.py OUT --preset mini
    python scripts/make_random_checkpoint.py OUT --preset kimi-k2.5-layer
    python scripts/make_random_checkpoint.py OUT --preset kimi-k2.5-layer-16th

OUT gets config.json, generation_config.json, the safetensors shards with their index, and a
byte-level tokenizer with the published special tokens and chat template. Weights have a standard
deviation of 1/sqrt(inputs), so activations and logits stay near one; the routing is uneven but no
expert starves. Every tensor is a pure function of (seed, its name, its shape), from the raw PCG64
stream that numpy guarantees, whatever the prefix, dtype, sharding or order: goldens rely on it.

| preset | model | size | time on one core |
| --- | --- | --- | --- |
| tiny | 3 layers of width 64, 8 experts | 1.2 MB | 1 s |
| mini | 12 layers of width 1024, 64 INT4 experts a layer | 0.88 GB | 7 s |
| kimi-k2.5-layer | one MoE layer of the full size, 4096 ids | 9.9 GB | 90 s |
| kimi-k2.5-layer-16th | the same names at a sixteenth of the width | 76 MB | 2 s |

The last has experts of an eighth of the width, the least that 8 devices can cut into groups of 32.

One tensor is in memory at a time (300 MB at most). The last line of stdout is JSON.
"""

import argparse
import dataclasses
import itertools
import json
import math
import shutil
import sys
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, VALUES_PER_WORD
from kimi_jax.checkpoint.table import TEXT_PREFIX
from kimi_jax.checkpoint.writer import LazyTensor, write_checkpoint
from kimi_jax.config import PUBLISHED_IGNORE, ModelConfig, QuantizationConfig, RopeConfig
from kimi_jax.text.tokenizer import (
    NUM_SPECIAL_SLOTS,
    published_tokenizer_config,
    write_tiktoken_model,
)

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
# Of an integer drawn evenly from -8..7.
INT4_DEVIATION = math.sqrt((16**2 - 1) / 12)
ROUTER_BIAS_DEVIATION = 0.1
NORM_DEVIATION = 0.1
# Below one, so that the blocks, not the last token, decide what comes next.
EMBEDDING_DEVIATION = 0.25
CHUNK = 1 << 20
SHARD_BYTES = 5 * 10**9
# Room for the index, the tokenizer and the headers.
SPARE_BYTES = 50_000_000

_COMMON: dict[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "model_type": "kimi_k25",
}
PRESETS: dict[str, dict[str, Any]] = {
    # Everything an 8-way cut touches divides by 8.
    "tiny": _COMMON
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 128,
        "rope": RopeConfig(factor=4.0, mscale_all_dim=1.0, original_max_position_embeddings=32),
    },
    "mini": _COMMON
    | {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "first_k_dense_replace": 1,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "max_position_embeddings": 262144,
        "rope": RopeConfig(factor=64.0, mscale_all_dim=1.0),
    },
    # The published config cut to a single MoE layer, with a small vocabulary; it loads as a model.
    "kimi-k2.5-layer": _COMMON
    | {
        "vocab_size": 4096,
        "hidden_size": 7168,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope": RopeConfig(factor=64.0, mscale_all_dim=1.0),
    },
    "kimi-k2.5-layer-16th": _COMMON
    | {
        "vocab_size": 512,
        "hidden_size": 448,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "intermediate_size": 1152,
        "moe_intermediate_size": 256,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_attention_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "max_position_embeddings": 262144,
        "rope": RopeConfig(factor=64.0, mscale_all_dim=1.0),
    },
}


def _stream(seed: int, name: str) -> np.random.PCG64:
    key = zlib.crc32(name.removeprefix(TEXT_PREFIX).encode())
    return np.random.PCG64(np.random.SeedSequence([seed, key]))


def _spread(
    stream: np.random.PCG64, shape: tuple[int, ...], dtype: np.dtype, mean: float, deviation: float
) -> np.ndarray:
    """65536 even steps around the mean."""
    out = np.empty(math.prod(shape), dtype)
    step = np.float32(deviation * math.sqrt(12) / 65536)
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        draws = stream.random_raw(-(-part.size // 4)).view("<u2")[: part.size]
        part[:] = (draws.astype(np.float32) - np.float32(32767.5)) * step + np.float32(mean)
    return out.reshape(shape)


def _words(stream: np.random.PCG64, shape: tuple[int, int]) -> np.ndarray:
    """Eight integers evenly from -8..7 a word: every bit random."""
    size = math.prod(shape)
    return stream.random_raw(-(-size // 2)).view("<i4")[:size].reshape(shape)


def preset_config(preset: str, *, experts: str = "int4", **changes: Any) -> ModelConfig:
    """The preset's configuration; `changes` replace fields of `ModelConfig`."""
    fields = PRESETS[preset] | changes
    # [BOS], [EOS] and [PAD] at their published places above the ranks.
    ranks = fields["vocab_size"] - NUM_SPECIAL_SLOTS
    defaults = {"bos_token_id": ranks, "eos_token_id": (ranks + 1,), "pad_token_id": ranks + 255}
    if experts == "int4":
        defaults["quantization"] = QuantizationConfig(ignore=PUBLISHED_IGNORE)
    return ModelConfig(**(defaults | fields))


def random_tensors(
    cfg: ModelConfig, *, seed: int = 0, dtype: str = "bfloat16", prefix: bool = True
) -> Iterator[tuple[str, LazyTensor]]:
    """Every tensor of the checkpoint in the published order: layers, embedding, norm, head.

    `dtype` is that of the weights; the router bias is float32 and INT4 scales are bfloat16, as
    published. Experts are INT4 where `cfg.quantization` says so.
    """
    stored = DTYPES[dtype]

    def lazy(name: str, shape: tuple[int, ...], dtype: np.dtype, make, *args: Any):
        name = (TEXT_PREFIX if prefix else "") + name
        return name, LazyTensor(shape, dtype, lambda: make(_stream(seed, name), shape, *args))

    def spread(name: str, *shape: int, mean=0.0, deviation: float, dtype=stored):
        return lazy(name, shape, dtype, _spread, dtype, mean, deviation)

    def matrix(name: str, outputs: int, inputs: int):
        return spread(f"{name}.weight", outputs, inputs, deviation=inputs**-0.5)

    def norm(name: str, width: int):
        return spread(f"{name}.weight", width, mean=1.0, deviation=NORM_DEVIATION)

    def int4(name: str, outputs: int, inputs: int):
        int32, bfloat16 = np.dtype(np.int32), DTYPES["bfloat16"]
        words = (outputs, -(-inputs // VALUES_PER_WORD))
        yield lazy(f"{name}.weight_packed", words, int32, _words)
        # Scales spread evenly over 0.5..1.5 of their mean.
        mean = inputs**-0.5 / INT4_DEVIATION
        about = {"mean": mean, "deviation": 0.5 * mean / math.sqrt(3), "dtype": bfloat16}
        yield spread(f"{name}.weight_scale", outputs, -(-inputs // GROUP_SIZE), **about)
        sizes = np.array([outputs, inputs], np.int32)
        yield lazy(f"{name}.weight_shape", (2,), int32, lambda *_: sizes)

    def mlp(name: str, width: int, packed: bool = False):
        for part in ("gate_proj", "up_proj", "down_proj"):
            sizes = (D, width) if part == "down_proj" else (width, D)
            if packed:
                yield from int4(f"{name}.{part}", *sizes)
            else:
                yield matrix(f"{name}.{part}", *sizes)

    D, N, Q, C = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
    U, R, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    E, F = cfg.n_routed_experts, cfg.moe_intermediate_size
    for layer in range(cfg.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield norm(f"{at}.input_layernorm", D)
        yield norm(f"{at}.post_attention_layernorm", D)
        yield matrix(f"{at}.self_attn.q_a_proj", Q, D)
        yield norm(f"{at}.self_attn.q_a_layernorm", Q)
        yield matrix(f"{at}.self_attn.q_b_proj", N * (U + R), Q)
        yield matrix(f"{at}.self_attn.kv_a_proj_with_mqa", C + R, D)
        yield norm(f"{at}.self_attn.kv_a_layernorm", C)
        yield matrix(f"{at}.self_attn.kv_b_proj", N * (U + H), C)
        yield matrix(f"{at}.self_attn.o_proj", D, N * H)
        if not cfg.is_moe_layer(layer):
            yield from mlp(f"{at}.mlp", cfg.intermediate_size)
            continue
        yield matrix(f"{at}.mlp.gate", E, D)
        bias = {"deviation": ROUTER_BIAS_DEVIATION, "dtype": DTYPES["float32"]}
        yield spread(f"{at}.mlp.gate.e_score_correction_bias", E, **bias)
        if cfg.n_shared_experts:
            yield from mlp(f"{at}.mlp.shared_experts", F * cfg.n_shared_experts)
        for expert in range(E):
            yield from mlp(f"{at}.mlp.experts.{expert}", F, packed=cfg.quantization is not None)
    yield spread("model.embed_tokens.weight", cfg.vocab_size, D, deviation=EMBEDDING_DEVIATION)
    yield norm("model.norm", D)
    if not cfg.tie_word_embeddings:
        yield matrix("lm_head", cfg.vocab_size, D)


def random_arrays(cfg: ModelConfig, **kwargs: Any) -> dict[str, np.ndarray]:
    """`random_tensors` in memory, by name."""
    return {name: tensor.make() for name, tensor in random_tensors(cfg, **kwargs)}


def num_bytes(tensor: LazyTensor) -> int:
    """Bytes the tensor takes on disk."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_random_checkpoint(
    out: str | Path,
    cfg: ModelConfig,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    prefix: bool = True,
    shards: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes the whole folder and returns its path, bytes and number of tensors."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tensors = list(random_tensors(cfg, seed=seed, dtype=dtype, prefix=prefix))
    sizes = [num_bytes(tensor) for _, tensor in tensors]
    if prefix:
        config = cfg.to_kimi_k25_dict() | {"dtype": dtype}
        config["text_config"] |= {"dtype": dtype}
    else:
        config = cfg.to_dict() | {"model_type": "kimi_k2", "dtype": dtype}
    num_ranks = cfg.vocab_size - NUM_SPECIAL_SLOTS
    write_tokenizer(out, num_ranks)
    generation = {
        "bos_token_id": cfg.bos_token_id,
        # <|im_end|>, one above the [EOS] of config.json, as published.
        "eos_token_id": num_ranks + 2,
        "pad_token_id": cfg.pad_token_id,
        "max_length": cfg.max_position_embeddings,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    hidden = None if progress else True  # None: hidden unless stderr is a terminal
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="writing", disable=hidden) as bar:
        # Half of the largest tensor: a shard ends before the tensor that would overfill it.
        count = shards or sum(sizes) // SHARD_BYTES + 1
        limit = -(-sum(sizes) // count) + max(sizes) // 2
        counted = ((name, _counted(tensor, bar)) for name, tensor in tensors)
        write_checkpoint(out, counted, config, max_shard_bytes=limit, overwrite=overwrite)
    return {"path": str(out), "bytes": sum(sizes), "tensors": len(tensors)}


def _counted(tensor: LazyTensor, bar: tqdm) -> LazyTensor:
    def make() -> np.ndarray:
        bar.update(num_bytes(tensor))
        return tensor.make()

    return dataclasses.replace(tensor, make=make)


def write_tokenizer(out: Path, num_ranks: int) -> None:
    """A byte-level vocabulary: the 256 bytes, then pairs of bytes, printable ASCII first."""
    order = [*range(32, 127), *range(32), *range(127, 256)]
    place = {byte: i for i, byte in enumerate(order)}
    pairs = sorted(itertools.product(order, repeat=2), key=lambda p: max(place[p[0]], place[p[1]]))
    words = [bytes([byte]) for byte in range(256)] + [bytes(pair) for pair in pairs]
    ranks = {word: rank for rank, word in enumerate(words[:num_ranks])}
    write_tiktoken_model(out / "tiktoken.model", ranks)
    config = published_tokenizer_config(num_ranks)
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = files("kimi_jax") / "demo" / "chat_template.jinja"
    (out / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")


def make_random_checkpoint(
    out: str | Path,
    preset: str = "tiny",
    *,
    experts: str = "int4",
    seed: int = 0,
    prefix: bool = True,
    dtype: str = "bfloat16",
    shards: int | None = None,
    **changes: Any,
) -> ModelConfig:
    """Writes a preset's checkpoint to the folder and returns its configuration."""
    cfg = preset_config(preset, experts=experts, **changes)
    write_random_checkpoint(out, cfg, seed=seed, dtype=dtype, prefix=prefix, shards=shards)
    return cfg


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="the folder to write")
    add("--preset", choices=PRESETS, default="tiny")
    add("--experts", choices=("int4", "bf16"), default="int4", help="bf16: stored as --dtype")
    add("--seed", type=int, default=0)
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="names start with language_model. and config.json is nested, as in Kimi-K2.5",
    )
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--shards", type=int, help="about how many files (default: of 5 GB at most)")
    add("--force", action="store_true", help="write into a folder that is not empty")
    args = parser.parse_args(argv)
    if (args.shards is not None and args.shards < 1) or args.seed < 0:
        parser.error("--shards must be at least 1 and --seed at least 0")
    cfg = preset_config(args.preset, experts=args.experts)
    size = sum(num_bytes(tensor) for _, tensor in random_tensors(cfg, dtype=args.dtype))
    print(f"{args.preset}: {size / 1e9:.3f} GB into {args.out}", file=sys.stderr)
    try:
        if args.out.is_dir() and any(args.out.iterdir()) and not args.force:
            parser.error(f"{args.out} is not empty; choose another folder or pass --force")
        args.out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(args.out).free
        if free < size + SPARE_BYTES:
            parser.error(f"{args.out}: {free / 1e9:.3f} GB free on that disk, not enough")
        done = write_random_checkpoint(
            args.out,
            cfg,
            seed=args.seed,
            dtype=args.dtype,
            prefix=args.prefix,
            shards=args.shards,
            overwrite=args.force,
            progress=True,
        )
    except OSError as error:
        parser.error(str(error))
    print(json.dumps(done | {"preset": args.preset, "seed": args.seed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
