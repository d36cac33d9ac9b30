"""Trains an EAGLE-3 drafter for a target and writes it in the published format.

    python scripts/train_drafter.py --data train.jsonl --held-out held.jsonl --out DRAFTER
    python scripts/train_drafter.py --model TARGET --warm-start DRAFTER --data ... --out ... \\
        --mesh tensor=8 --learning-rate 2e-5 --length 4096 --rows 8
    python scripts/train_drafter.py --smoke                 the whole path in about a minute

What it does: reads samples (scripts/make_training_data.py makes them), chooses the draft vocabulary
from the tokens the target generates, and trains a new drafter, or one that is there, on what the
target says of every token; the target runs beside the training, or its states are read from files
(--states). Every so often, and at the end, it measures loss, accuracy by depth and real tokens per
cycle on held-out samples. `--out` then holds the drafter; `--work` (default OUT.work) the log
(log.jsonl), its plot (log.png) and the checkpoints: the same command goes on where a stopped run
was. Ends with one JSON line.

How long: the steps' time goes by the machine; the bundled demo's drafter took about an hour on two
cores. Needs the extra `train` for the plot.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import io
import json
import logging
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import make_training_data
import numpy as np
from generate import model_path
from jax.sharding import Mesh

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.checkpoint.fingerprint import checkpoint_fingerprint
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH
from kimi_jax.runtime.flags import simulate_mesh
from kimi_jax.runtime.llm import DTYPES, SMALL_FILES
from kimi_jax.runtime.mesh import make_mesh, parse_mesh
from kimi_jax.text.tokenizer import Tokenizer
from spec.drafter import load_drafter
from spec.eagle3.checkpoint import LAYER_PREFIXES
from spec.eagle3.model import target_taps
from spec.training.batches import Schedule, count_targets, pack_order
from spec.training.checkpoints import Checkpoints
from spec.training.drafters import Beginning, export_drafter, new_config, parse_taps
from spec.training.evaluate import decode_held_out, held_out, serve, shares, summary
from spec.training.loss import Ends, Unrolling
from spec.training.run import TrainingError, make_example, plot, read_log, train
from spec.training.samples import Header, Sample, digest_samples, read_all
from spec.training.states import StoredStates
from spec.training.target import (
    OfflineStates,
    OnlineStates,
    StatesSource,
    ends_of,
    load_ends,
)
from spec.training.trainer import Optimisation, Trainer, TrainState
from spec.training.vocabulary import (
    choose_vocabulary,
    count_tokens,
    coverage_of,
    required_ids,
)

_log = logging.getLogger("train_drafter")


SMOKE = (
    "--steps 6 --rows 2 --length 64 --draft-steps 2 --draft-tokens 2 --draft-vocab-size 1024 "
    "--evaluate-every 3 --save-every 2 --learning-rate 1e-3 --eval-prompts 2"
).split()


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="demo", help="the target: a folder, a hub id, or demo (default)")
    add("--data", type=Path, nargs="+", metavar="FILE", help="samples to train on, .jsonl")
    add("--held-out", type=Path, metavar="FILE", help="samples to judge by, never trained on")
    add("--states", type=Path, metavar="DIR", help="samples with stored hidden states, not --data")
    add("--out", type=Path, help="the drafter's folder; weights that are there are replaced")
    add("--work", type=Path, help="log and checkpoints; default: OUT.work")
    add("--smoke", action="store_true", help="data, training, resuming, export and use, in small")
    add(
        "--export-only",
        action="store_true",
        help="write the newest checkpoint of the run that these options began to --out",
    )
    drafter = parser.add_argument_group("drafter")
    add = drafter.add_argument
    add("--warm-start", metavar="PATH", help="a drafter to go on from; its sizes and vocabulary")
    add("--kind", choices=("llama", "mla"), help="of a new one; default: llama")
    add("--eagle-3.1", dest="eagle31", action="store_true", help="its norms, in a new one")
    add("--draft-vocab-size", type=int, help="default: 32000, with --kind mla the target's")
    add("--taps", help="layers of the target whose inputs it reads, such as 2,30,58")
    add("--rope-theta", type=float, help="of a llama one; default: 1e6")
    add("--intermediate-size", type=int, help="default: the target's dense width")
    add("--num-key-value-heads", type=int, help="of a llama one; default: as many as heads")
    add("--layer-prefix", choices=LAYER_PREFIXES, default=LAYER_PREFIXES[0])
    add("--export-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--export-embedding", action="store_true", help="a copy of the target's embedding with it")
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--steps", type=int, help="default: one pass over the samples")
    add("--rows", type=int, help="rows of a batch; default: 4, or the number of devices")
    add("--length", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    add("--cut-long", action="store_true", help="cut samples longer than a row; default: skip them")
    add("--accumulate", type=int, default=1, metavar="N", help="batches a step")
    add("--draft-steps", type=int, default=7, help="of the training-time test (default: 7)")
    add("--decay", type=float, default=0.8, help="weight of a draft step over the one before")
    add("--loss", choices=("cross_entropy", "acceptance"), default="cross_entropy")
    add("--learning-rate", type=float, default=1e-4, help="at its highest (default: 1e-4)")
    add("--warmup-share", type=float, default=0.015, help="of the steps (default: 0.015)")
    add("--clip-norm", type=float, default=0.5, help="of the gradient (default: 0.5)")
    add("--weight-decay", type=float, default=0.0, help="default: 0")
    add(
        "--placement",
        choices=("replicated", "sharded"),
        help="of weights and optimiser: whole on every device, or cut over all; default: cut where "
        "there are several",
    )
    add("--no-remat", action="store_true", help="keep all activations: quicker, more memory")
    add("--seed", type=int, default=0)
    judging = parser.add_argument_group("judging and keeping")
    add = judging.add_argument
    add("--evaluate-every", type=int, metavar="STEPS", help="default: at the end only")
    add("--draft-tokens", type=int, help="K of the measured cycles (default: 3)")
    add("--eval-prompts", type=int, help="replies decoded at an evaluation (default: 16)")
    add("--save-every", type=int, default=100, metavar="STEPS")
    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add("--mesh", help="devices: tensor=8 or expert=4,tensor=2")
    add("--dtype", choices=sorted(DTYPES), help="default: float32 on a CPU, else bfloat16")
    add("--quiet", action="store_true", help="no progress, only the JSON line")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuses options that are wrong or contradict each other.

    Raises:
        ValueError: names them.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('matplotlib draws the log: pip install -e ".[train]"')
    if args.out is None:
        raise ValueError("--out is missing")
    if (args.data is None) == (args.states is None):
        raise ValueError("expected either --data or --states")
    if args.states is not None and args.held_out is not None:
        raise ValueError("--held-out needs the target, which --states does without")
    if args.held_out is None:
        given = {
            "--evaluate-every": args.evaluate_every is not None,
            "--eval-prompts": args.eval_prompts is not None,
            "--draft-tokens": args.draft_tokens is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"only with --held-out: {', '.join(names)}")
    if args.states is not None and args.cut_long:
        raise ValueError("--cut-long is for --data; stored states are of whole samples")
    # What is not given has its default from here on.
    args.evaluate_every = 0 if args.evaluate_every is None else args.evaluate_every
    args.eval_prompts = 16 if args.eval_prompts is None else args.eval_prompts
    args.draft_tokens = min(3, args.draft_steps) if args.draft_tokens is None else args.draft_tokens
    args.out = args.out.expanduser().absolute()
    if args.held_out is not None and args.draft_tokens > args.draft_steps:
        raise ValueError(
            f"--draft-tokens is {args.draft_tokens}, trained are --draft-steps {args.draft_steps}"
        )
    check_out(args.out)
    for path in [*(args.data or []), *([args.held_out] if args.held_out else [])]:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
    for name in ("length", "accumulate", "draft_steps", "save_every", "eval_prompts"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {getattr(args, name)}, expected from 1")
    for name in ("rows", "steps", "draft_vocab_size", "intermediate_size", "num_key_value_heads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected from 1")
    if args.length > 256 and args.length % 512:
        raise ValueError(f"--length is {args.length}, expected a multiple of 512, or up to 256")
    for name in ("seed", "evaluate_every"):
        if getattr(args, name) < 0:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {getattr(args, name)}, expected 0 or more")
    if not 0 <= args.draft_tokens <= MAX_DRAFT_DEPTH:
        raise ValueError(f"--draft-tokens is {args.draft_tokens}, expected 0 to {MAX_DRAFT_DEPTH}")
    for name in ("learning_rate", "clip_norm", "decay"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected a number over 0")
    if not 0 <= args.warmup_share < 1:
        raise ValueError(f"--warmup-share is {args.warmup_share}, expected 0 up to below 1")
    if not (math.isfinite(args.weight_decay) and args.weight_decay >= 0):
        raise ValueError(f"--weight-decay is {args.weight_decay}, expected 0 or more")
    if args.warm_start is not None:
        given = {
            "--kind": args.kind is not None,
            "--eagle-3.1": args.eagle31,
            "--draft-vocab-size": args.draft_vocab_size is not None,
            "--rope-theta": args.rope_theta is not None,
            "--intermediate-size": args.intermediate_size is not None,
            "--num-key-value-heads": args.num_key_value_heads is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"only without --warm-start: {', '.join(names)}")
        if Path(args.warm_start).expanduser().absolute() == args.out:
            raise ValueError("--out is --warm-start's folder, and would replace what it began from")
    if args.taps is not None:
        parse_taps(args.taps)


def check_out(folder: Path) -> None:
    """Refuses to write a drafter over something else.

    Raises:
        ValueError: the path is a file, or a folder with another model in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file, expected a folder")
    config = folder / "config.json"
    if config.exists() and "Eagle3" not in config.read_text(encoding="utf-8"):
        raise ValueError(f"--out {folder} holds another model, and would lose it")


@dataclasses.dataclass(frozen=True)
class Data:
    """The samples, and the words about those left out."""

    train: list[Sample]
    held_out: list[Sample]
    report: dict[str, Any]


def read_data(args: argparse.Namespace, cfg: ModelConfig, folder: Path) -> Data:
    """Reads and checks the samples files.

    Raises:
        ValueError: nothing to train on, or held-out samples that are trained on.
    """
    ours = Header.of(folder, cfg.vocab_size)
    long = "cut" if args.cut_long else "skip"
    samples, told = read_all(args.data, ours, max_length=args.length, long=long)
    judged: list[Sample] = []
    if args.held_out is not None:
        judged, own = read_all([args.held_out], ours, max_length=args.length, long=long)
        told |= own
    for path, report in told.items():
        _log.info("%s: %s", path, report)
    seen = {key for sample in samples for key in _keys(sample)}
    shared = [sample.id for sample in judged if not seen.isdisjoint(_keys(sample))]
    if shared:
        raise ValueError(f"--held-out: {len(shared)} samples are trained on, {shared[0]!r} is one")
    if idle := [sample.id for sample in samples if not count_targets([sample], [0])]:
        _log.warning("%d samples are too short to draft in, %r is one", len(idle), idle[0])
    if len(idle) == len(samples):
        raise ValueError("no sample has a reply long enough to draft in")
    return Data(samples, judged, {path: report.to_dict() for path, report in told.items()})


def _keys(sample: Sample) -> list[bytes]:
    """The whole sample and, where it is more than a first token, its prompt."""
    prompt = sample.input_ids[: np.argmax(sample.loss_mask)]
    whole = sample.input_ids.tobytes()
    return [whole, prompt.tobytes()] if len(prompt) > 1 else [whole]


def begin(args: argparse.Namespace, cfg: ModelConfig) -> Beginning:
    """What the options say the run begins from; the small files alone are read.

    Raises:
        ValueError: a drafter that does not exist, or sizes that do not fit.
    """
    taps = None if args.taps is None else parse_taps(args.taps)
    if args.warm_start is not None:
        folder = resolve(args.warm_start)
        return Beginning.warm(folder, cfg, taps=taps, num_draft_tokens=args.draft_tokens)
    own = new_config(
        cfg,
        args.kind or "llama",
        draft_vocab_size=args.draft_vocab_size,
        taps=taps,
        rope_theta=args.rope_theta,
        intermediate_size=args.intermediate_size,
        num_key_value_heads=args.num_key_value_heads,
        is_eagle31=args.eagle31,
    )
    return Beginning(cfg=own, num_draft_tokens=args.draft_tokens)


def vocabulary(
    beginning: Beginning, samples: list[Sample], tokenizer: Tokenizer, cfg: ModelConfig
) -> tuple[np.ndarray | None, float]:
    """Target ids of the draft vocabulary, and the share of generated tokens they cover.

    A warm start keeps its own, whatever the samples hold.
    """
    own = beginning.cfg
    if own.draft_vocab_size == own.vocab_size:
        return None, 1.0
    counts = count_tokens(samples, cfg.vocab_size)
    if beginning.files is not None:
        ids = beginning.draft_ids()
        assert ids is not None
        return ids, coverage_of(ids, counts)
    required = required_ids(tokenizer, cfg.eos_token_id)
    chosen = choose_vocabulary(counts, own.draft_vocab_size, required=required)
    return chosen.ids, chosen.coverage


@dataclasses.dataclass(frozen=True)
class Target:
    """The target as far as training needs it; without `llm` its states come from files."""

    ends: Ends
    norm: jax.Array
    source: StatesSource
    llm: LLM | None


def open_target(
    args: argparse.Namespace,
    cfg: ModelConfig,
    beginning: Beginning,
    data: Data,
    stored: StoredStates | None,
    mesh: Mesh,
    dtype: str,
) -> Target:
    """Loads the target, or of it what stored states leave to load."""
    path = model_path(args.model)
    if stored is not None:
        ends, norm = load_ends(path, cfg, mesh, dtype)
        return Target(ends, norm, OfflineStates(stored, len(beginning.cfg.taps)), None)
    longest = max(len(s.input_ids) for s in (data.held_out or data.train))
    llm = LLM(
        path,
        drafter=beginning,
        mesh=mesh,
        max_length=min(cfg.max_position_embeddings, longest + 1),
        dtype=dtype,
        progress=not args.quiet,
    )
    ends, norm = ends_of(llm)
    source = OnlineStates(llm, target_taps(beginning.cfg, cfg))
    return Target(ends, norm, source, llm)


@dataclasses.dataclass(frozen=True)
class Judge:
    """Measures the drafter on the held-out samples."""

    args: argparse.Namespace
    trainer: Trainer
    target: Target
    samples: list[Sample]

    def __call__(self, state: TrainState) -> dict[str, Any]:
        """Loss and accuracy on all of them, and cycles of the first few's replies."""
        args, K = self.args, self.args.draft_tokens
        lengths = [len(sample.input_ids) for sample in self.samples]
        rows = pack_order(lengths, range(len(lengths)), args.length)

        def examples():
            for at in range(0, len(rows), args.rows):
                yield make_example(
                    self.trainer,
                    self.target.source,
                    self.samples,
                    rows[at : at + args.rows],
                    num_rows=args.rows,
                    length=args.length,
                )

        held = held_out(self.trainer, state, self.samples, examples(), num_draft_tokens=K)
        out: dict[str, Any] = {"draft_tokens": K, **summary(held, args.eval_prompts)}
        llm = self.target.llm
        if llm is None or not K:
            return out
        serve(llm, self.trainer.weights(state))
        chosen = self.samples[: args.eval_prompts]
        prompts = [sample.input_ids[: np.argmax(sample.loss_mask)].tolist() for sample in chosen]
        limits = [int(np.count_nonzero(sample.loss_mask)) for sample in chosen]
        told = decode_held_out(llm, prompts, limits)
        return out | {
            "tokens_per_cycle": round(told.tokens_per_cycle, 4),
            "accepted_by_depth": shares(told),
        }


def run(args: argparse.Namespace, *, stop_after: int | None = None) -> dict[str, Any]:
    """The whole job; what the JSON line says.

    Args:
        args: checked options.
        stop_after: ends after so many steps, before anything is exported.
    """
    sizes = None if args.mesh is None else parse_mesh(args.mesh)
    simulate_mesh(sizes)
    path = model_path(args.model)
    small = resolve(path, patterns=SMALL_FILES)
    cfg = ModelConfig.from_folder(small)
    tokenizer = Tokenizer.from_folder(small)
    beginning = begin(args, cfg)
    mesh = make_mesh(sizes)
    args.rows = args.rows or max(4, mesh.size)
    args.placement = args.placement or ("sharded" if mesh.size > 1 else "replicated")
    if args.rows % mesh.size:
        raise ValueError(f"--rows is {args.rows}, expected a multiple of the {mesh.size} devices")
    stored = None
    if args.states is not None:
        stored = StoredStates.open(
            args.states,
            hidden_size=cfg.hidden_size,
            taps=beginning.cfg.taps,
            vocab_size=cfg.vocab_size,
            fingerprint=checkpoint_fingerprint(resolve(path)),
        )
        if long := [s.id for s in stored.samples if len(s.input_ids) > args.length]:
            raise ValueError(
                f"{args.states}: {len(long)} samples are longer than --length {args.length}, "
                f"{long[0]!r} is one"
            )
        data = Data(stored.samples, [], {})
    else:
        data = read_data(args, cfg, small)
    dtype = args.dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
    draft_ids, coverage = vocabulary(beginning, data.train, tokenizer, cfg)
    _log.info("the draft vocabulary covers %.2f %% of the tokens trained on", 100 * coverage)
    schedule = Schedule(
        data.train,
        num_rows=args.rows,
        length=args.length,
        seed=args.seed,
        accumulate=args.accumulate,
    )
    num_steps = args.steps or schedule.steps_in(0)
    optimisation = Optimisation(
        num_steps=num_steps,
        learning_rate=args.learning_rate,
        warmup_share=args.warmup_share,
        clip_norm=args.clip_norm,
        weight_decay=args.weight_decay,
        placement=args.placement,
    )
    unrolling = Unrolling(
        draft_steps=args.draft_steps, decay=args.decay, loss=args.loss, remat=not args.no_remat
    )
    work = args.work or args.out.with_name(f"{args.out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    fingerprint = {
        "drafter": beginning.cfg.to_dict(),
        "draft_vocabulary": None if draft_ids is None else _digest(draft_ids),
        "target": checkpoint_fingerprint(resolve(path)),
        "dtype": dtype,
        "states": "online" if stored is None else "stored",
        "data": digest_samples(data.train),
        "warm_start": args.warm_start and checkpoint_fingerprint(resolve(args.warm_start)),
        "rows": args.rows,
        "length": args.length,
        "accumulate": args.accumulate,
        "seed": args.seed,
        "unrolling": dataclasses.asdict(unrolling) | {"remat": None},
        "optimisation": dataclasses.asdict(optimisation) | {"placement": None},
    }
    with Checkpoints(work / "steps", fingerprint=fingerprint, every=args.save_every) as kept:
        if args.export_only:
            if kept.latest is None:
                raise ValueError(f"{work} holds no checkpoint to export")
            stop_after = 0
        target = open_target(args, cfg, beginning, data, stored, mesh, dtype)
        model = beginning.model(draft_ids, target.ends, target.norm, mesh, args.seed)
        trainer = Trainer(
            beginning.cfg,
            model,
            target.ends,
            unrolling=unrolling,
            optimisation=optimisation,
            mesh=mesh,
        )
        del model
        judge = Judge(args, trainer, target, data.held_out) if data.held_out else None
        log = work / "log.jsonl"
        state, told = train(
            trainer,
            schedule,
            data.train,
            target.source,
            checkpoints=kept,
            log=log,
            num_steps=num_steps,
            evaluate=judge,
            evaluate_every=args.evaluate_every,
            stop_after=stop_after,
            progress=not args.quiet,
        )
    if stop_after is None or args.export_only:
        export_drafter(
            args.out,
            beginning.cfg,
            trainer.weights(state),
            dtype=args.export_dtype,
            layer_prefix=args.layer_prefix,
            embedding=target.ends.embed_tokens if args.export_embedding else None,
        )
        plot(log, work / "log.png")
    last = read_log(log)
    return {
        "out": str(args.out),
        "steps": int(state.step),
        "samples": len(data.train),
        "coverage": coverage,
        "loss": next((row["loss"] for row in reversed(last) if "loss" in row), None),
        "evaluation": next((row for row in reversed(last) if "held_out_loss" in row), None),
        "tokens_per_second": told.tokens_per_second,
        "target_seconds": told.target_seconds,
        "drafter_seconds": told.drafter_seconds,
        "drafter_share": told.drafter_share,
        "read": data.report,
        "conditions": conditions(
            options=json.loads(json.dumps(vars(args), default=str)),
            mesh=dict(mesh.shape),
            seed=args.seed,
            drafter_config=beginning.cfg.to_dict(),
        ),
    }


def smoke() -> dict[str, Any]:
    """Data, training, a stop, resuming, export and use, all in a temporary folder.

    Raises:
        TrainingError: the drafted text is not the plain one.
    """
    parser = make_parser()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, text in (
            ("train", inspect.getsource(argparse)),
            ("held", inspect.getsource(json)),
        ):
            (folder / f"{part}.txt").write_text(text)
            options = "--limit 6 --length 64 --prompt-tokens 16 --temperature 0 --quiet".split()
            out = ["--out", str(folder / f"{part}.jsonl")]
            with contextlib.redirect_stdout(io.StringIO()):
                make_training_data.main([str(folder / f"{part}.txt"), *out, *options])
        files = ["--data", str(folder / "train.jsonl"), "--held-out", str(folder / "held.jsonl")]
        command = [*files, "--out", str(folder / "drafter"), *SMOKE]
        args = parser.parse_args(command)
        check(args)
        run(args, stop_after=3)
        told = run(args)
        prompt, params = "def read(self, size):", SamplingParams(max_new_tokens=12)
        drafted = LLM(DEMO, drafter=load_drafter(folder / "drafter"), max_length=128, max_batch=1)
        plain = LLM(DEMO, max_length=128, max_batch=1)
        (with_drafts,), (expected,) = (llm.generate(prompt, params) for llm in (drafted, plain))
        if with_drafts.token_ids != expected.token_ids:
            raise TrainingError(f"drafted {with_drafts.text!r}, plain {expected.text!r}")
        return told | {"text": with_drafts.text, "speculation": str(with_drafts.speculation)}


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("kimi_jax", "spec", "train_drafter"):
        logging.getLogger(name).setLevel(logging.WARNING if args.quiet else logging.INFO)
    try:
        if args.smoke:
            given = vars(args) | {"smoke": False, "quiet": False}
            if given != vars(parser.parse_args([])):
                raise ValueError("--smoke has its own options; give it alone, or with --quiet")
            out = smoke()
        else:
            check(args)
            out = run(args)
    except (ValueError, OSError, TrainingError, jax.errors.JaxRuntimeError) as error:
        print(f"train_drafter.py: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(out), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
