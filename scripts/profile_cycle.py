"""Where the time of a speculative cycle goes, stage by stage, and what to attack.

    python scripts/profile_cycle.py                                      about a minute on two cores
    python scripts/profile_cycle.py --context 64,512 --draft-tokens 3 --trace traces
    python scripts/profile_cycle.py --model FOLDER --drafter FOLDER --mesh tensor=8 \\
        --cache sequence --context 512,8192,65536 --prompts LONG.txt

For every context length, blocks of plain steps and of cycles take turns, without the JAX profiler
and while it records. Wall time of the recorded blocks is shared out among the stages
(`spec/stages.py` says what each is): every instant belongs to the innermost operation that runs
then, in equal parts if several do, and of several devices the mean is taken. So the stages add up
to the recorded cycle, and what no stage explains stands in the table:

    between         no operation runs between two
    outside         the host starts a block and reads it back
    unattributed    operations without a scope
    tracing         the profiler records (`recording_seconds`); not there without it

`stages_over_measured` compares their sum, `tracing` left out, with the cycle measured without the
profiler: it should be near 1. A fusion is one operation, in the scope of its root. The last line
under each table is a verdict: the largest term, and what would shrink it.

--trace keeps the recordings, for https://ui.perfetto.dev. On a GPU, XLA leaves its CUDA graphs
while the profiler records, unless told --xla_enable_command_buffers_during_profiling in XLA_FLAGS:
then kernels are told apart by their names and order. Not tried on a GPU.

The text is --prompts (a text file, or .jsonl with "prompt" or "text" in every row), or Python's own
functools.py; it must be as long as the longest context and a block. Prints a table for each
context, then one JSON line: a row for each context and stage.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_decode import Place, read_prompts
from jax.profiler import TraceAnnotation
from tqdm import tqdm

from kimi_jax import DEMO, LLM
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.decode import MAX_BLOCK_TOKENS, MAX_DRAFT_DEPTH
from kimi_jax.runtime.flags import set_gpu_environment, set_gpu_flags, simulate_mesh
from kimi_jax.runtime.llm import SMALL_FILES
from kimi_jax.runtime.mesh import CACHES, parse_mesh
from kimi_jax.runtime.program import Program
from kimi_jax.runtime.trace import (
    TRACING,
    WINDOW,
    Attribution,
    attribute_windows,
    newest,
    read_recording,
    recorded,
    recording_seconds,
)
from kimi_jax.text.tokenizer import Tokenizer
from spec import DEMO_DRAFTER, load_drafter
from spec.eagle3.config import DrafterConfig
from spec.economics import break_even, distinct_experts, speedup
from spec.stages import STAGES, Facts, Timed, stage_of, verdict
from spec.tree import Chain

CONTEXTS = (64, 512, 2048)
STEP, CYCLE = "step", "cycle"
WARM_UP = 3
"""Blocks before anything counts: the first compiles, in the second a GPU captures its graphs."""


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="a checkpoint folder, a hub id, or demo (default)")
    add("--drafter", help="an EAGLE-3 drafter's folder or hub id, or demo, the demo's own")
    add(
        "--draft-tokens", type=int, default=3, metavar="K", help="0: plain steps alone (default: 3)"
    )
    add("--context", help=f"comma-separated (default: {','.join(map(str, CONTEXTS))}, as fits)")
    add("--prompts", type=Path, metavar="FILE", help="the text (default: functools.py)")
    add("--cycles", type=int, default=12, help="most cycles a block (default: %(default)s)")
    add("--repeats", type=int, default=6, help="blocks recorded of each (default: %(default)s)")
    add("--trace", type=Path, metavar="DIR", help="keep the recordings here")
    add("--mesh", help="devices to cut the model over: tensor=8 or expert=4,tensor=2")
    add("--cache", choices=CACHES, default="replicated", help="where the latent cache lies")
    add("--dtype", choices=("float32", "bfloat16"))
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, checked as far as they can be without the model."""
    args = parser.parse_args()
    K = args.draft_tokens
    if not 0 <= K <= MAX_DRAFT_DEPTH:
        parser.error(f"--draft-tokens is {K}, expected 0 to {MAX_DRAFT_DEPTH}")
    if not K and args.drafter is not None:
        parser.error("--drafter with --draft-tokens 0: nothing is drafted")
    if K and args.drafter is None and args.model != "demo":
        parser.error(f"--draft-tokens {K} needs a --drafter; --draft-tokens 0 profiles plain steps")
    if K and args.drafter in (None, "demo"):
        args.drafter = str(DEMO_DRAFTER)
    if args.context is not None:
        words = [word.strip() for word in args.context.split(",")]
        if not all(word.isdecimal() and int(word) >= 2 for word in words):
            parser.error(f"--context is {args.context!r}, expected numbers from 2")
        args.context = sorted({int(word) for word in words})
    if min(args.cycles, args.repeats) < 1:
        parser.error("--cycles and --repeats must be at least 1")
    if args.trace is not None:
        try:
            args.trace.mkdir(exist_ok=True)
        except OSError as error:
            parser.error(f"--trace {args.trace}: {error.strerror}")
        if not os.access(args.trace, os.W_OK | os.X_OK):
            parser.error(f"--trace {args.trace}: cannot be written to")
    try:
        args.mesh = None if args.mesh is None else parse_mesh(args.mesh)
        args.text = read_prompts(args.prompts)
    except ValueError as error:
        parser.error(str(error))
    return args


def contexts_within(wanted: Sequence[int] | None, limits: Mapping[str, int]) -> list[int]:
    """The contexts as asked for; if none are, the usual ones, the last as long as may be.

    Args:
        limits: tokens that a context and the block after it may have, by what limits them.

    Raises:
        ValueError: one is too long.
    """
    what = min(limits, key=lambda name: limits[name])
    most = limits[what] - MAX_BLOCK_TOKENS
    if wanted is None and most >= CONTEXTS[0]:
        return sorted({min(context, most) for context in CONTEXTS})
    longest = CONTEXTS[0] if wanted is None else wanted[-1]
    if longest > most:
        raise ValueError(
            f"--context {longest}: with a block of {MAX_BLOCK_TOKENS} tokens it is "
            f"{longest + MAX_BLOCK_TOKENS}, and {what} has {limits[what]}: at most {most}"
        )
    return list(wanted or [])


class Turn(NamedTuple):
    """A block of one form: seconds of a cycle without the profiler, and what recorded ones took."""

    bare_seconds: float
    recorded: Attribution

    @property
    def size(self) -> float:
        """Both together, to tell usual turns from odd ones."""
        return self.bare_seconds + 1e-9 * sum(self.recorded.nanoseconds.values())


def profile(
    llm: LLM,
    text: list[int],
    context: int,
    args: argparse.Namespace,
    folder: Path,
    recording: float,
) -> tuple[dict[str, Timed], float]:
    """A plain step and a cycle after this context, and the tokens a cycle gives.

    Args:
        folder: for the recordings.
        recording: see `recording_seconds`.
    """
    place = Place(llm, text, context, batch=1)
    forms: dict[str, Any] = {STEP: None}
    if args.draft_tokens:
        forms[CYCLE] = Chain(args.draft_tokens)
    cycles = min(args.cycles, MAX_BLOCK_TOKENS // (args.draft_tokens + 1))
    bare: dict[str, list[float]] = {name: [] for name in forms}
    traces = []
    with tqdm(
        total=WARM_UP + args.repeats, desc=f"context {context}", disable=None, leave=False
    ) as bar:
        for _ in range(WARM_UP):
            for form in forms.values():
                place.seconds(form, cycles)
            bar.update()
        programs = {}
        for name, form in forms.items():
            compiled = llm.engine.lower_decode(1, place.capacity, form).compile()
            programs[name] = Program(compiled.as_text())
        for turn in range(args.repeats):
            for name, form in forms.items():
                bare[name].append(place.seconds(form, cycles))
            own, is_last = folder / f"turn-{turn}", turn == args.repeats - 1
            with recorded(own, for_perfetto=is_last and args.trace is not None):
                for name, form in forms.items():
                    place.seconds(form, cycles)  # the profiler's buffers are made
                    place.seconds(form, cycles, during=TraceAnnotation(WINDOW + name))
            traces.append(read_recording(own))
            bar.update()
        gives = place.tokens_per_cycle(forms[CYCLE]) if CYCLE in forms else 1.0
    windows = attribute_windows(traces, programs, stage_of, recording=1e9 * recording)
    timed = {}
    for name, seconds in bare.items():
        own = [attributed for window, attributed in windows if window.name == name]
        timed[name] = usual(list(map(Turn, seconds, own)), cycles)
    return timed, gives


def usual(turns: Sequence[Turn], cycles: int) -> Timed:
    """A cycle in the mean over the turns in the middle: the longest and shortest are left out.

    Args:
        cycles: of a block.
    """
    outside = len(turns) // 4
    kept = sorted(turns, key=lambda turn: turn.size)[outside : len(turns) - outside]
    every = [turn.recorded for turn in kept]
    stages = [stage for stage in STAGES if any(stage in a.nanoseconds for a in every)]
    total = len(kept) * cycles
    return Timed(
        seconds={
            stage: 1e-9 * sum(a.nanoseconds.get(stage, 0.0) for a in every) / total
            for stage in stages
        },
        cycle_seconds=statistics.fmean(turn.bare_seconds for turn in kept),
        events=sum(a.num_events for a in every) / total,
    )


def stage_rows(context: int, timed: dict[str, Timed]) -> list[dict[str, Any]]:
    """Milliseconds of each stage, of a plain step and of a cycle."""
    step, cycle = timed[STEP], timed.get(CYCLE)
    rows = []
    for stage in STAGES:
        if not any(stage in each.seconds for each in timed.values()):
            continue
        own = step.seconds.get(stage, 0.0)
        row: dict[str, Any] = {"context": context, "name": stage, "ms_step": round(1e3 * own, 4)}
        if cycle is not None:
            its = cycle.seconds.get(stage, 0.0)
            row["ms_cycle"] = round(1e3 * its, 4)
            row["over_step"] = round(its / own, 2) if own else None
        slow = step if cycle is None else cycle
        row["fraction"] = None if stage == TRACING else round(slow.fraction(stage), 4)
        rows.append(row)
    return rows


def summary(
    llm: LLM, context: int, K: int, cache: str, timed: dict[str, Timed], gives: float
) -> dict[str, Any]:
    """What a cycle costs and gives at this context, and the verdict."""
    cfg, step, cycle = llm.cfg, timed[STEP], timed.get(CYCLE)
    E, A = cfg.n_routed_experts, cfg.num_experts_per_tok
    facts = Facts(
        context=context,
        num_draft_tokens=K,
        tokens_per_cycle=gives,
        distinct_step=A,
        distinct_verify=distinct_experts(K + 1, E, A),
        num_experts=E,
        devices=llm.mesh.size,
        cache=cache,
    )
    out: dict[str, Any] = {"context": context, "draft_tokens": K}
    for name, each in timed.items():
        out |= {
            f"ms_{name}": round(1e3 * each.cycle_seconds, 4),
            f"ms_{name}_recorded": round(1e3 * each.traced_seconds, 4),
            f"operations_{name}": round(each.events, 1),
            f"stages_over_measured_{name}": round(each.stages_seconds / each.cycle_seconds, 3),
        }
    if cycle is not None:
        measured = cycle.cycle_seconds, step.cycle_seconds
        out |= {
            "ms_verify": round(1e3 * cycle.verify_seconds, 4),
            "tokens_per_cycle": round(gives, 3),
            "break_even": round(break_even(*measured), 3),
            "speedup": round(speedup(gives, *measured), 3),
        }
    return out | {"verdict": verdict(step, cycle, facts)}


def show(rows: list[dict[str, Any]], told: dict[str, Any]) -> None:
    """The table of one context."""
    has_cycle = "ms_cycle" in told
    print(f"\ncontext {told['context']}, {told['draft_tokens']} draft tokens")
    head = f"{'stage':14}{'ms step':>10}"
    print(head + (f"{'ms cycle':>10}{'over step':>11}" if has_cycle else "") + f"{'fraction':>10}")

    def line(name: str, step: float, cycle: float | None, fraction: float | None) -> None:
        text = f"{name:14}{step:10.3f}"
        if cycle is not None:
            text += f"{cycle:10.3f}" + (f"{cycle / step:11.2f}" if step else f"{'':11}")
        print(text + ("" if fraction is None else f"{100 * fraction:8.1f} %"))

    for row in rows:
        line(row["name"], row["ms_step"], row.get("ms_cycle"), row["fraction"])
    line("recorded", told["ms_step_recorded"], told.get("ms_cycle_recorded"), None)
    line("not recorded", told["ms_step"], told.get("ms_cycle"), None)
    ratios = [
        f"{name} {told[f'stages_over_measured_{name}']:.2f}"
        for name in (STEP, CYCLE)
        if f"stages_over_measured_{name}" in told
    ]
    print(f"stages without tracing, over what was not recorded: {', '.join(ratios)}")
    if has_cycle:
        print(
            f"verification {told['ms_verify']:.3f} ms of a cycle; {told['tokens_per_cycle']:.2f} "
            f"tokens a cycle, break-even {told['break_even']:.2f}, {told['speedup']:.2f} of plain"
        )
    print(told["verdict"])


def main() -> None:
    """The command line."""
    parser = make_parser()
    args = read_options(parser)
    simulate_mesh(args.mesh)
    set_gpu_flags()
    set_gpu_environment()
    model = DEMO if args.model == "demo" else args.model
    K = args.draft_tokens
    rows, summaries = [], []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            # Everything the small files can tell comes first: loading takes long.
            files = resolve(model, patterns=SMALL_FILES)
            cfg = ModelConfig.from_folder(files)
            text = Tokenizer.from_folder(files).encode(args.text)
            limits = {
                "the model": cfg.max_position_embeddings,
                "the text (--prompts takes a longer one)": len(text),
            }
            if K:
                # Past its own positions, decoding goes on without the drafter.
                limits["the drafter"] = _drafter_positions(args.drafter, cfg)
            contexts = contexts_within(args.context, limits)
            llm = LLM(
                model,
                drafter=load_drafter(args.drafter, num_draft_tokens=K) if K else None,
                mesh=args.mesh,
                cache=args.cache,
                dtype=args.dtype,
                max_length=contexts[-1] + MAX_BLOCK_TOKENS,
                max_batch=1,
                progress=sys.stderr.isatty(),
            )
            recording = recording_seconds(Path(scratch))
            for context in contexts:
                folder = Path(args.trace or scratch) / f"context-{context}"
                timed, gives = profile(llm, text, context, args, folder, recording)
                own = stage_rows(context, timed)
                told = summary(llm, context, K, args.cache, timed, gives)
                show(own, told)
                if args.trace is not None:
                    last = newest(folder / f"turn-{args.repeats - 1}", "perfetto_*.json.gz")
                    print(f"https://ui.perfetto.dev opens {last}")
                rows += own
                summaries.append(told)
        except (ValueError, OSError) as error:
            parser.exit(1, f"profile_cycle.py: error: {error}\n")
    facts = conditions(
        model=str(args.model),
        drafter=args.drafter,
        draft_tokens=K,
        cycles=args.cycles,
        repeats=args.repeats,
        dtype=llm.dtype,
        mesh=dict(llm.mesh.shape),
        cache=args.cache,
        config=llm.cfg.to_dict(),
        recording_us=round(1e6 * recording, 3),
        text=str(args.prompts or "functools.py of this interpreter"),
        text_sha256=hashlib.sha256(args.text.encode()).hexdigest()[:16],
    )
    print(json.dumps({"rows": rows, "contexts": summaries, "conditions": facts}))


def _drafter_positions(drafter: str, target: ModelConfig) -> int:
    folder = resolve(drafter, patterns=("config.json",))
    cfg = DrafterConfig.from_folder(folder, num_target_layers=target.num_hidden_layers)
    return cfg.max_position_embeddings


if __name__ == "__main__":
    main()
