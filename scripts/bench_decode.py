"""What a verification and a whole speculative cycle cost beside a plain step, by context length.

    python scripts/bench_decode.py                                about a minute on two cores
    python scripts/bench_decode.py --model FOLDER --drafter FOLDER --mesh tensor=8

What it measures, medians over the repeats, all forms taking turns in one run: a plain step; a
verification, which is the target's forward over K+1 rows with its hidden states captured, the
choice of K+1 tokens and their acceptance; and the whole cycle with drafting and the drafter's
catching up. Each is a block of cycles in one program, on Python source; a verification is given the
text's own next tokens, so that its rows choose experts as a good drafter's would.

Without --drafter a random one of the published layout is made: of use for costs, not for gains.
Prints a table, then one JSON line with break-even (tokens per cycle at which the cycle pays).
"""

import argparse
import dataclasses
import inspect
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from kimi_jax.runtime.decode import (
    MAX_BLOCK_TOKENS,
    DecodeState,
    append,
    autoregressive_step,
)
from kimi_jax.runtime.engine import first_at_least
from kimi_jax.runtime.flags import set_host_device_count
from kimi_jax.runtime.mesh import parse_mesh
from spec import Eagle3Drafter
from spec.drafter import BoundEagle3
from spec.economics import break_even
from spec.verify import accept_equal

FORMS = ("step", "verify", "cycle")


def keys_of(num_drafts: int) -> dict[str, int]:
    """Under which number of drafts the engine finds each form's program."""
    # A block's cycles are limited by the key, so the verification's is no smaller than K.
    return {"step": 0, "verify": num_drafts + 1, "cycle": num_drafts}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(BoundEagle3):
    """The drafter's cycle, and the two parts of it that are measured alone."""

    num_drafts: int

    def make_step(self, graph, rules, num_draft_tokens):
        """The cycle, the plain step or the verification."""
        keys = keys_of(self.num_drafts)
        if num_draft_tokens == keys["cycle"]:
            return super().make_step(graph, rules, num_draft_tokens)
        plain = autoregressive_step(graph, rules)
        if num_draft_tokens == keys["step"]:
            return lambda weights, state: plain(weights[0], state)

        def verify(weights: Any, state: DecodeState) -> DecodeState:
            target = nnx.merge(graph, weights[0])
            newest = state.lengths[:, None] - 1
            first = jnp.take_along_axis(state.tokens, newest, axis=1)
            place = jnp.arange(1, self.num_drafts + 1, dtype=jnp.int32)
            # The text goes on in the buffer beyond the row's length.
            drafts = jnp.take_along_axis(state.tokens, newest + place, axis=1)
            tokens = jnp.concatenate([first, drafts], axis=1)
            out = transformer.forward(
                target,
                tokens,
                newest + jnp.arange(self.num_drafts + 1, dtype=jnp.int32),
                state.cache,
                is_real=jnp.broadcast_to(state.live[:, None], tokens.shape),
                taps=self.taps,
                rules=rules,
            )
            chosen, counts = accept_equal(
                transformer.logits(target, out.hidden), drafts, state, rules
            )
            # The taps end in the state, as the drafter's features would.
            carried = state.drafter.carried
            seen = sum(jnp.sum(tap.astype(jnp.float32), axis=(1, 2)) for tap in out.taps)
            own = replace(state.drafter, carried=carried + seen[:, None].astype(carried.dtype))
            return append(replace(state, cache=out.cache, drafter=own), chosen, counts)

        return verify


@dataclasses.dataclass(frozen=True)
class MeasuredDrafter(Eagle3Drafter):
    """`Eagle3Drafter` that binds as `Measured`."""

    def bind(self, cfg, mesh, dtype):
        """The same drafter with the parts to measure."""
        bound = super().bind(cfg, mesh, dtype)
        fields = {f.name: getattr(bound, f.name) for f in dataclasses.fields(bound)}
        return Measured(**fields, num_drafts=max(bound.asked))


def blocks(
    llm: LLM, context: int, capacity: int, batch: int, cycles: int, key: int
) -> Callable[[], float]:
    """A function that runs one block at this context and gives its seconds a cycle."""
    text = llm.tokenizer.encode(inspect.getsource(argparse))
    size = context + MAX_BLOCK_TOKENS
    starts = np.random.default_rng(context).integers(0, len(text) - size, batch)
    prompts = [text[start : start + size] for start in starts]
    params = SamplingParams(max_new_tokens=None, ignore_eos=True)
    engine = llm.engine

    def run() -> float:
        state = engine.new_state(llm._requests(prompts, params), capacity=capacity)
        lengths = jnp.full_like(state.lengths, context)
        state = replace(state, lengths=lengths, prompt_lengths=lengths + 0)
        state = engine.prefill(state, context - 1)
        jax.block_until_ready(state.cache)
        began = time.perf_counter()
        state, block = engine.decode(state, cycles, np.zeros((batch,), np.bool_), key)
        done = int(jax.device_get(block.cycles).max())
        return (time.perf_counter() - began) / done

    run()
    return run


def measure(llm: LLM, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    keys = keys_of(args.num_draft_tokens)
    # The least capacity that holds a block, as a request that ends with it would get.
    slack = MAX_BLOCK_TOKENS + max(llm.engine.num_draft_tokens)
    capacity = first_at_least(llm.engine.capacities, context + slack)
    runs = {
        form: blocks(llm, context, capacity, args.batch, args.cycles, key)
        for form, key in keys.items()
    }
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in tqdm(range(args.repeats), desc=f"context {context}", disable=None, leave=False):
        for form, run in runs.items():
            seconds[form].append(run())
    medians = {form: statistics.median(times) for form, times in seconds.items()}
    ratios = {
        form: [a / b for a, b in zip(seconds[form], seconds["step"], strict=True)]
        for form in ("verify", "cycle")
    }
    return {
        "context": context,
        "capacity": capacity,
        **{f"{form}_ms": round(1e3 * medians[form], 4) for form in FORMS},
        "draft_and_extend_ms": round(1e3 * (medians["cycle"] - medians["verify"]), 4),
        "verify_over_step": round(statistics.median(ratios["verify"]), 3),
        "cycle_over_step": round(statistics.median(ratios["cycle"]), 3),
        "break_even_tokens_per_cycle": round(break_even(medians["cycle"], medians["step"]), 3),
    }


def main() -> None:
    """Runs everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="demo", help="a checkpoint folder, a hub id, or demo (default)")
    add("--drafter", help="a published drafter (default: a random one)")
    add("--kind", choices=("llama", "mla"), default="llama", help="of the random drafter")
    add("--num-draft-tokens", type=int, default=3)
    add("--contexts", default="64,256,1024,1900", help="comma-separated (default: %(default)s)")
    add("--batch", type=int, default=1)
    add("--cycles", type=int, default=12, help="cycles a block (default: %(default)s)")
    add("--repeats", type=int, default=9)
    add("--mesh", help="devices to cut the model over: tensor=8 or expert=4,tensor=2")
    add("--dtype", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    if not 1 <= args.num_draft_tokens <= 7:
        parser.error(f"--num-draft-tokens is {args.num_draft_tokens}, expected 1 to 7")
    most = MAX_BLOCK_TOKENS // (args.num_draft_tokens + 2)
    if args.cycles > most:
        parser.error(f"--cycles is {args.cycles}, a block of this K holds at most {most}")
    if min(args.cycles, args.repeats, args.batch) < 1:
        parser.error("--cycles, --repeats and --batch must be at least 1")
    try:
        contexts = sorted({int(word) for word in args.contexts.split(",")})
        mesh = None if args.mesh is None else parse_mesh(args.mesh)
    except ValueError as error:
        parser.error(str(error))
    if contexts[0] < 2:
        parser.error(f"--contexts {args.contexts}: at least 2 tokens")
    if mesh is not None:
        set_host_device_count(math.prod(mesh.values()))
    model = DEMO if args.model == "demo" else args.model
    with tempfile.TemporaryDirectory() as scratch:
        drafter_folder = args.drafter
        if drafter_folder is None:
            drafter_folder = Path(scratch) / "drafter"
            target = ModelConfig.from_folder(model)
            own = tiny_drafter_config(
                args.kind,
                target,
                intermediate_size=2 * target.hidden_size,
                draft_vocab_size=target.vocab_size // (4 if args.kind == "llama" else 1),
            )
            write_random_drafter(drafter_folder, own, dtype="bfloat16")
        try:
            llm = LLM(
                model,
                drafter=MeasuredDrafter(drafter_folder, num_draft_tokens=args.num_draft_tokens),
                mesh=mesh,
                dtype=args.dtype,
                max_length=contexts[-1] + MAX_BLOCK_TOKENS + 1,
                max_batch=args.batch,
                progress=sys.stderr.isatty(),
            )
            rows = [measure(llm, context, args) for context in contexts]
        except (ValueError, OSError) as error:
            parser.exit(1, f"bench_decode.py: error: {error}\n")
    names = list(rows[0])
    widths = [max(len(name), 8) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for row in rows:
        cells = zip(row.values(), widths, strict=True)
        print("  ".join(str(value).rjust(width) for value, width in cells))
    ratios = [row["verify_over_step"] for row in rows]
    facts = conditions(
        model=str(args.model),
        drafter=str(args.drafter or f"random {args.kind}"),
        drafter_config=llm.engine.drafter.cfg.to_dict(),
        num_draft_tokens=args.num_draft_tokens,
        batch=args.batch,
        cycles=args.cycles,
        repeats=args.repeats,
        dtype=llm.dtype,
        mesh=dict(llm.mesh.shape),
        config=llm.cfg.to_dict(),
        text="argparse.py of this interpreter",
    )
    spread = round(max(ratios) / min(ratios) - 1, 3)
    print(json.dumps({"rows": rows, "verify_over_step_spread": spread, "conditions": facts}))


if __name__ == "__main__":
    main()
