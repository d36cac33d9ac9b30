"""Generates text from a prompt, or a chat reply, and says what it cost.

    python scripts/generate.py --prompt "def fibonacci(n):"
    python scripts/generate.py --prompt "Write a merge sort." --chat --no-thinking
    python scripts/generate.py --model FOLDER_OR_HUB_ID --mesh tensor=8 --prompt "..." --quiet
    python scripts/generate.py --model TARGET --drafter EAGLE3_DRAFTER --prompt "..."

What it does: loads a checkpoint, streams the new text to stdout as it comes (after the prompt, if
it is a completion), and ends stdout with one JSON line: the text, its token ids, how it finished,
what it cost, and the conditions it ran under. With a drafter also how many drafts were kept, and
`break_even`: the tokens a cycle must give to be as fast as plain decoding, from the times of a
cycle and of a plain step, which are measured after the text. The bundled demo takes about 15 s on
two CPU cores, nearly all of it compiling, which `tokens_per_second` includes when `compiles` is not
zero.

Progress and errors go to stderr. Exit status: 0, 1 when the checkpoint, mesh or prompt cannot be
used, 2 when an option is wrong. `--mesh` on a CPU runs on as many simulated devices.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Set before the imports below, which take a second: Ctrl-C ends the process at once, without
    # a traceback, and also while XLA compiles.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
from jax.sharding import AbstractMesh

from kimi_jax import DEMO, LLM, Result, SamplingParams
from kimi_jax.checkpoint.reader import CheckpointError, resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH
from kimi_jax.runtime.flags import set_gpu_environment, set_gpu_flags, simulate_mesh
from kimi_jax.runtime.llm import DTYPES
from kimi_jax.runtime.mesh import CACHES, MESH_AXES, MeshError, parse_mesh
from kimi_jax.runtime.prompts import merge_sampling
from kimi_jax.runtime.replies import Piece
from kimi_jax.runtime.requests import INSTANT_SAMPLING, THINKING_SAMPLING
from kimi_jax.runtime.sampling import MIN_TEMPERATURE
from kimi_jax.text.messages import ChatError, normalize_tools
from spec import DEMO_DRAFTER, DynamicTree, load_drafter
from spec.drafter import AUTO, DEFAULT_DRAFT_TOKENS, Eagle3Drafter
from spec.economics import break_even


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--prompt", required=True, help="the text to go on from, or with --chat the user's turn")
    add(
        "--model",
        default="demo",
        help="a checkpoint folder, a hub id owner/name, or demo (default), the bundled one",
    )
    chat = parser.add_argument_group("chat")
    add_chat = chat.add_argument
    add_chat("--chat", action="store_true", help="render the prompt with the chat template")
    add_chat("--no-thinking", action="store_true", help="reply without reasoning first")
    add_chat("--system", help="a system message before the prompt")
    add_chat("--tools", type=Path, metavar="FILE", help="a JSON list of tool declarations")
    add_drafter_options(parser)
    add_sampling_options(parser)
    add_machine_options(parser)
    add("--quiet", action="store_true", help="no streamed text and no progress, only the JSON line")
    return parser


def add_drafter_options(parser: argparse.ArgumentParser) -> None:
    """What `read_drafter` reads."""
    speculation = parser.add_argument_group("speculation")
    add_speculation = speculation.add_argument
    add_speculation(
        "--drafter",
        help="an EAGLE-3 drafter's folder or hub id, demo, or none: plain decoding; default: the "
        "demo's own with the demo, else none",
    )
    add_speculation(
        "--draft-tokens",
        metavar="K",
        help=f"tokens drafted a cycle, 0 to {MAX_DRAFT_DEPTH}, or auto: whichever number is "
        f"fastest (default: {DEFAULT_DRAFT_TOKENS})",
    )
    add_speculation(
        "--tree",
        metavar="M,DEPTH,TOP_K",
        help="draft the M likeliest nodes of a tree so deep and wide, in place of a chain",
    )
    add_speculation(
        "--lossy-threshold",
        type=float,
        metavar="P",
        help="keep every draft to which the model gives at least this probability: more are kept, "
        "and the text is no longer the model's own; default: off",
    )
    add_speculation(
        "--taps",
        metavar="I,J,...",
        help="layers of the target whose inputs the drafter reads; default: its configuration's",
    )
    add_speculation(
        "--sample-drafts",
        action="store_true",
        help="draw drafts where the reply is sampled: its distribution is kept, its tokens differ",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """What `given_sampling` reads, and the seed."""
    sampling = parser.add_argument_group("sampling and stopping")
    add_sampling = sampling.add_argument
    add_sampling(
        "--max-new-tokens",
        type=int,
        help=f"default: {SamplingParams().max_new_tokens}, with --chat until the context is full",
    )
    add_sampling(
        "--temperature",
        type=float,
        help="0 takes the most likely token; default: 0, with --chat as published "
        f"({THINKING_SAMPLING.temperature}, without thinking {INSTANT_SAMPLING.temperature})",
    )
    add_sampling(
        "--top-p",
        type=float,
        help=f"default: 1 (off), with --chat as published ({THINKING_SAMPLING.top_p})",
    )
    add_sampling("--top-k", type=int, help="default: off; 0 and -1 are off too")
    add_sampling("--seed", type=int, default=0, help="default: %(default)s, so that runs repeat")
    add_sampling(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Where the model runs, and how large."""
    machine = parser.add_argument_group("model and machine")
    add_machine = machine.add_argument
    add_machine("--mesh", help="devices to cut the model over: tensor=8 or expert=4,tensor=2")
    add_machine(
        "--cache",
        choices=CACHES,
        default="replicated",
        help="the latent cache: whole on every device, or its slots shared out over the mesh",
    )
    add_machine("--platform", choices=("cpu", "gpu"), help="default: the best there is")
    add_machine("--dtype", choices=sorted(DTYPES), help="default: float32 on a CPU, else bfloat16")
    add_machine("--max-length", type=int, help="most tokens of prompt and reply together")
    add_machine(
        "--latent-norm-eps", type=float, help="epsilon of the latent norms; default: the model's"
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """The options, checked as far as they can be without the checkpoint."""

    model: str | Path
    mesh: dict[str, int] | None
    tools: list[dict[str, Any]] | None
    params: SamplingParams
    drafter: Eagle3Drafter | None


def check(args: argparse.Namespace) -> Job:
    """The job the options describe.

    Raises:
        ValueError: options that are wrong or contradict each other.
    """
    if not args.chat:
        given = {
            "--no-thinking": args.no_thinking,
            "--system": args.system is not None,
            "--tools": args.tools is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"only with --chat: {', '.join(names)}")
    check_machine_options(args)
    params = sampling_params(args)
    return Job(
        model=model_path(args.model),
        mesh=None if args.mesh is None else parse_mesh(args.mesh),
        tools=None if args.tools is None else read_tools(args.tools),
        params=params,
        drafter=read_drafter(args, may_sample=params.temperature >= MIN_TEMPERATURE),
    )


def check_machine_options(args: argparse.Namespace) -> None:
    """Refuses sizes that no model has.

    Raises:
        ValueError: names the option.
    """
    if args.max_length is not None and args.max_length < 2:
        raise ValueError(f"--max-length is {args.max_length}, expected at least 2")
    eps = args.latent_norm_eps
    if eps is not None and not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"--latent-norm-eps is {eps}, expected a finite number over 0")


def read_drafter(args: argparse.Namespace, *, may_sample: bool) -> Eagle3Drafter | None:
    """The drafter the options describe; None decodes plainly.

    Raises:
        ValueError: options that are wrong, or would be ignored since no reply is sampled.
    """
    path = args.drafter or ("demo" if args.model == "demo" else "none")
    if args.drafter is None and path == "demo" and (why := _demo_obstacle(args.mesh)) is not None:
        # It was not asked for, and a reply is the same without it.
        print(f"decoding without the demo's own drafter: {why}", file=sys.stderr)
        path = "none"
    if path == "none":
        given = {
            "--draft-tokens": args.draft_tokens is not None,
            "--tree": args.tree is not None,
            "--lossy-threshold": args.lossy_threshold is not None,
            "--sample-drafts": args.sample_drafts,
            "--taps": args.taps is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"only with a --drafter: {', '.join(names)}")
        return None
    check_drafts_matter(args, may_sample=may_sample)
    K = args.draft_tokens
    if K is not None and K != AUTO:
        if not (K.isascii() and K.isdecimal()) or int(K) > MAX_DRAFT_DEPTH:
            raise ValueError(f"--draft-tokens is {K!r}, expected 0 to {MAX_DRAFT_DEPTH}, or {AUTO}")
        K = int(K)
    tree = _numbers("--tree", args.tree)
    if tree is not None and len(tree) != 3:
        raise ValueError(f"--tree is {args.tree!r}, expected nodes,depth,top_k such as 8,4,2")
    return load_drafter(
        DEMO_DRAFTER if path == "demo" else path,
        num_draft_tokens=K,
        tree=None if tree is None else DynamicTree(*tree),
        sample_drafts=args.sample_drafts,
        lossy_threshold=args.lossy_threshold,
        taps=_numbers("--taps", args.taps),
    )


def _demo_obstacle(mesh: str | None) -> str | None:
    """Why the demo's drafter cannot be cut over this mesh; None if it can."""
    sizes = {} if mesh is None else parse_mesh(mesh)
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    try:
        load_drafter(DEMO_DRAFTER).check(
            ModelConfig.from_folder(DEMO), AbstractMesh(shape, MESH_AXES)
        )
    except MeshError as error:
        return str(error)
    return None


def check_drafts_matter(args: argparse.Namespace, *, may_sample: bool) -> None:
    """Refuses what greedy replies would ignore.

    Raises:
        ValueError: names the options.
    """
    given = {
        "--sample-drafts": args.sample_drafts,
        "--lossy-threshold": args.lossy_threshold is not None,
    }
    if not may_sample and (names := [name for name, is_given in given.items() if is_given]):
        raise ValueError(f"only with a --temperature over 0: {', '.join(names)}")


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of a comma-separated option; None if it is not given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} is {text!r}, expected numbers such as 3 or 0,1,3")
    return tuple(map(int, words))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by field; the seed aside."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return given | ({"stop": tuple(args.stop)} if args.stop else {})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The defaults of the mode, with the options given over them.

    Raises:
        ValueError: an option out of range, or one that would be ignored.
    """
    defaults = SamplingParams()
    if args.chat:
        defaults = INSTANT_SAMPLING if args.no_thinking else THINKING_SAMPLING
    given = given_sampling(args) | {"seed": args.seed}
    return merge_sampling(defaults, given, spell_option)


def spell_option(name: str) -> str:
    """A field of `SamplingParams` as the option of that name."""
    return f"--{name.replace('_', '-')}"


def read_tools(path: Path) -> list[dict[str, Any]] | None:
    """The tool declarations of a JSON file.

    Raises:
        ValueError: not a file of such declarations.
    """
    try:
        return normalize_tools(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--tools {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--tools {path}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"--tools {path}: nested too deeply") from None
    except ChatError as error:
        raise ValueError(f"--tools {path}: {error}") from None


def model_path(text: str) -> str | Path:
    """What --model names: the demo's folder, a folder, or a hub id as it is.

    Raises:
        ValueError: no such folder, nor a hub id.
    """
    if text == "demo":
        return DEMO
    # What is not of the form owner/name is a folder; asking the hub can wait.
    if text.count("/") != 1 or Path(text).parent.exists():
        try:
            return resolve(text)
        except CheckpointError as error:
            raise ValueError(f"--model {error}") from None
    return text


def start(args: argparse.Namespace, job: Job) -> tuple[LLM, Iterator[Piece]]:
    """The loaded model, and its text to come.

    Raises:
        ValueError, OSError: the checkpoint, the mesh or the prompt cannot be used.
    """
    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if args.platform != "gpu":
        simulate_mesh(job.mesh)
    set_gpu_flags()
    set_gpu_environment()
    llm = LLM(
        job.model,
        drafter=job.drafter,
        mesh=job.mesh,
        max_length=args.max_length,
        max_batch=1,
        cache=args.cache,
        dtype=args.dtype,
        platform=args.platform,
        latent_norm_eps=args.latent_norm_eps,
        progress=not args.quiet,
    )
    if not args.chat:
        return llm, llm.stream(args.prompt, job.params)
    messages = [{"role": "user", "content": args.prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    thinking = not args.no_thinking
    return llm, llm.chat_stream(messages, job.params, thinking=thinking, tools=job.tools)


def show(pieces: Iterator[Piece], prompt: str, *, is_quiet: bool) -> Result:
    """Prints the prompt and the text as it comes, a blank line between reasoning and answer."""
    # The prompt goes out with the first text, so that nothing of stderr stands in between.
    result, new, is_reasoning = None, prompt, False
    for piece in pieces:
        new += piece.reasoning
        is_reasoning = is_reasoning or bool(piece.reasoning)
        if piece.text:
            new += "\n\n" * is_reasoning + piece.text
            is_reasoning = False
        if not is_quiet:
            print(new, end="", flush=True)
        new, result = "", piece.result
    assert result is not None  # the last piece carries it
    if not is_quiet:
        print()
    return result


def report(args: argparse.Namespace, job: Job, llm: LLM, result: Result) -> dict[str, Any]:
    """The JSON line."""
    out: dict[str, Any] = {"text": result.text}
    if args.chat:
        out |= {
            "reasoning": result.reasoning,
            "tool_calls": [dataclasses.asdict(call) for call in result.tool_calls],
            "malformed_calls": [dataclasses.asdict(call) for call in result.malformed_calls],
        }
    sampling = dataclasses.asdict(job.params)
    return out | {
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        **dataclasses.asdict(result.usage),
        **dataclasses.asdict(result.timings),
        **_speculation(llm, job, result),
        "load_seconds": llm.load_seconds,
        "conditions": conditions(
            model=args.model,
            drafter=_drafter_options(args, job),
            dtype=llm.dtype,
            mesh=dict(llm.mesh.shape),
            cache=args.cache,
            max_length=llm.max_length,
            context_length=result.usage.prompt_tokens + result.usage.new_tokens,
            drafter_config=_drafter_config(llm),
            given_sha256=_digest(args.prompt, args.system, json.dumps(job.tools)),
            chat=args.chat,
            thinking=args.chat and not args.no_thinking,
            config=llm.cfg.to_dict(),
            seed=sampling.pop("seed"),
            sampling=sampling,
        ),
    }


def _drafter_options(args: argparse.Namespace, job: Job) -> dict[str, Any] | None:
    """As they were given; the demo's own drafter by its name, not by where it is installed."""
    if job.drafter is None:
        return None
    return dataclasses.asdict(job.drafter) | {"path_or_id": args.drafter or "demo"}


def _drafter_config(llm: LLM) -> dict[str, Any] | None:
    """The drafter's sizes and the streams it reads."""
    drafter = llm.engine.drafter
    return None if drafter is None else drafter.cfg.to_dict() | {"taps_read": drafter.taps}


def _digest(*parts: str | None) -> str:
    """Tells two prompts apart without showing either."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _speculation(llm: LLM, job: Job, result: Result) -> dict[str, Any]:
    """What drafting did and cost; null without a drafter.

    Costs are of `draft_tokens`, which with `auto` is what it has settled on; the counts are of all
    cycles.
    """
    told = result.speculation
    if told is None:
        names = ("draft_tokens", "drafted", "accepted_by_depth", "acceptance_rate")
        costs = ("tokens_per_cycle", "ms_per_cycle", "ms_per_step", "break_even")
        return dict.fromkeys((*names, *costs))
    cycle, step = llm.cycle_cost(result.token_ids, job.params)
    return {
        "draft_tokens": llm.engine.drafter.controller(1).current.num_draft_tokens,
        "drafted": told.drafted,
        "accepted_by_depth": told.accepted_by_depth,
        "acceptance_rate": told.acceptance_rate,
        "tokens_per_cycle": told.tokens_per_cycle,
        "ms_per_cycle": 1e3 * cycle,
        "ms_per_step": 1e3 * step,
        "break_even": break_even(cycle, step),
    }


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        job = check(args)
    except MeshError as error:
        parser.error(f"--mesh: {error}")
    except ValueError as error:
        parser.error(str(error).removeprefix("SamplingParams: "))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("kimi_jax").setLevel(logging.WARNING if args.quiet else logging.INFO)
    with contextlib.suppress(AttributeError):
        # A terminal that cannot show a character gets a stand-in, not an error.
        sys.stdout.reconfigure(errors="replace")
    try:
        llm, pieces = start(args, job)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        return fail(error)
    try:
        result = show(pieces, "" if args.chat else args.prompt, is_quiet=args.quiet)
        print(json.dumps(report(args, job, llm, result)), flush=True)
    except BrokenPipeError:
        # Nobody reads on. What is left must not raise once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except jax.errors.JaxRuntimeError as error:
        return fail(error)
    return 0


def fail(error: Exception) -> int:
    """Says what went wrong; the exit status."""
    print(f"generate.py: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
