"""Checks a downloaded checkpoint before anything is loaded, and says what to download again.

    python scripts/load_check.py PATH --devices 8              # headers and sizes: seconds
    python scripts/load_check.py PATH --devices 8 --verify     # every byte: as fast as the disk

The first names at once every shard that is missing, cut short or spoilt, and every tensor that is
missing, unknown, misplaced, of a wrong shape or dtype; it says how many bytes each device would
hold and on which GPUs that fits. The second also compares each file with the hash the hub's client
left beside it (`hf download --local-dir`, or its cache), and names tensors that hold NaN or
infinite values and `weight_shape` tensors that contradict the words.

Of a converted checkpoint (scripts/convert_checkpoint.py) it checks the record and every file's
size, and with --verify every file's checksum.

PATH is a folder, or a hub id "owner/name" that is in the hub's cache already: nothing is
downloaded. The 64 shards and 208,550 tensors of Kimi-K2.5 take about 10 seconds on one core. The
last line of stdout is JSON; the exit status is 1 if something is wrong. Needs no GPU.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from kernels_pallas.compile_only import HARDWARE
from kimi_jax.checkpoint.converted import RECORD_NAME, Converted, verify_files
from kimi_jax.checkpoint.load import open_checkpoint
from kimi_jax.checkpoint.reader import CheckpointError, Survey, resolve, survey
from kimi_jax.checkpoint.table import check
from kimi_jax.checkpoint.verify import METADATA, known_hashes, verify
from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.runtime.llm import DTYPES
from kimi_jax.runtime.mesh import MESH_AXES, MeshError, check_sizes, parse_mesh
from kimi_jax.runtime.placement import abstract_model, bytes_per_device

# Beside config.json, which is read first.
NEEDED = ("tiktoken.model", "tokenizer_config.json")
USEFUL = ("generation_config.json", "chat_template.jinja")
# Of a device's memory: what the driver, XLA and the programs' temporaries take.
RESERVED = 0.06


def look(folder: Path, with_values: bool) -> tuple[Survey, ModelConfig | None, dict[str, Any]]:
    """What headers and sizes tell: the survey, the configuration, and findings."""
    found = survey(folder)
    problems, notes = list(found.problems), []
    broken = dict(found.broken)
    for name in ("config.json", *NEEDED):
        if not (folder / name).is_file():
            problems.append(f"{name}: missing")
            broken[name] = "missing"
    notes += [f"{name}: not there" for name in USEFUL if not (folder / name).is_file()]
    partial = sorted(folder.glob(f"{METADATA}/**/*.incomplete"))
    partial += sorted((folder.parent.parent / "blobs").glob("*.incomplete"))
    if partial:
        notes.append(f"{len(partial)} unfinished download(s), such as {partial[0].name}")
    cfg = None
    if "config.json" not in broken:
        try:
            cfg = ModelConfig.from_folder(folder)
            cfg = check(cfg, found.files, absent=found.absent, with_values=with_values).cfg
        except ConfigError as error:
            problems.append(f"config.json: {error}")
        except CheckpointError as error:
            problems += error.problems
    return found, cfg, {"problems": problems, "notes": notes, "broken": broken}


def check_converted(args: argparse.Namespace, folder: Path, sizes: dict[str, int]) -> int:
    """The whole check of what scripts/convert_checkpoint.py has written; the exit status."""
    began = time.perf_counter()
    problems: list[str] = []
    result: dict[str, Any] = {"path": str(folder), "converted": True, "ok": False}
    try:
        plan = open_checkpoint(ModelConfig.from_folder(folder), folder)
        assert isinstance(plan, Converted)
        files = [file for piece in plan.pieces.values() for file in piece.files.values()]
        result |= {
            "pieces": len(plan.pieces),
            "files": len(files),
            "bytes": sum(size for size, _ in files),
            "source": plan.record.source,
        }
        print(
            f"{folder}\nconverted from {plan.record.source['folder']}: {result['pieces']} pieces, "
            f"{result['files']} files, {result['bytes'] / 1e9:.3f} GB, {plan.record.dtype}"
        )
        result["placement"] = placement(plan.cfg, sizes, args.dtype)
        _print_placement(result["placement"])
        if args.verify:
            problems += verify_files(plan)
    except CheckpointError as error:
        problems += error.problems
    except (ConfigError, MeshError) as error:
        problems.append(str(error))
    if problems:
        print(f"\n{len(problems)} problem(s):", *problems, sep="\n  ")
    result |= {
        "ok": not problems,
        "problems": problems,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if not problems:
        checked = "every checksum compared" if args.verify else "by the record and sizes"
        print(f"\nnothing is wrong ({checked}, {result['seconds']:.1f} s)")
    print(json.dumps(result))
    return int(bool(problems))


def placement(cfg: ModelConfig, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    """Bytes of weights and cache on each device of a mesh, and which GPUs have that much.

    Raises:
        MeshError: the mesh does not divide the model.
    """
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES)
    check_sizes(cfg, mesh)
    weights = bytes_per_device(abstract_model(cfg, mesh, DTYPES[dtype]).wanted)
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    # The latent cache is whole on every device.
    per_token = cfg.num_hidden_layers * width * DTYPES[dtype].itemsize
    fits = {}
    for name, hardware in HARDWARE.items():
        spare = int(hardware.memory_bytes * (1 - RESERVED)) - weights
        fits[name] = {
            "memory_bytes": hardware.memory_bytes,
            "fits": spare > 0,
            "spare_bytes": spare,
            "cache_tokens": max(0, spare // per_token),
        }
    return {
        "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
        "devices": mesh.size,
        "dtype": dtype,
        "bytes_per_device": weights,
        "cache_bytes_per_token": per_token,
        "hardware": fits,
    }


def download_command(folder: Path, names: list[str]) -> str:
    """What fetches these files again."""
    cached = re.search(r"models--(.+?)--(.+?)/snapshots/", f"{folder}/")
    if cached:
        return f"hf download {cached[1]}/{cached[2]} --force-download {' '.join(names)}"
    return f"hf download OWNER/NAME --local-dir {folder} --force-download {' '.join(names)}"


def main(argv: list[str] | None = None) -> int:
    """Runs the check; see the module's docstring."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("path", help="checkpoint folder, or the id of one in the hub's cache")
    add("--devices", type=int, help="same as --mesh tensor=N (default 8)")
    add("--mesh", help="such as tensor=8 or expert=4,tensor=2")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights that are not packed")
    add("--verify", action="store_true", help="read every byte")
    args = parser.parse_args(argv)
    if args.devices is not None and (args.devices < 1 or args.mesh is not None):
        parser.error("--devices is at least 1, and stands for --mesh")
    try:
        sizes = parse_mesh(args.mesh) if args.mesh else {"tensor": args.devices or 8}
    except MeshError as error:
        parser.error(str(error))
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        folder = resolve(args.path)
        if (folder / RECORD_NAME).exists():
            return check_converted(args, folder, sizes)
        found, cfg, findings = look(folder, with_values=args.verify)
    except CheckpointError as error:
        print(error)
        print(json.dumps({"path": args.path, "ok": False, "problems": list(error.problems)}))
        return 1
    problems, broken = findings["problems"], findings["broken"]
    files = found.files
    result: dict[str, Any] = {
        "path": str(folder),
        "ok": False,
        "shards": len(files.shard_sizes),
        "tensors": len(files.tensors),
        "bytes": files.num_bytes,
    }
    print(
        f"{folder}\n{result['shards']} whole shards, {result['tensors']} tensors, "
        f"{result['bytes'] / 1e9:.3f} GB"
    )
    if cfg is not None:
        try:
            result["placement"] = placement(cfg, sizes, args.dtype)
            _print_placement(result["placement"])
        except MeshError as error:
            problems.append(str(error))
    result["header_seconds"] = round(time.perf_counter() - began, 3)
    if args.verify:
        result["verified"] = _verify(found, problems, broken)
    if findings["notes"]:
        print("\nnoted:", *findings["notes"], sep="\n  ")
    if problems:
        print(f"\n{len(problems)} problem(s):", *problems, sep="\n  ")
    again = sorted(broken)
    if again:
        print("\ndownload again:", *(f"{name} ({broken[name]:.60})" for name in again), sep="\n  ")
        print(f"  {download_command(folder, again)}")
    result |= {
        "ok": not problems,
        "problems": problems,
        "notes": findings["notes"],
        "download_again": again,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if not problems:
        checked = "every byte was read" if args.verify else "by headers and sizes"
        print(f"\nnothing is wrong ({checked}, {result['seconds']:.1f} s)")
    print(json.dumps(result))
    return int(bool(problems))


def _print_placement(place: dict[str, Any]) -> None:
    print(
        f"\non each of {place['devices']} devices ({place['mesh']}, {place['dtype']}): weights "
        f"{place['bytes_per_device'] / 1e9:.2f} GB, cache "
        f"{place['cache_bytes_per_token'] / 1e3:.1f} kB a token of each row"
    )
    print(f"{'GPU':>14} {'memory GB':>10} {'left GB':>8} {'cache tokens, all rows':>23}")
    for name, fit in place["hardware"].items():
        tokens = fit["cache_tokens"] if fit["fits"] else "does not fit"
        print(
            f"{name:>14} {fit['memory_bytes'] / 1e9:10.1f} {fit['spare_bytes'] / 1e9:8.1f} "
            f"{tokens:>23}"
        )


def _verify(found: Survey, problems: list[str], broken: dict[str, str]) -> dict[str, Any]:
    began = time.perf_counter()
    hashes = known_hashes(found.files.folder)
    read = verify(found.files, hashes)
    seconds = time.perf_counter() - began
    problems += read.problems
    broken |= read.broken
    speed = read.num_bytes / 1e9 / seconds
    unknown = len(found.files.shard_sizes) - sum(n.endswith(".safetensors") for n in read.hashed)
    print(
        f"\nread {read.num_bytes / 1e9:.3f} GB in {seconds:.1f} s ({speed:.2f} GB/s); "
        f"{len(read.hashed)} files compared with the hub's hashes, {unknown} shards without one"
    )
    return {
        "bytes": read.num_bytes,
        "seconds": round(seconds, 3),
        "gb_per_second": round(speed, 3),
        "hashed": read.hashed,
        "shards_without_hash": unknown,
    }


if __name__ == "__main__":
    sys.exit(main())
