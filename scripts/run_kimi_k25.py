"""Runs Kimi-K2.5 on the GPUs of one machine: a chat in the terminal, or a file of prompts.

    python scripts/run_kimi_k25.py --model PATH --drafter PATH --chat
    python scripts/run_kimi_k25.py --model PATH --drafter PATH --prompts in.jsonl --out out.jsonl
    python scripts/run_kimi_k25.py --mesh tensor=8 --drafter none --platform cpu --chat   # the demo

What it does, in order, and each step says what it found on stderr: sets XLA, NCCL and the cache of
compiled programs up; reads the checkpoint's small files and every prompt; looks at the devices
(enough of them, alike, none missed for want of a driver); compares what the run needs with the
memory they have, and says what would fit; with a hub id, downloads; looks at what an earlier run
has answered; with --probe measures the collectives (`scripts/probe_collectives.py`) into
--probe-out; loads; compiles every program, with the time of each; runs.

--chat keeps the conversation: /reset begins a new one, /help lists the commands, Ctrl-C ends a
reply, Ctrl-D or /quit the program. --prompts takes rows `{"id", "prompt"}` or `{"id", "messages",
"tools", "thinking"}` with sampling options of their own where wanted (`max_new_tokens`,
`temperature`, `seed`, ...); a row of the batch that has ended takes the next prompt. --out gets a
row as each reply ends, in that order. Resumable: a run that was killed goes on where it was; one
over other prompts, another model or other options is refused. A row's seed follows from --seed and
its id alone.

Stdout ends with one JSON line: tokens, seconds, memory, conditions. Exit status: 0; 1 when the
checkpoint, the machine or the prompts cannot be used; 2 when an option is wrong; 130 after Ctrl-C.
The demo over 8 simulated devices on two cores takes minutes, nearly all of it compiling. On GPUs:
not measured.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import probe_collectives
from generate import (
    add_drafter_options,
    add_machine_options,
    add_sampling_options,
    check_drafts_matter,
    check_machine_options,
    given_sampling,
    model_path,
    read_drafter,
    sampling_params,
    spell_option,
)
from jax.sharding import AbstractMesh, Mesh
from tqdm import tqdm

from kimi_jax import LLM, SamplingParams
from kimi_jax.checkpoint.fingerprint import checkpoint_fingerprint
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime import flags, machine
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.engine import cycle_slack
from kimi_jax.runtime.llm import DTYPES, SMALL_FILES
from kimi_jax.runtime.mesh import (
    MESH_AXES,
    MeshError,
    check_cache,
    check_sizes,
    make_mesh,
    parse_mesh,
)
from kimi_jax.runtime.placement import abstract_model, bytes_per_device
from kimi_jax.runtime.prompts import PromptRow, ReplyFile, merge_sampling, read_prompts
from kimi_jax.runtime.replies import Collector, Result, Speculation
from kimi_jax.runtime.requests import RequestMaker
from kimi_jax.runtime.sampling import MIN_TEMPERATURE
from spec.drafter import Eagle3Drafter, check_mesh
from spec.memory import Sizes, check_memory, describe
from spec.traffic import drafter_bytes, target_bytes

DEFAULT_BATCH = 8
"""Rows of a prompts file that run together."""
HELP = "/reset begins a new conversation, /quit ends (so does Ctrl-D), Ctrl-C ends a reply"


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        default="demo",
        help="a checkpoint folder, a hub id owner/name, or demo (default), the bundled one",
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--chat", action="store_true", help="a conversation in the terminal")
    mode.add_argument("--prompts", type=Path, metavar="IN.jsonl", help="a file of prompts")
    add("--out", type=Path, metavar="OUT.jsonl", help="the replies to --prompts, new or to go on")
    add("--no-thinking", action="store_true", help="reply to messages without reasoning first")
    add("--system", help="a system message for --chat")
    add_drafter_options(parser)
    add_sampling_options(parser)
    add_machine_options(parser)
    add(
        "--max-batch",
        type=int,
        help=f"most rows of --prompts that run together; default: {DEFAULT_BATCH}",
    )
    add(
        "--compile-cache",
        metavar="FOLDER",
        help="keeps compiled programs for the next start; none keeps none; default: "
        "JAX_COMPILATION_CACHE_DIR, else a folder of the user's cache",
    )
    add(
        "--nccl",
        metavar="NAME=VALUE,...",
        help="NCCL's settings, such as NCCL_PROTO=LL; default: the environment's, and "
        f"NCCL_P2P_LEVEL={flags.GPU_ENVIRONMENT['NCCL_P2P_LEVEL']}",
    )
    add("--probe", action="store_true", help="measure the collectives first")
    add(
        "--probe-out",
        type=Path,
        metavar="JSON",
        help="where --probe writes, for scripts/plan.py; default: measured.json",
    )
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options, checked as far as they can be without the checkpoint and the machine."""

    model: str | Path
    drafter: Eagle3Drafter | None
    mesh: dict[str, int] | None
    sampling: dict[str, Any]
    """Options that were given, by field."""
    max_batch: int
    nccl: dict[str, str]
    compile_cache: Path | None
    probe_out: Path | None


def check(args: argparse.Namespace) -> Job:
    """The job the options describe.

    Raises:
        ValueError: options that are wrong or contradict each other.
    """
    names = {"--out": args.out is not None, "--max-batch": args.max_batch is not None}
    if args.chat and (given := [name for name, is_given in names.items() if is_given]):
        raise ValueError(f"only with --prompts: {', '.join(given)}")
    if args.prompts is not None:
        if args.system is not None:
            raise ValueError("only with --chat: --system")
        if args.out is None:
            raise ValueError("--prompts needs --out, the file replies go to")
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise ValueError(f"--out {args.out}: expected a file in a folder that is there")
        if args.out.exists() and args.out.samefile(args.prompts):
            raise ValueError("--out is the file of --prompts")
    if args.probe_out is not None and not args.probe:
        raise ValueError("only with --probe: --probe-out")
    if args.max_batch is not None and args.max_batch < 1:
        raise ValueError(f"--max-batch is {args.max_batch}, expected at least 1")
    check_machine_options(args)
    sampling = given_sampling(args)
    # What rows have of their own is not known yet: `prepare` looks again.
    may_sample = True
    if args.chat:
        may_sample = sampling_params(args).temperature >= MIN_TEMPERATURE
    else:
        merge_sampling(SamplingParams(temperature=1.0), sampling, spell_option)
    cache = args.compile_cache
    return Job(
        model=model_path(args.model),
        drafter=read_drafter(args, may_sample=may_sample),
        mesh=None if args.mesh is None else parse_mesh(args.mesh),
        sampling=sampling,
        max_batch=1 if args.chat else args.max_batch or DEFAULT_BATCH,
        nccl={} if args.nccl is None else flags.parse_nccl(args.nccl),
        compile_cache=None
        if cache == "none"
        else flags.default_compile_cache()
        if cache is None
        else Path(cache),
        probe_out=(args.probe_out or Path("measured.json")) if args.probe else None,
    )


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


# Before the weights.


@dataclasses.dataclass(kw_only=True)
class Prepared:
    """What the checkpoint's small files and the prompts say."""

    requests: RequestMaker
    rows: list[PromptRow]
    """Empty in a chat."""


def prepare(args: argparse.Namespace, job: Job) -> Prepared:
    """Reads the checkpoint's small files and every prompt.

    Raises:
        ValueError, OSError: what is wrong with them.
    """
    folder = resolve(job.model, patterns=SMALL_FILES)
    cfg = _config(args, folder)
    requests = RequestMaker.from_folder(folder, cfg, args.max_length)
    if args.prompts is None:
        return Prepared(requests=requests, rows=[])
    thinking = not args.no_thinking
    rows = read_prompts(args.prompts, requests, job.sampling, seed=args.seed, thinking=thinking)
    if not thinking and all(row.messages is None or row.thinking for row in rows):
        raise ValueError(
            f"{args.prompts}: --no-thinking is for rows with messages that do not say "
            "themselves whether to think; there is none"
        )
    may_sample = any(row.params.temperature >= MIN_TEMPERATURE for row in rows)
    check_drafts_matter(args, may_sample=may_sample)
    return Prepared(requests=requests, rows=rows)


def _config(args: argparse.Namespace, folder: Path) -> ModelConfig:
    cfg = ModelConfig.from_folder(folder)
    eps = args.latent_norm_eps
    return cfg if eps is None else dataclasses.replace(cfg, latent_norm_eps=eps)


def open_replies(
    args: argparse.Namespace, job: Job, prepared: Prepared, folder: Path, dtype: str
) -> ReplyFile:
    """The file of replies, and what an earlier run has answered in it.

    Args:
        folder: the whole checkpoint.
        dtype: the run's, chosen or by default.

    Raises:
        ValueError, OSError: it belongs to something else, or cannot be written.
    """
    made_with = {
        "model": checkpoint_fingerprint(folder),
        "stop_ids": prepared.requests.stop_ids,
        "max_length": prepared.requests.max_length,
        "dtype": dtype,
        "latent_norm_eps": args.latent_norm_eps,
        "drafting": _what_changes_replies(job.drafter),
    }
    replies = ReplyFile(args.out, prepared.rows, made_with)
    say(
        f"{args.prompts}: {len(prepared.rows)} prompts, {replies.num_resumed} of them answered in "
        f"{args.out}"
    )
    return replies


def _what_changes_replies(drafter: Eagle3Drafter | None) -> Any:
    """Drafting leaves replies as they are, but for the two ways that do not."""
    if drafter is None or not (drafter.sample_drafts or drafter.lossy_threshold is not None):
        return None
    return [
        checkpoint_fingerprint(resolve(drafter.path_or_id)),
        repr(drafter.shapes),
        drafter.taps,
        drafter.sample_drafts,
        drafter.lossy_threshold,
    ]


def set_up(args: argparse.Namespace, job: Job) -> None:
    """Settings that XLA, NCCL and JAX read once, before the backend starts.

    Raises:
        RuntimeError: it has started.
        OSError: the cache's folder cannot be made.
    """
    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if args.platform != "gpu":
        flags.simulate_mesh(job.mesh)
    flags.set_gpu_flags()
    flags.set_gpu_environment(job.nccl)
    flags.set_compile_cache(job.compile_cache)
    for name, value in flags.settings().items():
        say(f"{name}={value}")
    say(f"compiled programs: {job.compile_cache or 'not kept'}")


def make_machine(args: argparse.Namespace, job: Job, cfg: ModelConfig) -> Mesh:
    """The mesh, on devices that can serve together.

    Raises:
        ValueError: too few devices, several kinds, GPUs that JAX does not see, or a mesh that does
            not divide the model or the drafter.
    """
    try:
        # The first question starts JAX's backend.
        backend, given = jax.default_backend(), jax.devices(args.platform)
    except RuntimeError as error:
        machine.check_gpus_are_used(machine.find_gpus(), "nothing")
        raise MeshError(f"no {args.platform or 'usable'} device: {error}") from None
    if not machine.wants_cpu(args.platform):
        machine.check_gpus_are_used(machine.find_gpus(), backend)
    found = machine.devices_of(given)
    sizes = job.mesh or {"tensor": len(found) if backend == "gpu" else 1}
    count = 1
    for size in sizes.values():
        count *= size
    machine.check_count(found, count)
    mesh = make_mesh(sizes, args.platform)
    machine.check_alike(machine.devices_of(list(mesh.devices.flat)))
    check_sizes(cfg, mesh)
    check_cache(args.cache, mesh)
    if job.drafter is not None:
        job.drafter.check(cfg, mesh)
    say(f"{mesh.size} x {found[0].kind}, mesh {dict(mesh.shape)}")
    return mesh


def probe(mesh: Mesh, out: Path) -> None:
    """Measures the collectives of the mesh into a file for `scripts/plan.py`.

    Raises:
        ValueError: one device has none.
        RuntimeError: the compiler has folded collectives together.
    """
    if mesh.size == 1:
        raise ValueError("--probe: one device has no collectives")
    sizes = probe_collectives.sizes_between(
        probe_collectives.LEAST_BYTES, probe_collectives.MOST_BYTES
    )
    options = probe_collectives.make_parser()
    found = probe_collectives.probe(
        mesh, sizes, options.get_default("repeats"), options.get_default("turns"), progress=True
    )
    with contextlib.redirect_stdout(sys.stderr):
        probe_collectives.show(found)
    out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    say(f"collectives: {out}")


def check_fit(
    args: argparse.Namespace, job: Job, requests: RequestMaker, mesh: Mesh, dtype: jnp.dtype
) -> dict[str, Any]:
    """What the run needs of each device's memory, by part.

    Raises:
        MemoryShortage: more than there is; says what would fit.
    """
    available = machine.devices_of(list(mesh.devices.flat))
    known = [device.memory_bytes for device in available if device.memory_bytes is not None]
    cfg, files = requests.cfg, None
    if job.drafter is not None:
        files = job.drafter.open(cfg, mesh)
    shapes = () if job.drafter is None else job.drafter.shapes

    def sizes(on: Mesh | AbstractMesh, cache: str = args.cache) -> Sizes:
        drafts = None
        if files is not None:
            own = {
                "has_own_embedding": files.has_own_embedding,
                "has_own_head": files.has_own_head,
            }
            drafts = drafter_bytes(files.cfg, on.size, dtype, cache=cache, **own)
        weights = bytes_per_device(abstract_model(cfg, on, dtype).wanted)
        target = target_bytes(cfg, on.size, dtype, cache)
        slack = cycle_slack((None, *shapes), on.size if cache == "sequence" else 1)
        return Sizes.of(cfg, weights, target, drafts, slack=slack)

    def larger() -> Iterator[tuple[int, Any]]:
        for count in range(mesh.size + 1, 8 * mesh.size + 1):
            other = AbstractMesh((1, count), MESH_AXES)
            with contextlib.suppress(MeshError):
                check_sizes(cfg, other)
                if files is not None:
                    check_mesh(files.cfg, other)
                yield count, lambda other=other: sizes(other)

    own = sizes(mesh)
    changes = {} if files is None else {"--drafter none": own.without_drafter()}
    if args.cache == "replicated" and mesh.size > 1:
        changes["--cache sequence"] = sizes(mesh, "sequence")
    parts = check_memory(
        own,
        min(known) if known else sys.maxsize,
        max_length=requests.max_length,
        max_batch=job.max_batch,
        changes=changes,
        more_devices=larger(),
    )
    needed = sum(parts.values())
    here = f"of {min(known) / 1e9:.2f} GB" if known else "(the devices do not say what they have)"
    say(f"each device needs {needed / 1e9:.2f} GB {here}: {describe(parts)}")
    return {**parts, "needed_bytes": needed, "available_bytes": min(known) if known else None}


def tell_memory(mesh: Mesh, when: str) -> int | None:
    """Says what the devices hold now; the most of any, None where they do not report it."""
    used = machine.used_memory(list(mesh.devices.flat))
    if used is None:
        say(f"memory {when}: not reported by these devices")
        return None
    say(f"memory {when}: {', '.join(f'{n / 1e9:.2f}' for n in used)} GB")
    return max(used)


def warm_up(llm: LLM) -> dict[str, Any]:
    """Compiles every program, and says how long each took."""
    began = last = time.perf_counter()
    count = 0
    for name in llm.engine.each_program():
        count, now = count + 1, time.perf_counter()
        say(f"{now - last:7.2f} s  {' '.join(map(str, name))}")
        last = now
    say(f"{count} programs in {last - began:.1f} s")
    return {"programs": count, "seconds": last - began}


def load(
    args: argparse.Namespace, job: Job, folder: Path, mesh: Mesh, dtype: str, max_length: int
) -> tuple[LLM, dict[str, Any]]:
    """The model, every program of it compiled, and what that took of time and memory.

    Raises:
        ValueError, OSError: its files cannot be used.
    """
    memory: dict[str, Any] = {"before_load_bytes": tell_memory(mesh, "before loading")}
    llm = LLM(
        folder,
        drafter=job.drafter,
        mesh=mesh,
        max_length=max_length,
        max_batch=job.max_batch,
        dtype=dtype,
        platform=args.platform,
        latent_norm_eps=args.latent_norm_eps,
        cache=args.cache,
        few_programs=True,
    )
    say(f"loaded in {llm.load_seconds:.1f} s")
    memory["after_load_bytes"] = tell_memory(mesh, "after loading")
    warm = warm_up(llm)
    memory["after_warm_up_bytes"] = tell_memory(mesh, "after warm-up")
    return llm, {"warm_up": warm, "memory": memory}


# Running.


@dataclasses.dataclass
class Totals:
    """What a run has given so far."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    replies: int = 0
    interrupted: int = 0
    seconds: float = 0.0
    finish_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    speculation: list[Speculation] = dataclasses.field(default_factory=list)

    def take(self, result: Result) -> None:
        """Adds a reply; the seconds are the run's own."""
        self.replies += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.new_tokens += result.usage.new_tokens
        reasons = self.finish_reasons
        reasons[result.finish_reason] = reasons.get(result.finish_reason, 0) + 1
        if result.speculation is not None:
            self.speculation = [Speculation.total([*self.speculation, result.speculation])]

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens over the seconds of replying, prefill among them."""
        return self.new_tokens / self.seconds if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        out = dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}
        told = self.speculation[0] if self.speculation else None
        out["speculation"] = None if told is None else dataclasses.asdict(told)
        return out | {"tokens_per_cycle": None if told is None else told.tokens_per_cycle}


def answer(llm: LLM, waiting: list[PromptRow], replies: ReplyFile, totals: Totals) -> None:
    """Replies to every prompt that has none, each written as it ends."""
    began = time.perf_counter()
    collectors: Iterator[Collector] = (row.reply(llm.requests) for row in waiting)
    done = replies.num_resumed
    with tqdm(total=done + len(waiting), initial=done, unit="reply", disable=None) as bar:
        for index, result in llm.as_finished(collectors):
            replies.write(waiting[index], result)
            totals.take(result)
            totals.seconds = time.perf_counter() - began
            bar.update()
            bar.set_postfix_str(f"{totals.tokens_per_second:.1f} tokens/s")


class Interrupt:
    """Ctrl-C noted, where it is to end a reply; a second one ends the program."""

    def __init__(self):
        self.is_set = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


def chat(args: argparse.Namespace, llm: LLM, params: SamplingParams, totals: Totals) -> None:
    """A conversation over stdin and stdout, until it ends."""
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(start)
    if sys.stdin.isatty():
        say(HELP)
    while (line := read_line()) is not None:
        command = line.strip()
        if not command:
            continue
        if command == "/quit":
            return
        if command == "/reset":
            messages = list(start)
            say("a new conversation")
        elif command.startswith("/"):
            say(HELP if command == "/help" else f"{command.split()[0]} is no command: {HELP}")
        else:
            messages.append({"role": "user", "content": line})
            try:
                messages.append(reply(args, llm, messages, params, totals))
            except ValueError as error:
                # Too long by now; the conversation stands as it was.
                messages.pop()
                say(f"error: {error}; /reset begins a new conversation")


def read_line() -> str | None:
    """The next line of stdin; None at its end."""
    while True:
        try:
            if sys.stdin.isatty():
                return input("> ")
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            say(f"\n{HELP}")


def reply(
    args: argparse.Namespace,
    llm: LLM,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    totals: Totals,
) -> dict[str, Any]:
    """Streams the reply to stdout; the message that the conversation goes on with."""
    began = time.perf_counter()
    text, reasoning, num_tokens, result = "", "", 0, None
    pieces = llm.chat_stream(messages, params, thinking=not args.no_thinking)
    with Interrupt() as interrupt, contextlib.closing(pieces):
        for piece in pieces:
            gap = "\n\n" if piece.text and reasoning and not text else ""
            print(piece.reasoning + gap + piece.text, end="", flush=True)
            text, reasoning = text + piece.text, reasoning + piece.reasoning
            num_tokens, result = num_tokens + len(piece.token_ids), piece.result
            if interrupt.is_set:
                break
    print(flush=True)
    seconds = time.perf_counter() - began
    totals.seconds += seconds
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if result is None:
        totals.interrupted += 1
        totals.new_tokens += num_tokens
        say(f"[ended after {num_tokens} tokens]")
        return message
    totals.take(result)
    told = result.speculation
    drafting = "" if told is None else f", {told.tokens_per_cycle:.2f} tokens a cycle"
    say(f"[{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} a second{drafting}]")
    return message


def report(
    args: argparse.Namespace, job: Job, llm: LLM | None, totals: Totals, known: dict[str, Any]
) -> dict[str, Any]:
    """The JSON line."""
    return {
        "mode": "chat" if args.chat else "prompts",
        **totals.to_dict(),
        "load_seconds": None if llm is None else llm.load_seconds,
        **known,
        "conditions": conditions(
            model=args.model,
            drafter=None
            if job.drafter is None
            else dataclasses.asdict(job.drafter) | {"path_or_id": args.drafter or "demo"},
            dtype=None if llm is None else llm.dtype,
            mesh=None if llm is None else dict(llm.mesh.shape),
            max_length=None if llm is None else llm.max_length,
            max_batch=job.max_batch,
            cache=args.cache,
            seed=args.seed,
            sampling=job.sampling,
            thinking=not args.no_thinking,
            compile_cache=None if job.compile_cache is None else str(job.compile_cache),
        ),
    }


def run(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """All of it; the JSON line.

    Raises:
        ValueError, OSError, RuntimeError: what cannot be used, or went wrong.
    """
    set_up(args, job)
    prepared = prepare(args, job)
    requests = prepared.requests
    mesh = make_machine(args, job, requests.cfg)
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    memory = check_fit(args, job, requests, mesh, DTYPES[dtype])
    # From the hub this takes hours: everything above comes first.
    folder = resolve(job.model)

    def start() -> tuple[LLM, dict[str, Any]]:
        if job.probe_out is not None:
            probe(mesh, job.probe_out)
        llm, known = load(args, job, folder, mesh, dtype, requests.max_length)
        return llm, known | {"memory": memory | known["memory"]}

    totals = Totals()
    if args.chat:
        llm, known = start()
        chat(args, llm, sampling_params(args), totals)
        return report(args, job, llm, totals, known)
    with contextlib.closing(open_replies(args, job, prepared, folder, dtype)) as replies:
        rows = {"rows": len(prepared.rows), "resumed_rows": replies.num_resumed}
        waiting = [row for row in prepared.rows if row not in replies]
        if not waiting:
            return report(args, job, None, totals, rows)
        llm, known = start()
        answer(llm, waiting, replies, totals)
        return report(args, job, llm, totals, rows | known)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        job = check(args)
    except MeshError as error:
        parser.error(f"--mesh: {error}")
    except ValueError as error:
        parser.error(str(error).removeprefix("SamplingParams: "))
    with contextlib.suppress(AttributeError):
        # A terminal that cannot show a character gets a stand-in, not an error.
        sys.stdout.reconfigure(errors="replace")
    try:
        print(json.dumps(run(args, job)), flush=True)
    except BrokenPipeError:
        # Nobody reads on. What is left must not raise once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, RuntimeError) as error:
        print(f"run_kimi_k25.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
