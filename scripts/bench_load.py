"""Speed and memory of loading a checkpoint, against `cat` of the same files in the same run.

    python scripts/make_random_checkpoint.py OUT --preset kimi-k2.5-layer
    python scripts/bench_load.py OUT --mesh tensor=8 --dtype bfloat16
    python scripts/convert_checkpoint.py OUT CONVERTED
    python scripts/bench_load.py OUT --converted CONVERTED --mesh tensor=8

The files are read once before, so that both find them in the page cache; then each takes its turn
in a process of its own, `--repeats` times. What counts as loading: headers checked, plan made and
every parameter on its device in the kernels' layout; imports, JAX's start and the tokenizer do not
count. With `--converted` the checkpoint that scripts/convert_checkpoint.py has made of it takes its
turns too. Memory is the peak of what the loading process holds, the weights on the (CPU) devices
included. On a virtual machine the first touch of memory may cost far more than all of loading,
since the host has to find it; `--memory-ready` takes the memory before the clock starts (Linux with
glibc). Prints a table and one JSON line; figures seen last are in the README.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint.converted import PIECES
from kimi_jax.runtime.conditions import conditions

_LOAD = """
import ctypes, json, sys, time
from pathlib import Path
from kimi_jax.runtime.flags import simulate_mesh
from kimi_jax.runtime.mesh import make_mesh, parse_mesh

folder, mesh, dtype, ready_bytes = sys.argv[1:]
sizes = parse_mesh(mesh)
simulate_mesh(sizes)
import jax
import jax.numpy as jnp
import numpy as np
from kimi_jax.checkpoint.load import load_params, open_checkpoint
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.placement import abstract_model, kept_dtypes

def peak():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

mesh = make_mesh(sizes)
jnp.zeros((8,)).block_until_ready()
base = peak()
if int(ready_bytes):
    # Freed memory stays with the process: no mapping of its own for large arrays, no trimming.
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)
    libc.mallopt(-1, -1)
    np.empty(int(ready_bytes), np.uint8)[::4096] = 1
began, cpu = time.perf_counter(), time.process_time()
plan = open_checkpoint(ModelConfig.from_folder(Path(folder)), folder)
kept = kept_dtypes(plan, jnp.dtype(dtype), platform=jax.devices()[0].platform)
wanted = abstract_model(plan.cfg, mesh, jnp.dtype(dtype), dtypes=kept).wanted
planned = time.perf_counter()
params = load_params(plan, wanted, progress=False)
done = time.perf_counter()
print(json.dumps({
    "seconds": done - began,
    "plan_seconds": planned - began,
    "cpu_seconds": time.process_time() - cpu,
    "bytes_before": base,
    "peak_bytes": peak(),
    "weight_bytes": sum(array.nbytes for array in params.values()),
    "platform": jax.devices()[0].platform,
}))
"""


def cat_seconds(shards: list[Path]) -> float:
    """Seconds `cat` takes to read the files."""
    began = time.perf_counter()
    subprocess.run(["cat", *map(str, shards)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def load(folder: Path, mesh: str, dtype: str, ready_bytes: int) -> dict[str, Any]:
    """What one load in a process of its own took and held."""
    command = [sys.executable, "-c", _LOAD, str(folder), mesh, dtype, str(ready_bytes)]
    run = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return json.loads(run.stdout.splitlines()[-1])


def _print_row(size: int, cat: float, row: dict[str, Any], what: str = "") -> None:
    print(
        f"{size / cat / 1e9:9.2f} {size / row['seconds'] / 1e9:10.2f} {cat / row['seconds']:6.2f} "
        f"{row['cpu_seconds']:6.1f} {row['peak_bytes'] / 1e9:8.2f}{what}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="checkpoint folder")
    parser.add_argument("--converted", type=Path, help="what was converted of it")
    parser.add_argument("--mesh", default="tensor=8")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--memory-ready", action="store_true", help="take the memory before the clock starts"
    )
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    shards = sorted(args.path.glob("*.safetensors"))
    if not shards:
        parser.error(f"{args.path}: no safetensors files")
    size = sum(shard.stat().st_size for shard in shards)
    parts = []
    if args.converted is not None:
        parts = [path for path in sorted((args.converted / PIECES).rglob("*")) if path.is_file()]
        if not parts:
            parser.error(f"{args.converted}: no converted checkpoint")
    cat_seconds(shards + parts)
    rows = []
    for _ in range(args.repeats):
        cat = cat_seconds(shards)
        ready = 0
        if args.memory_ready:
            # Weights in float32 may be twice their size on disk; packed ones never are.
            ready = size if args.dtype == "bfloat16" else int(1.3 * size)
            ready += 200_000_000
        rows.append({"cat_seconds": cat} | load(args.path, args.mesh, args.dtype, ready))
        if parts:
            rows[-1]["converted"] = load(args.converted, args.mesh, args.dtype, ready)
    print(f"{'cat GB/s':>9} {'load GB/s':>10} {'share':>6} {'CPU s':>6} {'peak GB':>8}")
    for row in rows:
        row["share_of_cat"] = row["cat_seconds"] / row["seconds"]
        _print_row(size, row["cat_seconds"], row)
        if parts:
            _print_row(size, row["cat_seconds"], row["converted"], " converted")
    converted = {}
    if parts:
        own = [row["converted"] for row in rows]
        converted = {
            "restore_gb_per_second": size / 1e9 / statistics.median(r["seconds"] for r in own),
            "restore_over_load": statistics.median(
                row["seconds"] / row["converted"]["seconds"] for row in rows
            ),
            "restore_peak_bytes": max(row["peak_bytes"] for row in own),
        }
    result = converted | {
        "bytes_on_disk": size,
        "cat_gb_per_second": size / 1e9 / statistics.median(r["cat_seconds"] for r in rows),
        "load_gb_per_second": size / 1e9 / statistics.median(r["seconds"] for r in rows),
        "share_of_cat": statistics.median(row["share_of_cat"] for row in rows),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "rows": rows,
        "conditions": conditions(
            mesh=args.mesh,
            dtype=args.dtype,
            memory_ready=args.memory_ready,
            load_average=os.getloadavg(),
        ),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
