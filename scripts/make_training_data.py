"""Makes a drafter's training samples: prompts answered by the target itself, token for token.

    python scripts/make_training_data.py stdlib --out samples.jsonl --temperature 0,0.8
    python scripts/make_training_data.py chats.jsonl --out samples.jsonl --length 1024
    python scripts/make_training_data.py chats.jsonl --out kept.jsonl --keep-answers
    python scripts/make_training_data.py chats.jsonl --model FOLDER_OR_HUB_ID --mesh tensor=8 ...

What it does: reads conversations and texts (`spec/training/sources.py` states the spellings), takes
every assistant turn, and every window of a plain text, as a sample, and has the model answer it
anew; a drafter is to follow the model, not whoever wrote the data. With --keep-answers the answers
stay as given and no model is loaded. An INPUT is a file, a folder, `stdlib`, the demo's own
training text (the standard library of the running Python), or `stdlib-held-out`, the modules it was
never trained on.

Sources are taken in an order of chance that --seed decides, so that --limit takes a fair share.
Resumable: a run that was killed goes on where it was and writes what it would have written; one
with other options is refused, but --limit, --batch and the machine may change. On two CPU cores
the demo gives about 450 tokens a second with 8 prompts together and 650 with 32.

Ends stdout with one JSON line. Exit status: 0, 1 when the checkpoint, mesh or an input cannot be
used, 2 when an option is wrong.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Set before the imports below, which take a second: Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
from generate import model_path
from tqdm import tqdm

from kimi_jax import LLM, SamplingParams
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.flags import simulate_mesh
from kimi_jax.runtime.llm import DTYPES, SMALL_FILES
from kimi_jax.runtime.mesh import MeshError, parse_mesh
from kimi_jax.runtime.sampling import MIN_TEMPERATURE
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import Tokenizer
from spec.training.conversations import Exchange, Prompt, SampleMaker
from spec.training.samples import Header, Report, SamplesWriter, check_resumable
from spec.training.sources import Conversation, Source, files_in, read_sources

LIBRARY = {"stdlib": 0, "stdlib-held-out": 1}
"""Inputs that are no files: which of `library_files` each is."""
BATCHES_TOGETHER = 16
"""Prompts of so many batches are sorted by length, so that a batch's are alike."""


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="a file, a folder, stdlib or stdlib-held-out")
    add("--out", type=Path, required=True, metavar="FILE.jsonl", help="the samples file")
    add(
        "--model",
        default="demo",
        help="a checkpoint folder, a hub id owner/name, or demo (default), the bundled one",
    )
    add("--limit", type=int, metavar="N", help="at most so many samples; default: all")
    add("--seed", type=int, default=0, help="of the order and the sampling; default: %(default)s")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument(
        "--regenerate", action="store_true", help="have the model answer anew (default)"
    )
    answers.add_argument("--keep-answers", action="store_true", help="keep the answers as given")
    samples = parser.add_argument_group("samples")
    add_samples = samples.add_argument
    add_samples(
        "--length", type=int, default=512, help="most tokens of a sample; default: %(default)s"
    )
    add_samples(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="of a window of plain text, those the model goes on from; default: 64",
    )
    add_samples("--no-thinking", action="store_true", help="replies without reasoning first")
    sampling = parser.add_argument_group("sampling of new answers")
    add_sampling = sampling.add_argument
    add_sampling(
        "--temperature",
        metavar="T[,T...]",
        help="one, or several that the samples take in turn; 0 takes the most likely token; "
        "default: 0.8",
    )
    add_sampling("--top-p", type=float, help="default: 1 (off)")
    add_sampling("--top-k", type=int, help="default: off")
    add_sampling("--max-new-tokens", type=int, help="default: as many as --length leaves")
    machine = parser.add_argument_group("model and machine")
    add_machine = machine.add_argument
    add_machine("--batch", type=int, help="prompts that run together; default: 8")
    add_machine("--mesh", help="devices to cut the model over: tensor=8 or expert=4,tensor=2")
    add_machine("--dtype", choices=sorted(DTYPES), help="default: float32 on a CPU, else bfloat16")
    add("--quiet", action="store_true", help="no progress and no report, only the JSON line")
    return parser


@dataclasses.dataclass(frozen=True)
class Job:
    """The options, checked as far as they can be without the inputs and the checkpoint."""

    model: str | Path
    files: list[tuple[str, Path]]
    mesh: dict[str, int] | None
    sampling: list[SamplingParams]
    """In turn; without a seed, which is each sample's own."""
    options: dict[str, Any]
    """Those that samples depend on."""


def check(args: argparse.Namespace) -> Job:
    """The job the options describe.

    Raises:
        ValueError: options that are wrong or contradict each other, an input that is not there.
    """
    if args.keep_answers:
        given = {
            "--prompt-tokens": args.prompt_tokens is not None,
            "--temperature": args.temperature is not None,
            "--top-p": args.top_p is not None,
            "--top-k": args.top_k is not None,
            "--max-new-tokens": args.max_new_tokens is not None,
            "--batch": args.batch is not None,
            "--mesh": args.mesh is not None,
            "--dtype": args.dtype is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"not with --keep-answers: {', '.join(names)}")
    # What is not given has its default from here on.
    args.batch = 8 if args.batch is None else args.batch
    args.prompt_tokens = 64 if args.prompt_tokens is None else args.prompt_tokens
    args.temperature = "0.8" if args.temperature is None else args.temperature
    for name in ("batch", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, expected at least 1")
    if args.length < 2:
        raise ValueError(f"--length is {args.length}, expected at least 2")
    if not args.keep_answers and not 1 <= args.prompt_tokens < args.length:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens}, expected 1 to {args.length - 1}, less than "
            "--length"
        )
    if args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder, expected a file")
    sampling = [] if args.keep_answers else _sampling(args)
    options: dict[str, Any] = {
        "inputs": args.inputs,
        "answers": "kept" if args.keep_answers else "regenerated",
        "thinking": not args.no_thinking,
        "length": args.length,
        "seed": args.seed,
    }
    if not args.keep_answers:
        options |= {
            "model": args.model,
            "prompt_tokens": args.prompt_tokens,
            "temperature": [params.temperature for params in sampling],
            "top_p": sampling[0].top_p,
            "top_k": sampling[0].top_k,
            "max_new_tokens": args.max_new_tokens,
            "dtype": args.dtype,
        }
    return Job(
        model=model_path(args.model),
        files=[file for text in args.inputs for file in _files(text)],
        mesh=None if args.mesh is None else parse_mesh(args.mesh),
        sampling=sampling,
        options=options,
    )


def _sampling(args: argparse.Namespace) -> list[SamplingParams]:
    try:
        temperatures = [float(word) for word in args.temperature.split(",")]
    except ValueError:
        raise ValueError(
            f"--temperature is {args.temperature!r}, expected numbers such as 0.8 or 0,0.8"
        ) from None
    filters = {"--top-p": args.top_p not in (None, 1), "--top-k": (args.top_k or 0) > 0}
    names = [name for name, is_on in filters.items() if is_on]
    if names and max(temperatures) < MIN_TEMPERATURE:
        raise ValueError(f"only with a --temperature over 0: {', '.join(names)}")
    return [
        SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=temperature,
            top_p=1.0 if args.top_p is None else args.top_p,
            top_k=args.top_k,
        )
        for temperature in temperatures
    ]


def _files(text: str) -> list[tuple[str, Path]]:
    if text not in LIBRARY:
        return files_in(text)
    from train_demo import library_files  # Imports all that training needs.

    root = Path(sysconfig.get_paths()["stdlib"])
    paths = library_files()[LIBRARY[text]]
    return [(f"{text}/{path.relative_to(root).as_posix()}", path) for path in paths]


@dataclasses.dataclass
class Prepared:
    """All there is to know before a model is loaded."""

    header: Header
    sources: list[Source]
    maker: SampleMaker


def prepare(args: argparse.Namespace, job: Job) -> Prepared:
    """Reads the inputs and the checkpoint's small files, and looks at what is in the out file.

    Raises:
        ValueError: what is wrong with them.
    """
    folder = resolve(job.model, patterns=SMALL_FILES)
    tokenizer = Tokenizer.from_folder(folder)
    if not args.keep_answers:
        limit = ModelConfig.from_folder(folder).max_position_embeddings
        if args.length > limit:
            raise ValueError(f"--length is {args.length}, the model's limit {limit}")
    report = Report()
    sources, digest = read_sources(job.files, report)
    if not sources:
        raise ValueError(f"no conversation and no text in the inputs\n{report}")
    has_chats = any(isinstance(source, Conversation) for source in sources)
    template = ChatTemplate.from_folder(folder, tokenizer) if has_chats else None
    header = Header.of(folder, tokenizer.vocab_size, **job.options, inputs_sha256=digest)
    check_resumable(args.out, header)
    maker = SampleMaker(
        tokenizer,
        template,
        report,
        thinking=not args.no_thinking,
        length=args.length,
        prompt_tokens=min(args.prompt_tokens, args.length - 1),
        max_new_tokens=args.max_new_tokens,
    )
    return Prepared(header=header, sources=sources, maker=maker)


def _number(*parts: object) -> int:
    """64 bits that depend on the parts alone, whatever else there is and whenever it is asked."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big")


def keep(args: argparse.Namespace, prepared: Prepared, writer: SamplesWriter) -> None:
    """Writes the samples with their answers as given."""
    maker = prepared.maker
    sources = tqdm(prepared.sources, unit="source", disable=True if args.quiet else None)
    samples = [sample for source in sources for sample in maker.kept(source)]
    samples.sort(key=lambda sample: _number(args.seed, sample.id))
    for sample in samples[: args.limit]:
        if sample.id not in writer:
            start, stop = sample.generated[-1]
            writer.append(
                sample, text=maker.tokenizer.decode(sample.input_ids[start:stop].tolist())
            )


def plan(args: argparse.Namespace, prepared: Prepared) -> list[Exchange]:
    """What to ask the model, in the order it is asked."""
    exchanges = [e for source in prepared.sources for e in prepared.maker.exchanges(source)]
    exchanges.sort(key=lambda exchange: _number(args.seed, exchange.id))
    if args.limit is None:
        return exchanges
    planned, room = [], args.limit
    for exchange in exchanges:
        if not room:
            break
        exchange.keep_first(room)
        room -= exchange.num_prompts
        planned.append(exchange)
    return planned


class Regeneration:
    """Puts every exchange's prompts to the model and writes the samples.

    Which prompts run together depends on the plan alone, not on what is in the file already, so a
    resumed run computes what the first would have, to the last bit.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        sampling: list[SamplingParams],
        maker: SampleMaker,
        llm: LLM,
        writer: SamplesWriter,
    ):
        self.new_tokens = 0
        self.seconds = 0.0
        self._seed = args.seed
        self._batch = args.batch
        self._is_quiet = args.quiet
        self._sampling = sampling
        self._tokenizer = maker.tokenizer
        self._llm = llm
        self._writer = writer

    def run(self, exchanges: list[Exchange]) -> None:
        """All of them, some batches' worth at a time."""
        total = sum(exchange.num_prompts for exchange in exchanges)
        size = self._batch * BATCHES_TOGETHER
        with tqdm(total=total, unit="sample", disable=True if self._is_quiet else None) as bar:
            numbered = list(enumerate(exchanges))
            for start in range(0, len(numbered), size):
                self._run_together(numbered[start : start + size], bar)

    def _run_together(self, numbered: list[tuple[int, Exchange]], bar: tqdm) -> None:
        """Everyone's first prompt, then everyone's second, until none is left."""
        turn = 0
        while numbered:
            asked = []
            for number, exchange in numbered:
                if (prompt := exchange.prompt()) is not None:
                    asked.append((number, exchange, prompt))
            asked.sort(key=lambda one: (len(one[2].ids), one[0]))
            for start in range(0, len(asked), self._batch):
                batch = asked[start : start + self._batch]
                params = [self._params(number + turn, prompt) for number, _, prompt in batch]
                self._answer([(exchange, prompt) for _, exchange, prompt in batch], params)
                bar.update(len(batch))
                if self.seconds:
                    bar.set_postfix_str(f"{self.new_tokens / self.seconds:.0f} tokens/s")
            numbered = sorted((number, exchange) for number, exchange, _ in asked)
            turn += 1

    def _params(self, number: int, prompt: Prompt) -> SamplingParams:
        return dataclasses.replace(
            self._sampling[number % len(self._sampling)],
            max_new_tokens=prompt.max_new_tokens,
            seed=_number(self._seed, "sampling", prompt.id),
        )

    def _answer(self, batch: list[tuple[Exchange, Prompt]], params: list[SamplingParams]) -> None:
        """Replies from the file where all are in it, else the model's."""
        if all(prompt.id in self._writer for _, prompt in batch):
            for exchange, prompt in batch:
                exchange.answer(*self._written(prompt))
            return
        began = time.perf_counter()
        results = self._llm.generate([prompt.ids for _, prompt in batch], params)
        self.seconds += time.perf_counter() - began
        for (exchange, prompt), own, result in zip(batch, params, results, strict=True):
            self.new_tokens += len(result.token_ids)
            if prompt.id in self._writer:
                exchange.answer(*self._written(prompt))
                continue
            self._writer.append(
                exchange.answer(result.token_ids, result.finish_reason),
                text=self._tokenizer.decode(result.token_ids),
                finish_reason=result.finish_reason,
                temperature=own.temperature,
                seed=own.seed,
            )

    def _written(self, prompt: Prompt) -> tuple[list[int], str]:
        """The reply that is in the file."""
        row = self._writer.row(prompt.id)
        start = len(prompt.ids)
        if row["input_ids"][:start] != list(prompt.ids) or "finish_reason" not in row:
            raise ValueError(f"{self._writer.path}: {prompt.id!r} there has another prompt")
        return row["input_ids"][start:], row["finish_reason"]


def load(args: argparse.Namespace, job: Job) -> LLM:
    """The model.

    Raises:
        ValueError, OSError: the checkpoint or the mesh cannot be used.
    """
    simulate_mesh(job.mesh)
    return LLM(
        job.model,
        mesh=job.mesh,
        max_length=args.length,
        max_batch=args.batch,
        dtype=args.dtype,
        progress=not args.quiet,
    )


def make(args: argparse.Namespace, job: Job, prepared: Prepared) -> dict[str, Any]:
    """Completes the samples file; what the JSON line says of it."""
    began = time.perf_counter()
    exchanges = [] if args.keep_answers else plan(args, prepared)
    llm = load(args, job) if exchanges else None
    known = conditions(
        model=args.model,
        dtype=None if llm is None else llm.dtype,
        mesh=None if llm is None else dict(llm.mesh.shape),
        batch=None if llm is None else args.batch,
    )
    made_with = {**prepared.header.made_with, "limit": args.limit, "conditions": known}
    header = dataclasses.replace(prepared.header, made_with=made_with)
    spent: dict[str, Any] = {}
    with SamplesWriter(args.out, header) as writer:
        if llm is None:
            keep(args, prepared, writer)
        else:
            run = Regeneration(args, job.sampling, prepared.maker, llm, writer)
            run.run(exchanges)
            spent = {
                "generated_tokens": run.new_tokens,
                "generate_seconds": run.seconds,
                # Compiling included.
                "tokens_per_second": run.new_tokens / run.seconds if run.seconds else None,
            }
    report = prepared.maker.report
    report.samples = writer.report.samples
    report.tokens = writer.report.tokens
    report.loss_tokens = writer.report.loss_tokens
    if not args.quiet:
        print(report)
    return {
        "out": str(args.out),
        "samples": report.samples,
        "resumed_samples": writer.num_resumed,
        "tokens": report.tokens,
        "loss_tokens": report.loss_tokens,
        "skipped": report.left_out,
        "changed": report.changed,
        "examples": report.examples,
        **spent,
        "seconds": time.perf_counter() - began,
        "conditions": known | {"options": prepared.header.made_with, "limit": args.limit},
    }


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("kimi_jax").setLevel(logging.WARNING if args.quiet else logging.INFO)
    try:
        job = check(args)
    except MeshError as error:
        parser.error(f"--mesh: {error}")
    except ValueError as error:
        parser.error(str(error).removeprefix("SamplingParams: "))
    try:
        prepared = prepare(args, job)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        made = make(args, job, prepared)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"make_training_data.py: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(made), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
