"""Measures how long all-reduces and all-gathers of a mesh take, by their size.

    python scripts/probe_collectives.py --mesh tensor=8 --out measured.json
    python scripts/plan.py --interconnect measured.json

What it does: for each size from 1 KB to 2 MB a program chains collectives, each waiting for the one
before, as the layers of a decode step do, in a loop on the device; what is told is the median over
the repeats of a call, over the collectives in it. Between two of them stands one addition, or XLA
would fold them together; a chain of the additions alone is measured beside it and subtracted. Bytes
are those of a collective's result on a device. XLA and NCCL are set up as for decoding, collectives
inside graphs where JAX can (0.11 or newer).

Where nvidia-smi is, its matrices of links and of peer access come along, else null. The file takes
the JSON of the last line: `scripts/plan.py` reads it. On a CPU the mesh is simulated; that shows
that the script runs, and nothing else: 8 devices on two shared cores took 110 s and 0.2 to 9 ms a
collective, `--repeats 3 --turns 2` a tenth of the time. On GPUs: not measured.

Prints a table, then one JSON line; the status is 1 where the mesh cannot be had, 2 where an option
is wrong.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.flags import (
    MOST_SIMULATED_DEVICES,
    set_gpu_environment,
    set_gpu_flags,
    simulate_mesh,
)
from kimi_jax.runtime.mesh import make_mesh, parse_mesh

LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 21
KINDS = ("all-reduce", "all-gather")
CHAINED = 8
"""Collectives in one turn of the loop, that is in one graph."""
DTYPE = jnp.dtype(jnp.bfloat16)
LEAST_MICROSECONDS = 0.01
"""Told where noise makes a collective cheaper than nothing."""


def sizes_between(least: int, most: int) -> tuple[int, ...]:
    """Powers of two from `least` to `most` bytes."""
    return tuple(1 << e for e in range((least - 1).bit_length(), most.bit_length()))


def _chain(kind: str, axes: tuple[str, ...], turns: int, x: jax.Array, own: jax.Array):
    """`turns * CHAINED` collectives, or of kind "" the additions between them alone."""

    def one(x: jax.Array) -> jax.Array:
        if kind == "all-reduce":
            x = jax.lax.psum(x, axes)
        elif kind == "all-gather":
            x = jax.lax.all_gather(x, axes, tiled=True)[: own.shape[0]]
        # What each device adds is its own, or one sum of sums would do.
        return jax.lax.optimization_barrier(x + own)

    def turn(_: int, x: jax.Array) -> jax.Array:
        for _ in range(CHAINED):
            x = one(x)
        return x

    return jax.lax.fori_loop(0, turns, turn, x)


def compile_chain(mesh: Mesh, kind: str, num_bytes: int, turns: int) -> Callable[[], None]:
    """A call that runs the chain and waits for it.

    Raises:
        RuntimeError: the compiler has folded collectives together.
    """
    axes, devices = mesh.axis_names, mesh.size
    # Of an all-gather, the bytes are its result's, of which a device gives its part.
    local = num_bytes // DTYPE.itemsize // (devices if kind == "all-gather" else 1)
    pspec = PartitionSpec(axes)
    body = functools.partial(_chain, kind, axes, turns)
    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(pspec, pspec), out_specs=pspec, check_vma=False)
    )
    place = NamedSharding(mesh, pspec)
    zeros = jax.device_put(jnp.zeros((max(local, 1) * devices,), DTYPE), place)
    compiled = program.lower(zeros, zeros).compile()
    text = compiled.as_text() or ""
    for name in KINDS:
        found = text.count(f" {name}(") + text.count(f" {name}-start(")
        # A loop that the compiler unrolls has them several times over.
        if found % CHAINED or bool(found) != (name == kind):
            raise RuntimeError(f"{CHAINED} {kind or 'additions'} became {found} {name}: not timed")

    def run() -> None:
        jax.block_until_ready(compiled(zeros, zeros))

    return run


def measure(
    mesh: Mesh, sizes: Sequence[int], repeats: int, turns: int, *, progress: bool = False
) -> list[dict[str, Any]]:
    """A row for each kind of collective and size, microseconds each, their least and most.

    The additions between the collectives are subtracted, in each repeat those measured beside it.
    """
    rows = []
    jobs = [(kind, size) for kind in KINDS for size in sizes]
    for kind, size in tqdm(jobs, "probing", disable=not progress, leave=False):
        # An all-gather's addition is over the part a device gives.
        added = size // mesh.size if kind == "all-gather" else size
        chain = compile_chain(mesh, kind, size, turns)
        bare = compile_chain(mesh, "", added, turns)
        found, between = [], []
        # The first call runs eagerly, the second captures a graph.
        for turn in range(repeats + 3):
            seconds = []
            for run in (chain, bare):
                began = time.perf_counter()
                run()
                seconds.append((time.perf_counter() - began) / (turns * CHAINED))
            if turn > 2:
                found.append(max(1e6 * (seconds[0] - seconds[1]), LEAST_MICROSECONDS))
                between.append(1e6 * seconds[1])
        rows.append(
            {
                "name": kind,
                "bytes": size,
                "us": round(statistics.median(found), 3),
                "us_least": round(min(found), 3),
                "us_most": round(max(found), 3),
                "us_between": round(statistics.median(between), 3),
            }
        )
    return rows


def read_topology() -> dict[str, list[str] | None]:
    """What nvidia-smi says of links and of peer access (reads), by lines; None where it is not."""
    queries = {"topology": ["topo", "-m"], "peer_access": ["topo", "-p2p", "r"]}
    return {name: _nvidia_smi(query) for name, query in queries.items()}


def _nvidia_smi(query: list[str]) -> list[str] | None:
    try:
        run = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip().splitlines() if run.returncode == 0 else None


def probe(
    mesh: Mesh, sizes: Sequence[int], repeats: int, turns: int, *, progress: bool = False
) -> dict[str, Any]:
    """The object of the file `scripts/plan.py` reads."""
    rows = measure(mesh, sizes, repeats, turns, progress=progress)
    told = conditions(
        mesh=dict(mesh.shape),
        devices=mesh.size,
        dtype=DTYPE.name,
        repeats=repeats,
        collectives_a_call=turns * CHAINED,
    )
    # The mesh may be of another platform than the default one.
    device = mesh.devices.flat[0]
    told |= {"platform": device.platform, "device": device.device_kind}
    return {"measures": "collectives", "rows": rows, **read_topology(), "conditions": told}


def show(found: dict[str, Any]) -> None:
    """The table."""
    told = found["conditions"]
    print(f"{told['devices']} devices, {told['device']}, mesh {told['mesh']}\n")
    print(f"{'us a collective':12}{'KB':>9}{'median':>10}{'least':>10}{'most':>10}{'between':>10}")
    for row in found["rows"]:
        print(
            f"{row['name']:15}{row['bytes'] / 1024:9.0f}{row['us']:10.1f}{row['us_least']:10.1f}"
            f"{row['us_most']:10.1f}{row['us_between']:10.1f}"
        )
    for name in ("topology", "peer_access"):
        lines = found[name]
        print(f"\n{name}: " + ("nvidia-smi does not tell" if lines is None else "\n".join(lines)))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mesh", default="tensor=8", help="devices: tensor=8 (default) or expert=4,tensor=2")
    add("--platform", help="cpu or gpu (default: what JAX takes)")
    add("--least", type=int, default=LEAST_BYTES, metavar="BYTES", help="(%(default)s)")
    add("--most", type=int, default=MOST_BYTES, metavar="BYTES", help="(%(default)s)")
    add("--repeats", type=int, default=11, help="calls of each size (%(default)s)")
    add("--turns", type=int, default=16, help=f"{CHAINED} collectives each, in a call (16)")
    add("--out", type=Path, metavar="JSON", help="writes the JSON here too")
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, checked; `mesh` as sizes, `sizes` the bytes."""
    args = parser.parse_args()
    try:
        args.mesh = parse_mesh(args.mesh)
    except ValueError as error:
        parser.error(str(error))
    devices = 1
    for size in args.mesh.values():
        devices *= size
    if not 2 <= devices <= MOST_SIMULATED_DEVICES:
        parser.error(f"--mesh has {devices} devices, expected 2..{MOST_SIMULATED_DEVICES}")
    if min(args.repeats, args.turns) < 1:
        parser.error("--repeats and --turns must be at least 1")
    least = devices * DTYPE.itemsize
    if not least <= args.least <= args.most <= 1 << 30:
        parser.error(
            f"--least {args.least} and --most {args.most}: expected {least} <= least <= most <= "
            f"{1 << 30}"
        )
    args.sizes = sizes_between(args.least, args.most)
    if not args.sizes:
        parser.error(f"no power of two lies between --least {args.least} and --most {args.most}")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: no such folder")
    return args


def main() -> None:
    """The command line."""
    parser = make_parser()
    args = read_options(parser)
    simulate_mesh(args.mesh)
    set_gpu_flags()
    set_gpu_environment()
    try:
        mesh = make_mesh(args.mesh, args.platform)
        found = probe(mesh, args.sizes, args.repeats, args.turns, progress=sys.stderr.isatty())
    except (ValueError, RuntimeError) as error:
        parser.exit(1, f"probe_collectives.py: error: {error}\n")
    show(found)
    line = json.dumps(found)
    if args.out is not None:
        args.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
