"""Converts a published checkpoint to the kernels' layout, so that loading transposes nothing.

    python scripts/convert_checkpoint.py SOURCE OUT
    python scripts/convert_checkpoint.py SOURCE OUT --mesh expert=8,tensor=8 --dtype bfloat16
    python scripts/generate.py --model OUT --mesh tensor=8 --prompt "..."

What it does: loads every parameter as a model on the devices of --mesh would have it and writes it
with orbax, uncompressed, a file for each device's share; copies configuration, tokenizer and
template; and writes `converted.json` last, with the source's fingerprint, the layout's version and
a checksum of every file. OUT is then a checkpoint like the published one for every script. It
loads onto any number of devices: each reads its own share alone where that is made of whole files,
as for 1, 2, 4 and 8 devices of --mesh tensor=8.

Resumable: run the same command again after a kill, or after a file was found missing or spoilt.
Whole pieces stay. It says before it starts how much disk it takes: 594 GB for Kimi-K2.5. As many
CPU devices as the mesh has are simulated; no GPU is used.

Progress and errors go to stderr; the last line of stdout is JSON. Exit status: 0, 1 when it cannot
be converted, 2 when an option is wrong. A full-width layer with 96 experts (2.8 GB) took 19 s on
two busy cores.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from generate import model_path

from kimi_jax.checkpoint.convert import convert, prepare
from kimi_jax.checkpoint.converted import holds, read_record
from kimi_jax.checkpoint.reader import CheckpointError, CheckpointFiles, resolve, summarise
from kimi_jax.checkpoint.table import Plan, check
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.flags import simulate_mesh
from kimi_jax.runtime.llm import DTYPES
from kimi_jax.runtime.mesh import check_sizes, make_mesh, parse_mesh
from kimi_jax.runtime.placement import abstract_model, kept_dtypes, stored_dtype

_log = logging.getLogger("convert_checkpoint")


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", help="a published checkpoint: a folder, a hub id, or demo")
    add("out", type=Path, help="the folder to write; a conversion that was stopped is gone on with")
    add(
        "--mesh",
        default="tensor=8",
        help="the largest mesh it will be loaded onto: files are cut so (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=sorted(DTYPES),
        help="of weights that are not packed; default: bfloat16 if it holds every value",
    )
    add("--quiet", action="store_true", help="no progress, only the JSON line")
    return parser


def rounded_by(plan: Plan, dtype: str) -> list[str]:
    """Parameters whose stored floats a dtype does not hold."""
    return [
        path
        for path, row in plan.parameters.items()
        if row.kind == "float" and not holds(DTYPES[dtype], stored_dtype(plan, path))
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole job; what the JSON line says.

    Raises:
        ValueError, OSError: the options, the source, the folder or the disk.
    """
    sizes = parse_mesh(args.mesh)
    source = resolve(model_path(args.source))
    if read_record(source) is not None:
        raise CheckpointError(source, ["is a converted checkpoint; give the published one"])
    jax.config.update("jax_platforms", "cpu")
    simulate_mesh(sizes)
    plan = check(ModelConfig.from_folder(source), CheckpointFiles.open(source))
    mesh = make_mesh(sizes)
    check_sizes(plan.cfg, mesh)
    dtype = args.dtype or ("float32" if rounded_by(plan, "bfloat16") else "bfloat16")
    if rounded := rounded_by(plan, dtype):
        _log.warning(
            "%s rounds %s: --dtype float32 keeps every value", dtype, summarise(rounded, 3)
        )
    # What a CPU keeps narrow: where a wider dtype is wanted, loading widens.
    kept = kept_dtypes(plan, DTYPES[dtype], platform="cpu")
    wanted = abstract_model(plan.cfg, mesh, DTYPES[dtype], dtypes=kept).wanted
    job = prepare(plan, wanted, args.out, dtype=dtype, mesh=mesh.shape)
    _log.info(
        "%s: %.3f GB in %d pieces, cut as %s, %s",
        job.out,
        job.num_bytes() / 1e9,
        len(job.pieces),
        args.mesh,
        dtype,
    )
    if job.whole:
        _log.info("%d pieces are there already, %d are left", len(job.whole), len(job.left))
    if job.spoilt:
        _log.warning("not whole, written again: %s", summarise(job.spoilt))
    began = time.perf_counter()
    record = convert(job, progress=not args.quiet)
    seconds = time.perf_counter() - began
    written = job.num_bytes(job.left)
    return {
        "out": str(job.out),
        "source": record.source,
        "layout_version": record.layout_version,
        "dtype": dtype,
        "bytes": job.num_bytes(),
        "pieces": len(job.pieces),
        "pieces_written": len(job.left),
        "bytes_written": written,
        "rounded": len(rounded),
        "seconds": round(seconds, 3),
        "gb_per_second": round(written / 1e9 / seconds, 3) if written else None,
        "conditions": conditions(mesh=args.mesh, dtype=dtype),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("kimi_jax", "convert_checkpoint"):
        logging.getLogger(name).setLevel(logging.WARNING if args.quiet else logging.INFO)
    try:
        out = run(args)
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    if not args.quiet:
        print(
            f"{out['pieces_written']} of {out['pieces']} pieces written, "
            f"{out['bytes_written'] / 1e9:.3f} GB in {out['seconds']:.1f} s"
        )
    print(json.dumps(out), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
