"""Whether the kernels are right on this GPU, and how fast they and a slice of Kimi-K2.5 are.

    bash scripts/gpu_check.sh OUT.json            # sets the path, and a limit of 8 minutes
    python scripts/gpu_check.py --out OUT.json    # the same from an installed checkout
    python scripts/gpu_check.py --interpret       # its own code, on a CPU, in small

Needs one NVIDIA GPU (compute capability 8.0 or later, 24 GB) and JAX with its CUDA plugin. Not
measured yet: no GPU was at hand. In this order:

1. The bandwidth of a large copy on the device, bytes read plus bytes written.
2. Every op with a kernel at every `kimi-*` shape (one of 8 devices' share), on random operands: the
   largest error over the largest value, against its plain form in float32 on the same operands. And
   the time of a call beside two roofs: the bytes it must read over the bandwidth of 1, and the same
   products in dense bfloat16. `kernels_pallas/timing.py` says how calls are timed.
3. A slice of Kimi-K2.5 at the width one of 8 devices holds: 8 of 64 heads, an eighth of each
   expert's, of the dense layer's and of the vocabulary's width, all 384 experts; random INT4
   weights. A plain step and verifications of 2, 3, 4 and 8 rows, greedy choice included, in a loop
   of steps at a fixed place after 512, 8192 and 65 536 tokens, at two depths: their difference is
   the time of a MoE layer. One device: no collective is in it. The rows' tokens are random, so they
   share few experts, as `distinct_experts` says; those of a text share more.

What the time does not suffice for is listed under `not_run`. The JSON file is written anew after
every part. Prints tables, then the JSON in one line. Status 1 if a kernel is wrong or a part
failed, 2 if there is no such GPU.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from make_random_checkpoint import preset_config
from tqdm import tqdm

from kernels_pallas import dispatch, timing
from kernels_pallas.registry import OPS
from kimi_jax.config import ModelConfig
from kimi_jax.model import transformer
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.conditions import conditions

DEVICES = 8
"""Of which the slice is one's share."""

INT4_DEVIATION = math.sqrt((16**2 - 1) / 12)

STEPS = 8
"""Of a program that times the slice."""

SLICE_SECONDS = 170
"""Kept for the slice while ops are timed."""

PART_SECONDS = 20
"""What a part is taken to need before one of its kind has run."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run: the real sizes on a GPU, or small ones interpreted."""

    implementation: dispatch.Implementation
    specs: dict[str, list[str]]
    copy_bytes: int
    dense_bytes: int
    repeats: int
    least_calls: int
    most_variants: int
    slice_config: ModelConfig
    slice_implementation: dispatch.Implementation
    depths: tuple[int, int]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    steps: int


def gpu_plan(device: jax.Device) -> Plan:
    """The real one."""
    memory = (device.memory_stats() or {}).get("bytes_limit", 16 << 30)
    return Plan(
        implementation="triton",
        specs={name: [s for s in op.specs if s.startswith("kimi")] for name, op in OPS.items()},
        copy_bytes=min(2 << 30, memory // 8),
        dense_bytes=memory // 3,
        repeats=7,
        least_calls=timing.LEAST_CALLS,
        most_variants=timing.MOST_VARIANTS,
        slice_config=share_of_kimi(),
        slice_implementation="triton",
        depths=(2, 4),
        contexts=(512, 8192, 65536),
        # A verification of 4 rows is the usual one: it comes first.
        rows=(1, 4, 2, 3, 8),
        steps=STEPS,
    )


def interpreted_plan() -> Plan:
    """Every code path in seconds on a CPU; its times mean nothing."""
    specs = {name: [s for s in op.specs if s.startswith("tiny")][:1] for name, op in OPS.items()}
    sizes = {"qk_rope_head_dim": 16, "moe_intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    return Plan(
        implementation="interpret",
        specs=specs,
        copy_bytes=1 << 20,
        dense_bytes=64 << 20,
        repeats=1,
        least_calls=1,
        most_variants=1,
        slice_config=preset_config("tiny", **sizes),
        # Interpreted kernels take long to compile, and those of the ops are.
        slice_implementation="xla",
        depths=(1, 2),
        contexts=(16,),
        rows=(1, 2),
        steps=2,
    )


def share_of_kimi() -> ModelConfig:
    """A dense and three MoE layers of Kimi-K2.5, as wide as one of 8 devices holds them."""
    whole = preset_config("kimi-k2.5-layer")
    return dataclasses.replace(
        whole,
        # Published: 163 840 ids; the preset's few are for a small file.
        vocab_size=163840 // DEVICES,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=whole.num_attention_heads // DEVICES,
        intermediate_size=whole.intermediate_size // DEVICES,
        moe_intermediate_size=whole.moe_intermediate_size // DEVICES,
    )


class Run:
    """The parts, one after the other, while there is time; and the JSON file of what they gave."""

    def __init__(self, path: Path | None, budget: float, **facts: Any):
        self.path, self.began, self.budget = path, time.perf_counter(), budget
        self.out: dict[str, Any] = {
            "passed": False,
            "copy_gb_per_second": None,
            "ops": [],
            "slice": None,
            "failures": [],
            "not_run": [],
            "part_seconds": {},
            "seconds": 0.0,
            **facts,
        }
        self.longest: dict[str, float] = {}
        self.bar = tqdm(desc="parts", disable=None, leave=False)

    def left(self) -> float:
        """Seconds."""
        return self.budget - (time.perf_counter() - self.began)

    def part(self, kind: str, name: str, function: Callable[[], Any], reserve: float = 0) -> Any:
        """What the function returns; None where it fails, or where time does not suffice."""
        needed = self.longest.get(kind, PART_SECONDS)
        if self.left() - reserve < needed:
            kept = f", {reserve:.0f} s of them kept for what follows" if reserve else ""
            self.skip(name, f"{self.left():.0f} s were left{kept}, and it may take {needed:.0f} s")
            return None
        self.bar.set_postfix_str(name)
        began = time.perf_counter()
        try:
            result = function()
        except Exception as error:  # what one part runs into must not cost the others' results
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0]}"
            self.out["failures"].append({"part": name, "error": text[:500]})
            result = None
        took = time.perf_counter() - began
        self.out["part_seconds"][name] = round(took, 1)
        self.longest[kind] = max(took, self.longest.get(kind, 0.0))
        self.bar.update()
        self.write()
        return result

    def skip(self, name: str, reason: str) -> None:
        """Names a part that is not run."""
        self.out["not_run"].append({"part": name, "reason": reason})

    def write(self) -> None:
        """The file as it stands, replaced as a whole."""
        self.out["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.out, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


def check_ops(run: Run, plan: Plan, seed: int) -> None:
    """Parts 1 and 2: a row of `ops` for every shape."""

    def copy() -> float:
        return timing.copy_bytes_per_second(plan.copy_bytes, plan.repeats)

    bandwidth = run.part("copy", "copy bandwidth", copy)
    if bandwidth:
        run.out["copy_gb_per_second"] = round(bandwidth / 1e9, 3)
    reserve = SLICE_SECONDS if plan.implementation == "triton" else 0.0
    for name, specs in plan.specs.items():
        for spec in specs:
            row: dict[str, Any] = {"op": name, "shape": spec}
            where = f"{name} {spec}"
            operands: list[Any] = []

            def check(name=name, spec=spec, row=row, operands=operands) -> None:
                op = OPS[name]
                operands.append(jax.tree.map(jnp.array, op.specs[spec].operands(seed)))
                run.out["ops"].append(row)
                row.update(check_op(name, spec, operands[0], plan))

            def measure(name=name, spec=spec, row=row, operands=operands) -> None:
                row.update(time_op(name, spec, operands[0], plan, bandwidth))

            run.part("check", f"{where}: check", check)
            if "passed" in row:
                run.part("time", f"{where}: time", measure, reserve)
            else:
                run.skip(f"{where}: time", "it was not checked")


def check_op(name: str, spec: str, operands: Any, plan: Plan) -> dict[str, Any]:
    """The op's error, and whether it is allowed."""
    op = OPS[name]
    found = timing.compare(op, spec, operands, plan.implementation)
    tolerance, reason = op.tolerance(spec)
    return {
        "passed": timing.is_right(op, spec, found),
        "error": float(f"{found.error:.3g}"),
        "tolerance": tolerance,
        "tolerance_reason": reason,
        "is_finite": found.is_finite,
        "integer_mismatches": found.mismatches,
    }


def time_op(
    name: str, spec: str, operands: Any, plan: Plan, bandwidth: float | None
) -> dict[str, Any]:
    """The op's time and its two roofs, in microseconds."""
    op, sizes = OPS[name], OPS[name].specs[spec]
    variants = timing.timed_variants(op, spec, operands, plan.most_variants)
    own = timing.seconds_per_call(
        lambda *a: op.call(spec, a, plan.implementation),
        variants,
        repeats=plan.repeats,
        least_calls=plan.least_calls,
    )
    num_bytes = float(np.mean([op.bytes_read(sizes, v) for v in variants]))
    products = op.products(sizes, variants[0])
    row = {
        "us": micro(own.seconds),
        "spread": round(own.spread, 3),
        "calls": own.calls,
        "mb_read": round(num_bytes / 1e6, 6),
        "gflop": round(sum(p.flops for p in products) / 1e9, 3),
    }
    if bandwidth:
        row["us_copy_roof"] = micro(num_bytes / bandwidth)
        row["of_copy_roof"] = round(num_bytes / bandwidth / own.seconds, 3)
    del variants
    if not products:
        return row | {"us_dense": None, "dense_not_run": "the op has no product"}
    try:
        dense = timing.dense_seconds(
            products,
            repeats=plan.repeats,
            least_calls=plan.least_calls,
            most_variants=plan.most_variants,
            most_bytes=plan.dense_bytes,
        )
    except ValueError as error:
        return row | {"us_dense": None, "dense_not_run": str(error)}
    return row | {
        "us_dense": micro(dense.seconds),
        "over_dense": round(own.seconds / dense.seconds, 3),
    }


def micro(seconds: float) -> float:
    """Microseconds."""
    return round(1e6 * seconds, 2)


def random_slice(cfg: ModelConfig, seed: int) -> tuple[Any, Any]:
    """The model's graph and its random weights, drawn on the device by one program."""

    def make() -> Kimi:
        # Of JAX's generators the one that compiles fastest.
        key = jax.random.key(seed, impl="rbg")
        model = Kimi(cfg, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(key))
        for block in list(model.layers)[cfg.first_k_dense_replace :]:
            experts = block.mlp.experts
            for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
                key, bits, scales = jax.random.split(key, 3)
                shape = linear.packed[...].shape
                linear.packed[...] = jax.random.bits(bits, shape, jnp.uint8)
                usual = 1 / (INT4_DEVIATION * math.sqrt(2 * shape[1]))
                scale = linear.scale[...]
                drawn = jax.random.uniform(scales, scale.shape, scale.dtype, 0.5, 1.5)
                linear.scale[...] = drawn * jnp.asarray(usual, scale.dtype)
        return model

    graph, _ = nnx.split(nnx.eval_shape(make))
    return graph, jax.jit(lambda: nnx.split(make())[1])()


class Slice:
    """The model's weights and cache, and programs of a few steps over its first layers."""

    def __init__(self, plan: Plan, seed: int):
        self.plan, self.cfg = plan, plan.slice_config
        self.graph, self.weights = random_slice(self.cfg, seed)
        self.capacity = -(-(max(plan.contexts) + max(plan.rows)) // 64) * 64
        shape = (self.capacity, self.cfg.latent_width)
        keys = jax.random.split(jax.random.key(seed), self.cfg.num_hidden_layers)
        self.cache = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]

    def steps(self, depth: int, rows: int) -> Callable[..., Any]:
        """A program of steps over `rows` tokens each, through the first `depth` layers."""
        cfg = dataclasses.replace(self.cfg, num_hidden_layers=depth)
        num_moe = depth - cfg.first_k_dense_replace

        def run(cache: LatentCache, weights: Any, context: jax.Array) -> Any:
            places = context + jnp.arange(rows, dtype=jnp.int32)[None]

            def step(i: jax.Array, carry: Any) -> Any:
                cache, tokens, _ = carry
                model = nnx.merge(self.graph, weights)
                model.cfg, model.layers = cfg, nnx.List(list(model.layers)[:depth])
                out = transformer.forward(model, tokens, places, cache)
                chosen = jnp.argmax(transformer.logits(model, out.hidden), axis=-1)
                # Each step needs the last one's choice, but runs over tokens all over the table.
                tokens = (chosen.astype(jnp.int32) + (i + places) * 7919) % cfg.vocab_size
                return out.cache, tokens, jnp.stack([r.expert_ids for r in out.routing])

            tokens = places * 7919 % cfg.vocab_size
            ids = jnp.zeros((num_moe, rows, cfg.num_experts_per_tok), jnp.int32)
            with dispatch.using(self.plan.slice_implementation):
                return jax.lax.fori_loop(0, self.plan.steps, step, (cache, tokens, ids))

        return jax.jit(run, donate_argnums=0)

    def measure(self, depth: int, rows: int) -> list[dict[str, Any]]:
        """The time of a step after each context."""
        program, found = self.steps(depth, rows), []
        for context in self.plan.contexts:
            seconds, distinct = [], []
            for _ in range(timing.WARM_UPS + self.plan.repeats):
                cache = LatentCache(layers=tuple(self.cache[:depth]))
                place = jnp.int32(context)
                began = time.perf_counter()
                cache, _, ids = jax.block_until_ready(program(cache, self.weights, place))
                seconds.append(time.perf_counter() - began)
                self.cache[:depth] = cache.layers
                distinct += [len(np.unique(layer)) for layer in np.asarray(ids)]
            spent = timing.summary(seconds[timing.WARM_UPS :], self.plan.steps)
            found.append(
                {
                    "rows": rows,
                    "context": context,
                    "layers": depth,
                    "ms": round(1e3 * spent.seconds, 4),
                    "spread": round(spent.spread, 3),
                    "distinct_experts": round(float(np.mean(distinct)), 1),
                }
            )
        return found


def measure_slice(run: Run, plan: Plan, seed: int) -> None:
    """Part 3."""
    made = run.part("slice", "slice: random weights", lambda: Slice(plan, seed))
    cfg = plan.slice_config
    run.out["slice"] = {
        "what": f"one of {DEVICES} devices' share, no collectives, greedy choice included",
        "config": cfg.to_dict(),
        "implementation": plan.slice_implementation,
        "steps_a_program": plan.steps,
        "measured": [],
        "rows": [],
    }
    if made is None:
        run.skip("slice: all times", "there are no weights")
        return
    run.out["slice"]["capacity"] = made.capacity
    # The deeper one gives the ratios, the shallower what a layer costs.
    for depth in reversed(plan.depths):
        for rows in plan.rows:
            name = f"slice: {depth} layers, {rows} rows"
            found = run.part("program", name, lambda d=depth, r=rows: made.measure(d, r))
            run.out["slice"]["measured"] += found or []
            run.out["slice"]["rows"] = summarise(run.out["slice"]["measured"], plan)
            run.write()


def summarise(measured: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """A row for each number of rows and context that was measured at the larger depth."""
    ms = {(m["layers"], m["rows"], m["context"]): m["ms"] for m in measured}
    shallow, deep = plan.depths

    def layer_ms(rows: int, context: int) -> float | None:
        ends = ms.get((shallow, rows, context)), ms.get((deep, rows, context))
        return None if None in ends else (ends[1] - ends[0]) / (deep - shallow)

    out = []
    for m in sorted(measured, key=lambda m: (m["context"], m["rows"])):
        if m["layers"] != deep:
            continue
        place = m["rows"], m["context"]
        layer, step_layer = layer_ms(*place), layer_ms(1, m["context"])
        step = ms.get((deep, 1, m["context"]))
        row = {k: m[k] for k in ("context", "rows", "distinct_experts", "ms", "spread")}
        row["over_step"] = None if not step else round(m["ms"] / step, 3)
        row["ms_moe_layer"] = None if layer is None else round(layer, 4)
        row["layer_over_step"] = round(layer / step_layer, 3) if layer and step_layer else None
        out.append(row)
    return out


def show(rows: list[dict[str, Any]], names: list[str]) -> None:
    """A table of these columns."""
    cells = [[("-" if row.get(n) is None else str(row[n])) for n in names] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(names, *cells, strict=True)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print()


def show_all(out: dict[str, Any]) -> None:
    """Everything that was measured, and what was not."""
    print(f"copy: {out['copy_gb_per_second']} GB/s read and written\n")
    if out["ops"]:
        names = "op shape passed error tolerance us us_copy_roof of_copy_roof us_dense over_dense"
        show(out["ops"], names.split())
    if out["slice"] and out["slice"]["rows"]:
        show(out["slice"]["rows"], list(out["slice"]["rows"][0]))
    for failure in out["failures"]:
        print(f"failed: {failure['part']}: {failure['error']}")
    for part in out["not_run"]:
        print(f"not run: {part['part']}: {part['reason']}")


def main() -> None:
    """Runs everything; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="JSON file (default: only the last line)")
    add("--budget", type=float, default=430, help="seconds for all parts (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--interpret", action="store_true", help="small shapes, interpreted on any device")
    args = parser.parse_args()
    if args.budget < 0 or args.seed < 0:
        parser.error("--budget and --seed cannot be negative")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out}: no such folder")
    if args.out is not None and args.out.is_dir():
        parser.error(f"--out {args.out} is a folder; expected a file")
    try:
        plan = interpreted_plan() if args.interpret else gpu_plan(timing.find_gpu())
    except timing.NoGpu as error:
        parser.exit(2, f"gpu_check.py: {error}\n")
    facts = conditions(
        implementation=plan.implementation, seed=args.seed, budget_seconds=args.budget
    )
    run = Run(args.out, args.budget, conditions=facts)
    run.write()
    check_ops(run, plan, args.seed)
    measure_slice(run, plan, args.seed)
    out = run.out
    checks = [row.get("passed", False) for row in out["ops"]]
    out["passed"] = bool(checks) and all(checks) and not out["failures"]
    # Those of the start are an idle GPU's.
    out["clocks_at_end"] = conditions()["clocks"]
    run.bar.close()
    run.write()
    show_all(out)
    print(json.dumps(out))
    sys.exit(0 if out["passed"] else 1)


if __name__ == "__main__":
    main()
