"""Goldens of the text model: what transformers computes for tiny random checkpoints.

    python scripts/make_goldens.py            # needs the extra `reference`; 15 s on one core

For each case, a float32 checkpoint is made from its seed (make_random_checkpoint.py), INT4 experts
are unpacked by compressed-tensors, and transformers runs a prompt that is longer than
`original_max_position_embeddings`. tests/goldens/NAME.npz keeps the prompt, float32 logits at some
positions, the hidden states entering each layer and leaving the last, the chosen experts, and, as
JSON, the recipe of the checkpoint, its checksum, its config and the versions. The last line of
stdout is JSON.
"""

import argparse
import json
import platform
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from make_random_checkpoint import make_random_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file

GOLDENS = Path(__file__).parents[1] / "tests" / "goldens"
# `prefix` also picks the class: Kimi_K25ForConditionalGeneration with it, DeepseekV3ForCausalLM
# without.
CASES: dict[str, dict[str, Any]] = {
    "tiny-float": {"seed": 1, "experts": "bf16", "prefix": False},
    "tiny-int4": {"seed": 2, "experts": "int4", "prefix": True},
    "tiny-groups": {
        "seed": 3,
        "experts": "bf16",
        "prefix": False,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
}
NUM_TOKENS = 48
POSITIONS = np.arange(2, NUM_TOKENS, 3)
# Float32 noise must not be able to change a choice of experts.
MINIMAL_MARGIN = 1e-4


class Reference(NamedTuple):
    """What the reference computes for one prompt."""

    logits: np.ndarray  # [T, V] float32
    hidden: np.ndarray  # [L + 1, T, D] float32, the last before the final norm
    experts: np.ndarray  # [MoE layers, T, A], ids in increasing order
    margin: float  # smallest distance between a chosen and a rejected expert


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder, by name."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def checksum(folder: Path) -> int:
    """CRC-32 over all tensors' names and bytes, in order of name."""
    crc = 0
    for name, tensor in sorted(read_folder(folder)):
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    return crc


def decompress(tensors: dict[str, torch.Tensor], scheme: dict[str, Any]) -> dict[str, torch.Tensor]:
    """compressed-tensors' own unpacking of every packed weight, in float32.

    Scales are widened first: in their own bfloat16 it would round every product again.
    """
    plain = {n: t for n, t in tensors.items() if ".weight_" not in n}
    for name in tensors:
        at, found, _ = name.partition(".weight_packed")
        if found:
            state = {n: tensors[f"{at}.{n}"] for n in ("weight_packed", "weight_shape")}
            state["weight_scale"] = tensors[f"{at}.weight_scale"].float()
            out = PackedQuantizationCompressor.decompress(state, QuantizationScheme(**scheme))
            plain[f"{at}.weight"] = out["weight"]
    return plain


def load_reference(
    folder: str | Path, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> torch.nn.Module:
    """The checkpoint in transformers, experts unpacked."""
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = dict(read_folder(Path(folder)))
    nested = "text_config" in config
    for part in (config, config.get("text_config", {})):
        quantization = part.pop("quantization_config", None)
        part["dtype"] = "float32"
        if quantization is not None:
            scheme = next(iter(quantization["config_groups"].values()))
            tensors = decompress(tensors, scheme)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if nested:
        # A vision tower there is no weight for: as small as it goes, and never run.
        config["vision_config"] = {
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
        }
        kind, config_kind = (
            transformers.Kimi_K25ForConditionalGeneration,
            transformers.Kimi_K25Config,
        )
    else:
        # With "kimi_k2" here transformers 5.24 leaves all experts at random values: it picks the
        # rule that stacks them by this name.
        config["model_type"] = "deepseek_v3"
        kind, config_kind = transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config
    with tempfile.TemporaryDirectory() as plain:
        save_file(tensors, Path(plain) / "model.safetensors", {"format": "pt"})
        for name, content in (("config.json", config), ("generation_config.json", {})):
            (Path(plain) / name).write_text(json.dumps(content))
        model, info = kind.from_pretrained(
            plain,
            config=config_kind.from_dict(config),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    text = model.config.get_text_config()
    vision = ("model.vision_tower.", "model.mm_projector.")
    missing = [name for name in info["missing_keys"] if not name.startswith(vision)]
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"transformers did not load every weight: {missing} {info}")
    if not text.rope_interleave:
        raise RuntimeError("transformers would rotate halves; published weights are interleaved")
    return model.eval()


def text_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder layers of either class."""
    return getattr(model.model, "language_model", model.model).layers


@torch.no_grad()
def run_reference(model: torch.nn.Module, tokens: np.ndarray) -> Reference:
    """One pass over the whole prompt."""
    layers = text_layers(model)
    entering: list[np.ndarray] = []
    routed: list[tuple[np.ndarray, float]] = []

    def keep_input(_module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        entering.append(hidden[0].numpy().copy())

    def keep_output(_module, _args, output):
        entering.append((output[0] if isinstance(output, tuple) else output)[0].numpy().copy())

    def keep_routing(module, _args, output):
        logits, _, ids = output
        choice = logits.sigmoid() + module.e_score_correction_bias
        routed.append((np.sort(ids.numpy(), axis=-1), _margin(choice, ids, module)))

    hooks = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(keep_output))
    gates = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
    hooks += [gate.register_forward_hook(keep_routing) for gate in gates]
    try:
        logits = model(torch.as_tensor(tokens)[None].long(), use_cache=False).logits[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    experts = np.stack([ids for ids, _ in routed])
    return Reference(logits, np.stack(entering), experts, min(margin for _, margin in routed))


def _margin(choice: torch.Tensor, ids: torch.Tensor, gate: torch.nn.Module) -> float:
    """Smallest gap of a decision: between experts of the kept groups, and between groups."""
    T, E = choice.shape
    groups = choice.view(T, gate.num_group, -1)
    gaps = []
    if gate.topk_group < gate.num_group:
        ordered = groups.topk(2).values.sum(-1).sort(descending=True).values
        gaps.append(ordered[:, gate.topk_group - 1] - ordered[:, gate.topk_group])
        kept = groups.topk(2).values.sum(-1).topk(gate.topk_group).indices
        mask = torch.zeros(T, gate.num_group, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.masked_fill(~mask[..., None], float("-inf")).view(T, E)
    ordered = choice.sort(descending=True).values
    gaps.append(ordered[:, ids.shape[1] - 1] - ordered[:, ids.shape[1]])
    return min(gap.min().item() for gap in gaps)


def prompt(seed: int, vocab_size: int, length: int = NUM_TOKENS) -> np.ndarray:
    """Random token ids from numpy's guaranteed stream."""
    return (np.random.PCG64(seed).random_raw(length) % vocab_size).astype(np.int32)


def make_golden(case: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    cfg = make_random_checkpoint(folder, "tiny", dtype="float32", **case)
    tokens = prompt(case["seed"], cfg.vocab_size)
    model = load_reference(folder)
    out = run_reference(model, tokens)
    if out.margin < MINIMAL_MARGIN:
        raise RuntimeError(f"a choice of experts hangs on {out.margin:.1e}; take another seed")
    about = {
        "checkpoint": {"preset": "tiny", "dtype": "float32", **case},
        "checkpoint_crc32": checksum(folder),
        "config": json.loads((folder / "config.json").read_text()),
        "class": type(model).__name__,
        "router_margin": out.margin,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "compressed_tensors": compressed_tensors.__version__,
        },
    }
    return {
        "tokens": tokens,
        "positions": POSITIONS.astype(np.int32),
        "logits": out.logits[POSITIONS],
        "hidden": out.hidden,
        "experts": out.experts.astype(np.int16),
        "about": np.array(json.dumps(about)),
    }


def quiet() -> None:
    """One thread, and no reports about the vision tower that is not there."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=GOLDENS, help="folder (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args(argv)
    quiet()
    sizes = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            arrays = make_golden(CASES[name], Path(folder))
        path = args.out / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        sizes[name] = path.stat().st_size
        largest = np.abs(arrays["logits"]).max()
        print(f"{name}: {sizes[name]} bytes, largest logit {largest:.2f}")
    print(json.dumps({"path": str(args.out), "bytes": sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
