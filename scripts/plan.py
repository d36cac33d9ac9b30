"""Predicts how fast a machine decodes, what drafting is worth there, and whether the model fits.

    python scripts/plan.py --hardware rtx-pro-6000 --devices 8 --interconnect pcie-switch \\
        --context 8192 --acceptance 0.7,0.55,0.45
    python scripts/plan.py --hardware h200 --launches compile_check.txt --plot plan.png
    python scripts/plan.py --interconnect measured.json --routing trace.json
    python scripts/plan.py --engine-launches 30           # another engine: kernels a layer

Everything printed is a prediction. Bytes come from the model's own shapes and their placement over
`tensor=DEVICES`: all weights but the routed experts once a forward, of those the distinct ones of
its rows, and the cache. Launches come from the output of `scripts/compile_check.py` (--launches),
else from what it found for Kimi-K2.5; they are cut into those of a plain step and those of a draft
token. Collectives take what the table of the interconnect says, or `scripts/probe_collectives.py`
measured. `spec/economics.py` has the formulas, `spec/machines.py` the figures with their sources;
what is assumed is listed under the tables. Arithmetic, sampling with options, prefill and waiting
for the host are not in it.

--acceptance is the probability of each draft token given that those before it stood; with
--cumulative it is the share of cycles that keep it (`accepted_by_depth` over `cycles` of a run).
Deeper drafts than given are taken to stand as often as the least likely of those given.

--routing is a JSON line `{"expert_ids": [layers][consecutive tokens][experts of a token]}`, such as
`Forward.routing` of `kimi_jax/model/transformer.py` gives; without it rows choose independently,
which is an upper bound of what they read.

Takes 5 s on one core. Prints tables, then one JSON line; the status is 2 where an option is wrong.
"""

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Sets JAX to the CPU, before it is imported: a plan takes no GPU.
from compile_check import MOST_ROWS, model_config

# isort: split
from compare_runs import read_run
from jax.sharding import AbstractMesh

from kernels_pallas.compile_only import HARDWARE
from kimi_jax.config import ModelConfig
from kimi_jax.published import K25_EAGLE3
from kimi_jax.runtime.conditions import conditions
from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH
from kimi_jax.runtime.flags import MOST_SIMULATED_DEVICES
from kimi_jax.runtime.mesh import CACHES, MESH_AXES, check_cache, check_sizes
from spec import economics, machines
from spec.drafter import check_mesh
from spec.eagle3.config import DrafterConfig
from spec.launches import default_counts, engine_counts, read_counts
from spec.machines import INTERCONNECTS, Interconnect
from spec.planner import DTYPE, Plan, best_draft_tokens, largest_terms, plan_memory, plan_rows
from spec.traffic import drafter_bytes, target_bytes
from spec.training.drafters import new_config

DEFAULT_ACCEPTANCE = "0.7,0.55,0.45"


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hardware", choices=HARDWARE, default="rtx-pro-6000", help="the GPU (%(default)s)")
    add("--devices", type=int, default=8, help="GPUs the model is cut over (8)")
    add(
        "--interconnect",
        help=f"{', '.join(INTERCONNECTS)}, or a file of probe_collectives.py (nvlink where the GPU "
        "has it, else pcie-switch)",
    )
    add("--context", type=int, default=8192, help="tokens in the cache (8192)")
    add("--cache", choices=CACHES, default="replicated", help="where the latent cache lies")
    add("--acceptance", default=DEFAULT_ACCEPTANCE, help="of draft tokens by depth (%(default)s)")
    add(
        "--cumulative", action="store_true", help="--acceptance is the share of cycles that keep it"
    )
    add("--config", default="kimi-k2.5", help="kimi-k2.5 (default), tiny, or a model's folder")
    add("--batch", type=int, default=1, help="streams that decode together (1)")
    launches = parser.add_mutually_exclusive_group()
    launches.add_argument(
        "--launches", type=Path, metavar="FILE", help="output of compile_check.py"
    )
    launches.add_argument(
        "--engine-launches", type=int, metavar="N", help="another engine's kernels a layer"
    )
    add("--routing", type=Path, metavar="FILE", help="the experts a text's tokens chose")
    add(
        "--draft-tokens-max",
        type=int,
        default=MAX_DRAFT_DEPTH,
        metavar="K",
        help="longest draft (%(default)s)",
    )
    add("--plot", type=Path, metavar="PNG", help="tokens/s and break-even against K")
    return parser


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan a command line asks for.

    Raises:
        ValueError: an option out of range, a mesh that does not divide the model, or a file of
            another kind.
    """
    _check_plot(args.plot)
    _check_range("--devices", args.devices, 1, MOST_SIMULATED_DEVICES)
    _check_range("--batch", args.batch, 1, MOST_ROWS)
    _check_range("--draft-tokens-max", args.draft_tokens_max, 0, MAX_DRAFT_DEPTH)
    if args.engine_launches is not None:
        _check_range("--engine-launches", args.engine_launches, 1, 1000)
    cfg = model_config(args.config)
    _check_range("--context", args.context, 1, cfg.max_position_embeddings)
    mesh = AbstractMesh((1, args.devices), MESH_AXES)
    check_sizes(cfg, mesh)
    check_cache(args.cache, mesh)
    layers, most = cfg.num_hidden_layers, args.draft_tokens_max
    if args.config == "kimi-k2.5":
        drafter = DrafterConfig.from_dict(K25_EAGLE3, num_target_layers=layers)
    else:
        drafter = new_config(cfg, "llama")
    check_mesh(drafter, mesh)
    interconnect = _interconnect(args)
    rates, deeper = _rates(args.acceptance, most, is_cumulative=args.cumulative)
    if args.launches is not None:
        counts = read_counts(
            read_run(args.launches),
            args.launches.name,
            cfg,
            args.devices,
            args.batch,
            args.cache,
        )
    elif args.engine_launches is not None:
        counts = engine_counts(args.engine_launches, layers)
    else:
        counts = default_counts(layers, args.cache)
    E, A = cfg.n_routed_experts, cfg.num_experts_per_tok
    if args.routing is None:
        distinct = [economics.distinct_experts(n + 1, E, A) for n in range(most + 1)]
        routed = "rows choose experts independently, an upper bound of what they read"
    else:
        trace = read_routing(args.routing, cfg)
        distinct = [economics.distinct_in_trace(trace, n + 1) for n in range(most + 1)]
        routed = f"rows choose experts as in {args.routing.name}"
    assumed = [
        f"{name}: {figure.value:g} {figure.unit}; {figure.source}"
        for name, figure in machines.FIGURES.items()
        if figure.is_assumption
    ]
    assumed += [f"collectives: {interconnect.assumption}" if interconnect.assumption else ""]
    if interconnect.devices != args.devices > 1:
        assumed.append(
            f"collectives over {args.devices} devices take what they take over "
            f"{interconnect.devices}"
        )
    assumed += [f"launches: {counts.assumption}" if counts.assumption else "", routed, deeper]
    if args.cache == "sequence":
        assumed.append("an all-to-all takes what an all-gather of the same bytes takes")
    assumed.append("arithmetic hides behind reading, which holds for few rows")
    if args.acceptance == DEFAULT_ACCEPTANCE:
        assumed.append(f"acceptance {DEFAULT_ACCEPTANCE} is an example; measure your own")
    return Plan(
        cfg=cfg,
        drafter=drafter,
        hardware=args.hardware,
        devices=args.devices,
        interconnect=interconnect,
        context=args.context,
        cache=args.cache,
        batch=args.batch,
        rates=tuple(rates),
        counts=counts,
        distinct=tuple(distinct),
        assumptions=tuple(filter(None, assumed)),
        target=target_bytes(cfg, args.devices, DTYPE, args.cache),
        drafts=drafter_bytes(drafter, args.devices, DTYPE, cache=args.cache),
    )


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{option} is {value}, expected {least}..{most}")


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--plot {path}: expected a .png in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib (or the extra `train`)")


def _interconnect(args: argparse.Namespace) -> Interconnect:
    has_nvlink = bool(HARDWARE[args.hardware].nvlinks)
    name = args.interconnect or ("nvlink" if has_nvlink else "pcie-switch")
    if name in INTERCONNECTS:
        if name.startswith("nvlink") and not has_nvlink:
            raise ValueError(f"--interconnect is {name!r}, but {args.hardware} has no NVLink")
        return INTERCONNECTS[name]
    if not name.endswith((".json", ".txt")) and not Path(name).is_file():
        raise ValueError(
            f"--interconnect is {name!r}, expected {', '.join(INTERCONNECTS)}, or a file of "
            "probe_collectives.py"
        )
    found = machines.measured_interconnect(read_run(Path(name)), name)
    if args.devices > 1 and found.devices != args.devices:
        raise ValueError(
            f"--interconnect {name}: measured over {found.devices} devices, --devices is "
            f"{args.devices}"
        )
    return found


def _rates(text: str, most: int, *, is_cumulative: bool) -> tuple[list[float], str]:
    """Probabilities by depth, as many as `most`, and what is assumed of them."""
    try:
        given = [float(word) for word in text.split(",")]
        if is_cumulative:
            rates = economics.rates_from_shares(given)
        else:
            economics.expected_tokens_per_cycle(given)
            rates = given
    except ValueError as error:
        told = f" ({error})" if "by_depth" in str(error) else ""
        raise ValueError(
            f"--acceptance is {text!r}, expected probabilities such as 0.7,0.55{told}"
        ) from None
    if most <= len(rates):
        return rates[:most], ""
    least = min(rates)
    return (
        rates + [least] * (most - len(rates)),
        f"drafts past the {len(rates)} given stand at {least:g}, the least of those",
    )


def read_routing(path: Path, cfg: ModelConfig) -> Sequence[Sequence[Sequence[int]]]:
    """The experts each token of a text chose, [layers][tokens][experts of a token].

    Raises:
        ValueError: another file, or a trace of another model.
    """
    E, A = cfg.n_routed_experts, cfg.num_experts_per_tok
    trace = read_run(path).get("expert_ids")
    try:
        is_trace = bool(trace) and all(
            len(ids) == len(set(ids)) == A and all(type(e) is int and 0 <= e < E for e in ids)
            for tokens in trace
            for ids in tokens
        )
    except TypeError:
        is_trace = False
    if not is_trace or trace is None:
        raise ValueError(
            f'{path}: expected {{"expert_ids": [layers][tokens][{A}]}} with ids below {E}'
        )
    return trace


def show(
    plan: Plan, rows: list[dict[str, Any]], best: int, memory: dict[str, Any], terms: list
) -> None:
    """The tables."""
    title = HARDWARE[plan.hardware].title
    print(
        f"PREDICTED, not measured: {plan.devices}x {title}, {plan.interconnect.title}\n"
        f"{plan.batch} stream(s), {plan.context} tokens of context, {plan.cache} cache\n"
        f"launches: {plan.counts.source}\n"
    )
    print(" K  ms step  ms cycle  break-even  tokens/cycle  tokens/s  over plain")
    plain = rows[0]["tokens_per_second"]
    for row in rows:
        mark = "  <- best" if row["draft_tokens"] == best else ""
        print(
            f"{row['draft_tokens']:2}{row['ms_step']:9.2f}{row['ms_cycle']:10.2f}"
            f"{row['break_even']:12.2f}{row['tokens_per_cycle']:14.2f}"
            f"{row['tokens_per_second']:10.1f}{row['tokens_per_second'] / plain:12.2f}{mark}"
        )
    machine = plan.machine()
    shown = sorted({0, best} | ({3} if len(rows) > 3 else set()))
    found = {K: economics.seconds_by_term(plan.cycle(K), machine) for K in shown}
    print(f"\n{'ms by term':22}", *(f"{f'K = {K}':>8}" for K in shown))
    names = list(dict.fromkeys(name for K in shown for name in found[K]))
    for name in sorted(names, key=lambda name: -found[best].get(name, 0.0)):
        print(f"  {name:20}", *(f"{1e3 * found[K].get(name, 0.0):8.2f}" for K in shown))
    print(f"\nthe {len(terms)} largest terms of a cycle at K = {best}, and what would shrink them")
    for term in terms:
        print(f"  {term['term']}: {term['ms']:.2f} ms, {100 * term['share']:.0f} %")
        print(f"    {term['shrink']}")
    parts = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {memory[name] / 1e9:.2f}"
        for name in list(memory)[:6]
    )
    verdict = (
        f"fits, {memory['spare_bytes'] / 1e9:.2f} to spare; longest context "
        f"{memory['longest_context']}"
        if memory["fits"]
        else f"DOES NOT FIT, {-memory['spare_bytes'] / 1e9:.2f} too much"
    )
    print(
        f"\nper device, GB: {parts}; in all {memory['total_bytes'] / 1e9:.2f} of "
        f"{memory['device_bytes'] / 1e9:.2f}: {verdict}"
    )
    print("\nmeasured elsewhere")
    print(f"  collectives: {plan.interconnect.source}")
    print("assumed")
    for assumption in plan.assumptions:
        print(f"  {assumption}")
    print()


def draw(path: Path, plan: Plan, rows: list[dict[str, Any]], best: int) -> None:
    """Tokens a second and break-even against K."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    depths = [row["draft_tokens"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(depths, [row["tokens_per_second"] for row in rows], marker="o")
    left.axhline(rows[0]["tokens_per_second"], linestyle=":", color="gray", label="plain")
    left.axvline(best, linestyle="--", color="gray", label=f"best: K = {best}")
    left.set(xlabel="draft tokens K", ylabel="tokens/s of a stream", ylim=(0, None))
    right.plot(depths, [row["break_even"] for row in rows], marker="o", label="break-even")
    right.plot(depths, [row["tokens_per_cycle"] for row in rows], marker="s", label="tokens/cycle")
    right.set(xlabel="draft tokens K", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(depths)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"Predicted: {plan.devices}x {plan.hardware}, {plan.interconnect.title}, "
        f"{plan.context} tokens of context"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """The command line."""
    parser = make_parser()
    args = parser.parse_args()
    try:
        plan = make_plan(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows, best, memory = plan_rows(plan), best_draft_tokens(plan), plan_memory(plan)
    terms = largest_terms(plan, best)
    show(plan, rows, best, memory, terms)
    if args.plot is not None:
        draw(args.plot, plan, rows, best)
    machine = plan.machine()
    told = conditions(
        is_prediction=True,
        hardware=plan.hardware,
        planned_devices=plan.devices,
        interconnect={"title": plan.interconnect.title, "source": plan.interconnect.source},
        context=plan.context,
        cache=plan.cache,
        batch=plan.batch,
        acceptance=plan.rates,
        distinct_experts=[round(n, 2) for n in plan.distinct],
        launches=dataclasses.asdict(plan.counts),
        figures={name: dataclasses.asdict(f) for name, f in machines.FIGURES.items()},
        assumptions=plan.assumptions,
        dtype=DTYPE.name,
        config=plan.cfg.to_dict(),
        drafter=plan.drafter.to_dict(),
    )
    by_term = {
        str(K): {
            name: round(1e3 * seconds, 4)
            for name, seconds in economics.seconds_by_term(plan.cycle(K), machine).items()
        }
        for K in sorted({0, best})
    }
    out = {
        "rows": rows,
        "best_draft_tokens": best,
        "memory": memory,
        "largest_terms": terms,
        "ms_by_term": by_term,
        "conditions": told,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
