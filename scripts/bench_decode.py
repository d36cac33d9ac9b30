"""What a verification and a whole speculative cycle cost beside a plain step, and what they give.

    python scripts/bench_decode.py                                a few minutes on two cores
    python scripts/bench_decode.py --model FOLDER --drafter FOLDER --mesh tensor=8 \\
        --draft-tokens 0,1,2,3,5,7 --context 64,512,2048 --prompts FILE

For every number of draft tokens K and context length, in one run, all forms taking turns, medians
over the repeats:

    ms_step      a plain step
    ms_verify    the target's forward over K + 1 rows with its hidden states captured, the choice of
                 K + 1 tokens and their acceptance. It is given the text's own next tokens, so that
                 its rows choose experts as those of a good drafter would
    ms_cycle     the whole cycle, the drafter's part included
    ms_draft     ms_cycle - ms_verify: drafting, and catching up on the target's true states; with a
                 random drafter also what its drafts' rows cost more than the text's

Each is a block of cycles in one call of one program, so a call's own cost is spread over them.
`tokens_per_cycle` is counted over blocks of greedy decoding from the same places, `break_even` is
ms_cycle / ms_step: the tokens a cycle must give to be as fast as plain decoding.

With several K, 0 among them, `replies` gives for every --temperature the speed of whole replies
with the K chosen between blocks, and over that of replies without speculation (`auto_over_plain`),
the two taking turns.

The text is --prompts (a text file, or .jsonl with "prompt" or "text" in every row), or Python's
own functools.py, which neither the demo nor its drafter was trained on. The demo has a drafter of
its own; for other models without --drafter a random one of the published layout is made: of use for
costs, not for gains. Prints a table, then one JSON line.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from make_random_drafter import tiny_drafter_config, write_random_drafter
from tqdm import tqdm

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.axes import replace
from kimi_jax.config import ModelConfig
from kimi_jax.model import transformer
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.decode import MAX_BLOCK_TOKENS, MAX_DRAFT_DEPTH, DecodeState, append
from kimi_jax.runtime.engine import Request, first_at_least
from kimi_jax.runtime.flags import set_gpu_environment, set_gpu_flags, simulate_mesh
from kimi_jax.runtime.mesh import CACHES, parse_mesh
from kimi_jax.runtime.replies import Speculation
from spec import DEMO_DRAFTER
from spec.controller import AdaptiveLength
from spec.drafter import BoundEagle3, Eagle3Drafter
from spec.economics import break_even, speedup, tokens_per_second
from spec.tree import Chain, Drafts
from spec.verify import accept_equal

REPLY_TOKENS = 700
"""Length of the replies that are timed whole."""

COUNTED_BLOCKS = 3
"""Blocks over which tokens a cycle are counted."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The part of a cycle that is measured alone (`engine.Proposal`)."""

    num_draft_tokens: int

    @property
    def depth(self) -> int:
        """As in the cycle, so that blocks hold as many."""
        return self.num_draft_tokens

    @property
    def num_slots(self) -> int:
        """As in the cycle."""
        return self.num_draft_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(BoundEagle3):
    """The drafter's cycles, and the part of each that is measured alone."""

    @property
    def lengths(self):
        """Every K."""
        return [shape.num_draft_tokens for shape in self.shapes]

    @property
    def proposals(self):
        """Every cycle and its verification."""
        parts = tuple(Verification(shape.num_draft_tokens) for shape in self.shapes)
        return (*super().proposals, *parts)

    def make_step(self, graph, rules, proposal):
        """The cycle or the verification."""
        if not isinstance(proposal, Verification):
            return super().make_step(graph, rules, proposal)
        K = proposal.num_draft_tokens

        def verify(weights: Any, state: DecodeState) -> DecodeState:
            target = nnx.merge(graph, weights[0])
            newest = state.lengths[:, None] - 1
            rows = newest + jnp.arange(K + 1, dtype=jnp.int32)
            # The text goes on in the buffer beyond the row's length.
            tokens = jnp.take_along_axis(state.tokens, rows, axis=1)
            out = transformer.forward(
                target,
                tokens,
                rows,
                state.cache,
                is_real=jnp.broadcast_to(state.live[:, None], tokens.shape),
                taps=self.taps,
                rules=rules,
            )
            parents = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), tokens[:, 1:].shape)
            logits_f32 = transformer.logits(target, out.hidden)
            drafts = Drafts(tokens[:, 1:], parents, mask=None)
            accepted = accept_equal(logits_f32, drafts, Chain(K), state, rules)
            # The taps end in the state, as the drafter's features would.
            carried = state.drafter.carried
            seen = sum(jnp.sum(tap.astype(jnp.float32), axis=(1, 2)) for tap in out.taps)
            own = replace(state.drafter, carried=carried + seen[:, None].astype(carried.dtype))
            state = replace(state, cache=out.cache, drafter=own)
            return append(state, accepted.chosen, accepted.counts)

        return verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredDrafter(Eagle3Drafter):
    """A drafter of several lengths that binds as `Measured`."""

    lengths: tuple[int, ...]

    @property
    def shapes(self):
        """A chain of each length."""
        return tuple(map(Chain, self.lengths))

    def bind(self, cfg, mesh, dtype):
        """The same drafter with the parts to measure."""
        bound = super().bind(cfg, mesh, dtype)
        return Measured(**{f.name: getattr(bound, f.name) for f in dataclasses.fields(bound)})


class Place:
    """A batch of rows in the middle of a text, from where every form starts."""

    def __init__(self, llm: LLM, text: list[int], context: int, batch: int):
        self.engine, self.batch = llm.engine, batch
        size = context + MAX_BLOCK_TOKENS
        # The least capacity that holds a block, as a request that ends with it would get.
        self.capacity = first_at_least(llm.engine.capacities, size + llm.engine.slack)
        starts = np.random.default_rng(context).integers(0, len(text) - size + 1, batch)
        params = SamplingParams(max_new_tokens=None, ignore_eos=True)
        requests = [Request(tuple(text[s : s + size]), params, ()) for s in starts]
        state = self.engine.new_state(requests, capacity=self.capacity)
        lengths = jnp.where(state.live, context, 1).astype(jnp.int32)
        state = replace(state, lengths=lengths, prompt_lengths=lengths + 0)
        self.state = self.engine.prefill(state, context - 1)
        self.nobody = np.zeros(state.lengths.shape, np.bool_)

    def seconds(
        self,
        form: Any,
        cycles: int,
        *,
        during: contextlib.AbstractContextManager = contextlib.nullcontext(),  # noqa: B008
    ) -> float:
        """Of a cycle of this form, in a block of so many; `during` lasts as long as the block."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self.state))
        began = time.perf_counter()
        with during:
            _, block = self.engine.decode(state, cycles, self.nobody, form)
            done = int(jax.device_get(block.cycles).max())
        return (time.perf_counter() - began) / done

    def tokens_per_cycle(self, form: Any) -> float:
        """Mean over the rows and some blocks."""
        state = jax.tree.map(jnp.copy, self.state)
        tokens = cycles = 0
        for _ in range(COUNTED_BLOCKS):
            room = self.capacity - int(state.lengths.max()) - MAX_BLOCK_TOKENS
            if room < 0 and cycles:
                break
            before = int(state.cycles.sum())
            state, block = self.engine.decode(state, MAX_BLOCK_TOKENS, self.nobody, form)
            tokens += int(block.counts.sum())
            cycles += int(block.cycles.sum()) - before
        return tokens / cycles


def measure(
    llm: LLM, text: list[int], context: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one context."""
    place = Place(llm, text, context, args.batch)
    forms = [None]
    for K in args.draft_tokens:
        forms += [Chain(K), Verification(K)]
    seconds: dict[Any, list[float]] = {form: [] for form in forms}
    # The first turn compiles, and does not count.
    for turn in tqdm(range(args.repeats + 1), f"context {context}", disable=None, leave=False):
        for form in forms:
            deepest = 1 if form is None else form.depth + 1
            each = place.seconds(form, min(args.cycles, MAX_BLOCK_TOKENS // deepest))
            if turn:
                seconds[form].append(each)
    medians = {form: statistics.median(times) for form, times in seconds.items()}

    def over_step(form: Any) -> float:
        turns = zip(seconds[form], seconds[None], strict=True)
        return round(statistics.median(a / b for a, b in turns), 3)

    rows = []
    for K in args.draft_tokens:
        step, verify, cycle = (medians[form] for form in (None, Verification(K), Chain(K)))
        gained = place.tokens_per_cycle(Chain(K))
        rows.append(
            {
                "draft_tokens": K,
                "context": context,
                "ms_step": round(1e3 * step, 4),
                "ms_verify": round(1e3 * verify, 4),
                "ms_draft": round(1e3 * (cycle - verify), 4),
                "ms_cycle": round(1e3 * cycle, 4),
                "tokens_per_cycle": round(gained, 3),
                "tokens_per_second": round(tokens_per_second(gained, cycle), 2),
                "speedup": round(speedup(gained, cycle, step), 3),
                "break_even": round(break_even(cycle, step), 3),
                "verify_over_step": over_step(Verification(K)),
                "cycle_over_step": over_step(Chain(K)),
            }
        )
    return rows


class PlainDecoding:
    """A controller that never drafts (`engine.Controller`)."""

    current = None

    def choose(self, lengths):
        """Plain blocks."""
        return None, MAX_BLOCK_TOKENS

    def observe(self, report):
        """Nothing to learn."""

    def calibrate(self, seconds):
        """Nothing to choose from."""


def whole_replies(
    llm: LLM, text: list[int], temperatures: list[float], num_prompts: int, repeats: int
) -> list[dict[str, Any]]:
    """Replies whose K is chosen as they go beside plain ones, from several places of the text.

    A row for each temperature; none where there is no choice. Speed is all tokens over all decode
    seconds of a turn's replies, the ratio the median over the turns.
    """
    drafter = llm.engine.drafter
    if len(drafter.shapes) < 2 or Chain(0) not in drafter.shapes:
        return []
    context = 64
    new_tokens = min(REPLY_TOKENS, llm.max_length - context)
    starts = np.linspace(0, len(text) - context, num_prompts).astype(int)
    prompts = [text[start : start + context] for start in starts]
    rows = []
    for temperature in temperatures:
        params = SamplingParams(
            max_new_tokens=new_tokens, ignore_eos=True, temperature=temperature, seed=0
        )
        controllers = {"plain": PlainDecoding(), "auto": AdaptiveLength(drafter.lengths, 1 << 30)}
        rates: dict[str, list[float]] = {name: [] for name in controllers}
        told: list[Speculation] = []
        # The first turns compile, and teach the controller.
        label = f"whole replies, temperature {temperature:g}"
        for turn in tqdm(range(repeats + 2), label, disable=None, leave=False):
            for name, controller in controllers.items():
                drafter.controllers[1] = controller
                results = [llm.generate([prompt], params)[0] for prompt in prompts]
                if turn > 1:
                    tokens = sum(len(r.token_ids) for r in results)
                    rates[name].append(tokens / sum(r.timings.decode_seconds for r in results))
                    told += [r.speculation for r in results] if name == "auto" else []
        turns = zip(rates["auto"], rates["plain"], strict=True)
        rows.append(
            {
                "temperature": temperature,
                "auto_over_plain": round(statistics.median(a / b for a, b in turns), 3),
                "plain_tokens_per_second": round(statistics.median(rates["plain"]), 2),
                "auto_tokens_per_second": round(statistics.median(rates["auto"]), 2),
                "auto_tokens_per_cycle": round(Speculation.total(told).tokens_per_cycle, 3),
                "settled_on": controllers["auto"].current.num_draft_tokens,
                "new_tokens": new_tokens,
                "prompts": num_prompts,
            }
        )
    return rows


def read_prompts(path: Path | None) -> str:
    """The text of a prompts file, or of a module everybody has.

    Raises:
        ValueError: not such a file.
    """
    if path is None:
        return inspect.getsource(functools)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return text
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return "\n\n".join(row["prompt"] if "prompt" in row else row["text"] for row in rows)
    except OSError as error:
        raise ValueError(f"--prompts {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'--prompts {path}: expected UTF-8 text, or rows with "prompt" or "text" ({error!r})'
        ) from None


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="a checkpoint folder, a hub id, or demo (default)")
    add("--drafter", help="a published drafter, or random; default: the demo's own, else random")
    add("--kind", choices=("llama", "mla"), default="llama", help="of the random drafter")
    add("--draft-tokens", default="0,1,3", help="comma-separated (default: %(default)s)")
    add("--context", default="64,512,2048", help="comma-separated (default: %(default)s)")
    add("--prompts", type=Path, metavar="FILE", help="the text (default: functools.py)")
    add("--batch", type=int, default=1)
    add("--cycles", type=int, default=12, help="most cycles a block (default: %(default)s)")
    add("--repeats", type=int, default=9)
    add("--temperature", default="0", help="of whole replies, comma-separated (default: 0)")
    add("--replies", type=int, default=1, help="places whole replies begin at (default: 1)")
    add("--mesh", help="devices to cut the model over: tensor=8 or expert=4,tensor=2")
    add("--cache", choices=CACHES, default="replicated", help="where the latent cache lies")
    add("--dtype", choices=("float32", "bfloat16"))
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, checked; lists as ascending numbers."""
    args = parser.parse_args()
    for name, least, most in (("draft_tokens", 0, MAX_DRAFT_DEPTH), ("context", 2, 1 << 20)):
        option, text = f"--{name.replace('_', '-')}", getattr(args, name)
        words = [word.strip() for word in text.split(",")]
        if not all(word.isdecimal() and least <= int(word) <= most for word in words):
            parser.error(f"{option} is {text!r}, expected numbers from {least} to {most}")
        setattr(args, name, sorted({int(word) for word in words}))
    if min(args.cycles, args.repeats, args.batch, args.replies) < 1:
        parser.error("--cycles, --repeats, --replies and --batch must be at least 1")
    try:
        args.temperature = [float(word) for word in args.temperature.split(",")]
    except ValueError:
        parser.error(f"--temperature is {args.temperature!r}, expected numbers such as 0,0.8")
    try:
        for temperature in args.temperature:
            SamplingParams(temperature=temperature)
        args.mesh = None if args.mesh is None else parse_mesh(args.mesh)
        args.text = read_prompts(args.prompts)
    except ValueError as error:
        parser.error(str(error))
    return args


def random_drafter(folder: Path, kind: str, target: ModelConfig) -> Path:
    """A drafter that guesses, of a size in proportion to the target."""
    cfg = tiny_drafter_config(
        kind,
        target,
        intermediate_size=2 * target.hidden_size,
        draft_vocab_size=target.vocab_size // (4 if kind == "llama" else 1),
    )
    write_random_drafter(folder, cfg, dtype="bfloat16")
    return folder


def main() -> None:
    """Runs everything; see the module's docstring."""
    parser = make_parser()
    args = read_options(parser)
    simulate_mesh(args.mesh)
    set_gpu_flags()
    set_gpu_environment()
    model = DEMO if args.model == "demo" else args.model
    with tempfile.TemporaryDirectory() as scratch:
        try:
            target = ModelConfig.from_folder(model) if Path(model).is_dir() else None
            drafter = args.drafter
            if drafter == "demo" or (drafter is None and args.model == "demo"):
                drafter = args.drafter = str(DEMO_DRAFTER)
            elif drafter in (None, "random"):
                args.drafter = None
                if target is None:
                    raise ValueError("a random drafter needs a model folder; give --drafter")
                drafter = random_drafter(Path(scratch) / "drafter", args.kind, target)
            llm = LLM(
                model,
                drafter=MeasuredDrafter(path_or_id=drafter, lengths=tuple(args.draft_tokens)),
                mesh=args.mesh,
                cache=args.cache,
                dtype=args.dtype,
                max_length=_max_length(args.context, target),
                max_batch=args.batch,
                progress=sys.stderr.isatty(),
            )
            most = llm.max_length - MAX_BLOCK_TOKENS
            contexts = sorted({min(context, most) for context in args.context})
            if contexts != args.context:
                print(
                    f"a block of {MAX_BLOCK_TOKENS} tokens must fit into {llm.max_length}: "
                    f"contexts {contexts}",
                    file=sys.stderr,
                )
            text = llm.tokenizer.encode(args.text)
            if len(text) < contexts[-1] + MAX_BLOCK_TOKENS:
                raise ValueError(
                    f"the text has {len(text)} tokens, a context of {contexts[-1]} and a block "
                    f"need {contexts[-1] + MAX_BLOCK_TOKENS}"
                )
            rows = [row for context in contexts for row in measure(llm, text, context, args)]
            replies = whole_replies(llm, text, args.temperature, args.replies, args.repeats)
        except (ValueError, OSError) as error:
            parser.exit(1, f"bench_decode.py: error: {error}\n")
    show(rows)
    if replies:
        show(replies)
    facts = conditions(
        model=str(args.model),
        drafter=str(args.drafter or f"random {args.kind}"),
        drafter_config=llm.engine.drafter.cfg.to_dict(),
        batch=args.batch,
        cycles=args.cycles,
        repeats=args.repeats,
        dtype=llm.dtype,
        mesh=dict(llm.mesh.shape),
        cache=args.cache,
        config=llm.cfg.to_dict(),
        text=str(args.prompts or "functools.py of this interpreter"),
        text_sha256=hashlib.sha256(args.text.encode()).hexdigest()[:16],
    )
    out = {"rows": rows, "verify_over_step_spread": spread(rows), "replies": replies}
    print(json.dumps(out | {"conditions": facts}))


def _max_length(contexts: list[int], target: ModelConfig | None) -> int:
    """Room for the longest context and its block, as far as the model goes."""
    wanted = contexts[-1] + MAX_BLOCK_TOKENS
    return wanted if target is None else min(wanted, target.max_position_embeddings)


def spread(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For each K, how far verification over step at its dearest context is over its cheapest."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(str(row["draft_tokens"]), []).append(row["verify_over_step"])
    return {K: round(max(each) / min(each) - 1, 3) for K, each in ratios.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    names = list(rows[0])
    widths = [max(len(name), 8) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for row in rows:
        cells = zip(row.values(), widths, strict=True)
        print("  ".join(str(value).rjust(width) for value, width in cells))


if __name__ == "__main__":
    main()
