"""Stores a target's hidden states of training samples, for training without the target.

    python scripts/store_states.py --data samples.jsonl --out STATES
    python scripts/store_states.py --model TARGET --mesh tensor=8 --data ... --out ... --length 4096
    python scripts/train_drafter.py --model TARGET --states STATES --out DRAFTER

What it does: runs the target once over the samples (scripts/make_training_data.py makes them) and
writes safetensors shards with ids, loss mask, the last hidden state and the streams a drafter taps.
Says how much disk that takes before it starts: for Kimi-K2.5 with three taps 57 344 bytes a token.
Training that runs the target itself needs none of it and is the default of train_drafter.py; stored
states pay when several drafters are trained on the same samples, or on other machines.

Resumable: shards that are whole are kept. Ends with one JSON line. On two CPU cores the demo gives
about 3 400 tokens a second.
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
import numpy as np
from generate import model_path
from tqdm import tqdm

from kimi_jax import LLM
from kimi_jax.checkpoint.fingerprint import checkpoint_fingerprint
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.flags import simulate_mesh
from kimi_jax.runtime.llm import DTYPES, SMALL_FILES
from kimi_jax.runtime.mesh import make_mesh, parse_mesh
from spec.training.batches import lay_out, pack_order
from spec.training.drafters import default_taps, parse_taps
from spec.training.samples import Header, digest_samples, read_all
from spec.training.states import StatesHeader, StatesWriter, check_space, states_bytes
from spec.training.target import OnlineStates

_log = logging.getLogger("store_states")


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="demo", help="the target: a folder, a hub id, or demo (default)")
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help="samples, .jsonl")
    add("--out", type=Path, required=True, help="the folder of the shards")
    add("--taps", help="layers whose inputs are stored; default: those of a new drafter")
    add("--length", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    add("--rows", type=int, default=4, help="rows run together (default: %(default)s)")
    add("--cut-long", action="store_true", help="cut samples longer than a row; default: skip them")
    add("--mesh", help="devices: tensor=8 or expert=4,tensor=2")
    add("--dtype", choices=sorted(DTYPES), help="default: float32 on a CPU, else bfloat16")
    add("--quiet", action="store_true", help="no progress, only the JSON line")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole job; what the JSON line says.

    Raises:
        ValueError, OSError: an option, the samples, the target or the disk.
    """
    if args.rows < 1 or args.length < 2:
        raise ValueError("--rows must be at least 1, --length at least 2")
    if (args.out / "config.json").exists():
        raise ValueError(f"--out {args.out} holds a model; states need a folder of their own")
    if args.length > 256 and args.length % 256:
        raise ValueError(f"--length is {args.length}, expected a multiple of 256, or up to 256")
    sizes = None if args.mesh is None else parse_mesh(args.mesh)
    simulate_mesh(sizes)
    path = model_path(args.model)
    small = resolve(path, patterns=SMALL_FILES)
    cfg = ModelConfig.from_folder(small)
    taps = default_taps(cfg.num_hidden_layers)
    if args.taps is not None:
        taps = parse_taps(args.taps)
        if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= cfg.num_hidden_layers:
            raise ValueError(
                f"--taps is {args.taps}, expected ascending ids from 0 to {cfg.num_hidden_layers}"
            )
    samples, told = read_all(
        args.data,
        Header.of(small, cfg.vocab_size),
        max_length=args.length,
        long="cut" if args.cut_long else "skip",
    )
    for name, report in told.items():
        _log.info("%s: %s", name, report)
    mesh = make_mesh(sizes)
    dtype = args.dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    num_bytes = states_bytes(num_tokens, cfg.hidden_size, len(taps), DTYPES[dtype].itemsize)
    header = StatesHeader(
        fingerprint=checkpoint_fingerprint(resolve(path)),
        taps=taps,
        hidden_size=cfg.hidden_size,
        dtype=dtype,
        samples_sha256=digest_samples(samples),
        num_samples=len(samples),
    )
    with StatesWriter(args.out, header) as writer:
        missing = [i for i, sample in enumerate(samples) if sample.id not in writer.done]
        left = sum(len(samples[i].input_ids) for i in missing)
        _log.info(
            "%d tokens at %d bytes: %.3g GB, of which %.3g GB are still to be written",
            num_tokens,
            num_bytes // num_tokens,
            num_bytes / 1e9,
            left * (num_bytes // num_tokens) / 1e9,
        )
        check_space(args.out, left * (num_bytes // num_tokens))
        seconds = 0.0
        if missing:
            llm = LLM(
                path, mesh=mesh, max_length=2, max_batch=1, dtype=dtype, progress=not args.quiet
            )
            source = OnlineStates(llm, taps)
            rows = pack_order([len(s.input_ids) for s in samples], missing, args.length)
            began = time.perf_counter()
            bar = tqdm(total=left, unit="token", disable=True if args.quiet else None)
            for at in range(0, len(rows), args.rows):
                batch, placed = lay_out(
                    samples, rows[at : at + args.rows], num_rows=args.rows, length=args.length
                )
                streams = source.streams(batch, placed)
                hidden = np.asarray(streams.hidden)
                joined = np.concatenate([np.asarray(tap) for tap in streams.taps], axis=-1)
                for place in placed:
                    sample = samples[place.sample]
                    own = slice(place.start, place.start + len(sample.input_ids))
                    writer.add(sample, hidden[place.row, own], joined[place.row, own])
                    bar.update(len(sample.input_ids))
            seconds = time.perf_counter() - began
            bar.close()
    return {
        "out": str(args.out),
        "samples": len(samples),
        "resumed_samples": len(samples) - len(missing),
        "tokens": num_tokens,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes // num_tokens,
        # Compiling included.
        "tokens_per_second": left / seconds if seconds else None,
        "read": {name: report.to_dict() for name, report in told.items()},
        "conditions": conditions(model=args.model, taps=taps, dtype=dtype, mesh=dict(mesh.shape)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("kimi_jax", "spec", "store_states"):
        logging.getLogger(name).setLevel(logging.WARNING if args.quiet else logging.INFO)
    try:
        out = run(args)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"store_states.py: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(out), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
