"""Compiles the GPU programs at their real size on a machine without a GPU, and says what came out.

    python scripts/compile_check.py                 # Kimi-K2.5 on 8x RTX PRO 6000, K = 3
    python scripts/compile_check.py --hardware h200 --draft-tokens 5 --capacity 65536
    python scripts/compile_check.py --config tiny --programs verify cycle
    python scripts/compile_check.py --ops           # every kernel alone, for every GPU

Four programs of the engine, with a Llama-style drafter of the published sizes:

    step     plain decoding, one pass over the loop's body
    verify   the target's forward over K + 1 tokens a row and the greedy choice, nothing else
    cycle    the speculative cycle: K drafts, verification, acceptance; one pass as above
    prefill  a chunk of 512 prompt tokens; a loop in it is counted once

For each: kernels in all and per MoE layer, all-reduces and their bytes, CUDA graphs and what the
host launches beside them, temporaries, compile time; and whether all of it fits the GPU's memory.
Of a conditional the branch counts that greedy decoding takes, without options. Nothing runs,
so this says nothing of speed, and XLA tunes nothing without a device: its own kernels may differ
there by a few a layer.

`--ops` compiles single kernels at the named shapes of Kimi-K2.5 on one of 8 devices instead, and
gives registers and spills of each. A tile that needs more shared memory than the GPU has fails.

The four programs of all 61 layers took 6 to 7 minutes of processor time (JAX 0.10.2 and 0.12.0.1,
a shared two-core machine); `--layers 3` is quicker.

Needs the extra `cuda12`, no driver. Prints a table, then one JSON line; the status is 1 if
something did not compile.
"""

import argparse
import collections
import dataclasses
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# Read when JAX is imported: kernels_pallas.compile_only says why.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AbstractMesh, Mesh  # noqa: E402
from make_random_checkpoint import preset_config  # noqa: E402
from tqdm import tqdm  # noqa: E402

from kernels_pallas import compile_only, dispatch  # noqa: E402
from kernels_pallas.compile_only import HARDWARE, NoCudaPlugin, Program, device_bytes  # noqa: E402
from kernels_pallas.launch_list import Launch, count_kinds  # noqa: E402
from kernels_pallas.registry import OPS  # noqa: E402
from kimi_jax.config import ModelConfig  # noqa: E402
from kimi_jax.model.transformer import Kimi  # noqa: E402
from kimi_jax.published import K25, K25_EAGLE3  # noqa: E402
from kimi_jax.runtime.conditions import conditions  # noqa: E402
from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH  # noqa: E402
from kimi_jax.runtime.engine import (  # noqa: E402
    CAPACITY_UNIT,
    PREFILL_SIZES,
    Engine,
    abstract_weights,
)
from kimi_jax.runtime.flags import MOST_SIMULATED_DEVICES, set_gpu_flags  # noqa: E402
from kimi_jax.runtime.mesh import CACHES, MESH_AXES, check_cache, check_sizes  # noqa: E402
from spec.drafter import abstract_drafter, check_mesh  # noqa: E402
from spec.eagle3.config import DrafterConfig  # noqa: E402
from spec.training.drafters import new_config  # noqa: E402
from spec.tree import Chain  # noqa: E402

PROGRAMS = ("step", "verify", "cycle", "prefill")
DEFAULT_SHAPES = "kimi"
MOST_ROWS = 64
DTYPE = jnp.dtype(jnp.bfloat16)


def main() -> None:
    """Parses the command line, compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hardware", nargs="+", choices=HARDWARE, help="one GPU; with --ops any number (all)")
    add("--devices", type=int, default=8, help="GPUs the model is cut over (8)")
    add("--config", default="kimi-k2.5", help="kimi-k2.5 (default), tiny, or a model's folder")
    add("--draft-tokens", type=int, default=3, metavar="K", help="drafted a cycle (3)")
    add("--batch", type=int, default=1, help="rows that decode together (1)")
    add(
        "--capacity",
        type=int,
        default=8192,
        help=f"cache slots a row, a multiple of {CAPACITY_UNIT} from {PREFILL_SIZES[-1]} on (8192)",
    )
    add("--cache", choices=CACHES, default="replicated", help="where the latent cache lies")
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    add("--layers", type=int, help="compiles the first so many layers only, to be quick")
    add("--jobs", type=int, default=2, help="programs compiled at the same time (2)")
    add("--dump", type=Path, metavar="FOLDER", help="keeps what the compiler wrote, a folder each")
    add(
        "--collectives-outside-graphs",
        action="store_true",
        help="leaves collectives out of CUDA graphs",
    )
    add("--ops", nargs="*", choices=OPS, help="single kernels instead (all)")
    add("--shapes", help="with --ops: prefix of the named shapes (kimi)")
    args = parser.parse_args()
    try:
        if args.ops is not None:
            check_alone(parser, args)
        job = Job.checked(args) if args.ops is None else None
        compile_only.check_plugin()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except NoCudaPlugin as error:
        parser.exit(1, f"compile_check.py: error: {error}\n")
    # A program that a cache gives leaves no dump to read.
    jax.config.update("jax_enable_compilation_cache", False)
    if job is None:
        sys.exit(
            check_ops(args.hardware or list(HARDWARE), args.ops or list(OPS), args.shapes or "kimi")
        )
    set_gpu_flags(collectives_in_graphs=not args.collectives_outside_graphs)
    sys.exit(check_programs(job))


def check_alone(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses options that say nothing of single kernels.

    Raises:
        ValueError: names them.
    """
    mine = ("ops", "shapes", "hardware")
    given = [k for k, v in vars(args).items() if k not in mine and v != parser.get_default(k)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"--ops compiles single kernels at their named shapes; it takes no {names}"
        )
    prefix = args.shapes or DEFAULT_SHAPES
    if not any(s.startswith(prefix) for op in args.ops or OPS for s in OPS[op].specs):
        raise ValueError(f"--shapes {args.shapes!r}: no named shape begins so")


# The engine's programs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is compiled, checked before anything is."""

    hardware: str
    cfg: ModelConfig
    drafter: DrafterConfig
    devices: int
    draft_tokens: int
    batch: int
    capacity: int
    cache: str
    programs: tuple[str, ...]
    whole: bool
    """Whether all the model's layers are there."""
    jobs: int
    """Programs compiled at the same time."""
    dump: Path | None = None
    """Where the compiler's dumps stay."""

    @classmethod
    def checked(cls, args: argparse.Namespace) -> "Job":
        """The job a command line asks for.

        Raises:
            ValueError: an option out of range, or a mesh that does not divide model or drafter.
        """
        if args.shapes is not None:
            raise ValueError("--shapes is of single kernels: only with --ops")
        names = args.hardware or ["rtx-pro-6000"]
        if len(names) > 1:
            raise ValueError(f"--hardware names {len(names)} GPUs; programs are compiled for one")
        full = model_config(args.config)
        limit = full.max_position_embeddings
        most_layers = full.num_hidden_layers
        dense = full.first_k_dense_replace
        _check_range("--jobs", args.jobs, 1, len(PROGRAMS))
        if args.dump is not None and args.dump.exists():
            raise ValueError(f"--dump {args.dump} exists already")
        _check_range("--devices", args.devices, 1, MOST_SIMULATED_DEVICES)
        _check_range("--draft-tokens", args.draft_tokens, 1, MAX_DRAFT_DEPTH)
        _check_range("--batch", args.batch, 1, MOST_ROWS)
        _check_range("--capacity", args.capacity, PREFILL_SIZES[-1], limit)
        if args.capacity % CAPACITY_UNIT:
            raise ValueError(
                f"--capacity is {args.capacity}, expected a multiple of {CAPACITY_UNIT}"
            )
        cfg = full
        if args.layers is not None:
            _check_range("--layers", args.layers, min(dense + 1, most_layers), most_layers)
            cfg = dataclasses.replace(full, num_hidden_layers=args.layers)
        mesh = AbstractMesh((1, args.devices), MESH_AXES)
        check_sizes(cfg, mesh)
        check_cache(args.cache, mesh)
        if args.config == "kimi-k2.5" and cfg == full:
            drafter = DrafterConfig.from_dict(K25_EAGLE3, num_target_layers=most_layers)
        else:
            drafter = new_config(cfg, "llama")
        check_mesh(drafter, mesh)
        return cls(
            hardware=names[0],
            cfg=cfg,
            drafter=drafter,
            devices=args.devices,
            draft_tokens=args.draft_tokens,
            batch=args.batch,
            capacity=args.capacity,
            cache=args.cache,
            programs=tuple(name for name in PROGRAMS if name in args.programs),
            whole=cfg.num_hidden_layers == most_layers,
            jobs=args.jobs,
            dump=args.dump,
        )


def model_config(name: str) -> ModelConfig:
    """A configuration by name or folder.

    Raises:
        ValueError: neither; or a folder whose configuration cannot be used.
    """
    if name == "kimi-k2.5":
        return ModelConfig.from_dict(K25)
    if name == "tiny":
        # Room for more positions than the preset has: the cache's size is an option here.
        return preset_config("tiny", max_position_embeddings=1 << 18)
    if not Path(name).is_dir():
        raise ValueError(f"--config is {name!r}, expected kimi-k2.5, tiny, or a model's folder")
    return ModelConfig.from_folder(name)


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{option} is {value}, expected {least}..{most}")


def make_engine(job: Job) -> Engine:
    """The engine of the job on compile-only devices, its weights shapes."""
    places = np.array(compile_only.devices(job.hardware, job.devices)).reshape(1, -1)
    mesh = Mesh(places, MESH_AXES)
    graph, weights = abstract_weights(lambda: Kimi(job.cfg, dtype=DTYPE, rngs=nnx.Rngs(0)), mesh)
    drafter = abstract_drafter(job.drafter, job.cfg, mesh, DTYPE, (Chain(job.draft_tokens),))
    return Engine(
        job.cfg,
        graph,
        weights,
        mesh,
        max_length=job.capacity,
        max_batch=job.batch,
        drafter=drafter,
        cache=job.cache,
    )


def lower_program(engine: Engine, job: Job, name: str) -> jax.stages.Lowered:
    """One program of the engine, not compiled yet."""
    size = (job.batch, job.capacity)
    # Off shard_map, on one device, JAX knows the device from here.
    place = jax.sharding.use_abstract_mesh(engine.mesh.abstract_mesh)
    with dispatch.compile_for(HARDWARE[job.hardware].target), place:
        if name == "step":
            return engine.lower_decode(*size, None)
        if name == "cycle":
            return engine.lower_decode(*size, Chain(job.draft_tokens))
        if name == "verify":
            return engine.lower_verify(*size, job.draft_tokens + 1)
        return engine.lower_prefill(*size, PREFILL_SIZES[-1])


def compile_programs(
    engine: Engine, job: Job
) -> tuple[dict[str, Program], dict[str, float], list[str]]:
    """Each program compiled and read, the seconds each took to lower, and what did not compile."""
    compiled: dict[str, Program] = {}
    lowering: dict[str, float] = {}
    failures: list[str] = []
    # Most of a compilation runs in one thread, and Python is not in its way.
    with (
        ThreadPoolExecutor(max_workers=job.jobs) as pool,
        tqdm(job.programs, "compiling", disable=None, leave=False) as bar,
    ):
        waiting = {}
        for name in job.programs:
            began = time.perf_counter()
            try:
                lowered = lower_program(engine, job, name)
            except Exception as error:  # so is a program that does not lower
                failures.append(f"{name}: {_first_line(error)}")
                continue
            lowering[name] = time.perf_counter() - began
            run = pool.submit(
                compile_only.compile_lowered,
                lowered,
                job.hardware,
                is_loop=name in ("step", "cycle"),
                own_kernels=True,
                keep=None if job.dump is None else job.dump / name,
            )
            waiting[run] = name
        for run in as_completed(waiting):
            bar.update()
            try:
                compiled[waiting[run]] = run.result()
            except Exception as error:  # a program that does not compile is the finding
                failures.append(f"{waiting[run]}: {_first_line(error)}")
    return compiled, lowering, failures


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or '-'}".splitlines()[0]


def check_programs(job: Job) -> int:
    """Compiles and prints; the exit status."""
    engine = make_engine(job)
    assert engine.drafter is not None
    state = engine.abstract_state(job.batch, job.capacity)
    held = {
        "target_weight_bytes": device_bytes(engine.target_weights),
        "drafter_weight_bytes": device_bytes(engine.drafter.weights),
        "cache_bytes": device_bytes(state.cache),
        "drafter_state_bytes": device_bytes(state.drafter),
    }
    state_bytes = device_bytes(state)
    compiled, lowering, failures = compile_programs(engine, job)
    programs = {
        name: _describe(program, job, held, has_drafter=name in ("cycle", "prefill"))
        | {"lower_seconds": round(lowering[name], 1)}
        for name, program in sorted(compiled.items(), key=lambda item: PROGRAMS.index(item[0]))
    }
    needed = [p.memory.temporaries + p.memory.outputs - p.memory.aliased for p in compiled.values()]
    weights = held["target_weight_bytes"] + held["drafter_weight_bytes"]
    total = weights + state_bytes + max(needed, default=0)
    device = HARDWARE[job.hardware].memory_bytes
    memory = {
        "total_bytes": total,
        "device_bytes": device,
        "fits": total <= device,
        "spare_bytes": device - total,
        "state_bytes": state_bytes,
        **held,
    }
    _print_programs(job, programs, compiled, memory)
    for failure in failures:
        print("did not compile:", failure)
    told = conditions(
        hardware=job.hardware,
        compiled_for=HARDWARE[job.hardware].title,
        compiled_devices=job.devices,
        batch=job.batch,
        capacity=job.capacity,
        cache=job.cache,
        draft_tokens=job.draft_tokens,
        layers=job.cfg.num_hidden_layers,
        all_layers=job.whole,
        compiled_at_once=job.jobs,
        dtype=DTYPE.name,
        branches="of a conditional, where it does not hold: greedy, no bias, penalties, logprobs",
        not_counted="CUDA context, graphs, machine code, and what NCCL allocates",
        config=job.cfg.to_dict(),
        drafter=job.drafter.to_dict(),
    )
    print(
        json.dumps(
            {"programs": programs, "memory": memory, "conditions": told, "failures": failures}
        )
    )
    return int(bool(failures))


def _describe(
    program: Program, job: Job, held: dict[str, int], *, has_drafter: bool
) -> dict[str, Any]:
    """The figures of one program, as its JSON has them."""
    launches, layers = program.launches, _moe_layers(program, job)
    kernels = [sum(x.is_kernel for x in inside) for inside in layers.values()]
    reduces, gathers = launches.all_reduces, launches.all_gathers
    exchanges = launches.all_to_alls
    per_layer = [sum(x.is_all_reduce for x in inside) for inside in layers.values()]
    of_drafter = ("drafter_weight_bytes", "drafter_state_bytes")
    drafter_weights, drafter_state = (held[name] if has_drafter else 0 for name in of_drafter)
    return {
        "kernels": len(launches.kernels),
        "kernels_per_layer": _mean(kernels),
        "kernels_per_layer_most": max(kernels, default=0),
        "launches_per_layer": _mean([len(inside) for inside in layers.values()]),
        "all_reduces": len(reduces),
        "all_reduces_per_layer_most": max(per_layer, default=0),
        "all_reduce_bytes_max": max((x.num_bytes for x in reduces), default=0),
        "all_gathers": len(gathers),
        "all_gather_bytes_max": max((x.num_bytes for x in gathers), default=0),
        "all_to_alls": len(exchanges),
        "all_to_all_bytes_max": max((x.num_bytes for x in exchanges), default=0),
        "graphs": launches.graphs,
        "launches_outside_graphs": len(launches.outside_graphs),
        "launches": count_kinds(launches.cycle),
        "launches_around_loop": count_kinds(launches.around),
        "bytes_written_around_loop": sum(
            x.num_bytes for x in launches.around if x.is_kernel or x.kind == "kCopy"
        ),
        "temp_bytes": program.memory.temporaries,
        "weight_bytes": held["target_weight_bytes"] + drafter_weights,
        "cache_bytes": held["cache_bytes"] + drafter_state,
        "compile_seconds": round(program.seconds, 1),
        "kernel_list": _kernel_list(program),
    }


def _moe_layers(program: Program, job: Job) -> dict[int, tuple[Launch, ...]]:
    """The launches of each layer that has experts, all being alike."""
    layers = program.launches.by_layer()
    return {layer: inside for layer, inside in layers.items() if job.cfg.is_moe_layer(layer)}


def _mean(counts: list[int]) -> float:
    return round(sum(counts) / len(counts), 2) if counts else 0.0


def _kernel_list(program: Program) -> list[dict[str, Any]]:
    """Each distinct kernel of a pass, and how often it is launched."""
    counts = collections.Counter(
        (x.name, x.grid, x.threads, x.shared_bytes) for x in program.launches.kernels
    )
    rows = []
    for (name, grid, threads, shared), count in counts.most_common():
        made = program.assembled.get(name)
        rows.append(
            {
                "name": name,
                "count": count,
                "grid": grid,
                "threads": threads,
                "shared_bytes": shared,
                "registers": made.registers if made else None,
                "spilled_bytes": made.spilled_bytes if made else None,
            }
        )
    return rows


def _print_programs(
    job: Job,
    programs: dict[str, dict[str, Any]],
    compiled: dict[str, Program],
    memory: dict[str, Any],
) -> None:
    hardware = HARDWARE[job.hardware]
    part = "" if job.whole else ", not all of the model's"
    print(f"{job.devices}x {hardware.title}, {job.cfg.num_hidden_layers} layers{part}, JAX "
          f"{jax.__version__}; batch {job.batch}, {job.capacity} cache slots, K = "
          f"{job.draft_tokens}\n")  # fmt: skip
    columns = (
        ("kernels", "kernels", "d"),
        ("a layer", "kernels_per_layer", ".2f"),
        ("all-reduces", "all_reduces", "d"),
        ("largest KB", "all_reduce_bytes_max", "kb"),
        ("gathers", "all_gathers", "d"),
        ("largest KB", "all_gather_bytes_max", "kb"),
        ("all-to-alls", "all_to_alls", "d"),
        ("largest KB", "all_to_all_bytes_max", "kb"),
        ("graphs", "graphs", "d"),
        ("outside", "launches_outside_graphs", "d"),
        ("temp MB", "temp_bytes", "mb"),
        ("compile s", "compile_seconds", ".1f"),
    )
    print(f"{'program':8}", *(f"{title:>{max(len(title), 8)}}" for title, _, _ in columns))
    for name, figures in programs.items():
        cells = [f"{_cell(figures[key], form):>{max(len(t), 8)}}" for t, key, form in columns]
        print(f"{name:8}", *cells)
    print("\nlaunches of a pass by kind; around the loop")
    for name, figures in programs.items():
        print(f"{name:8} {_kinds(figures['launches'])}")
        if around := figures["launches_around_loop"]:
            written = figures["bytes_written_around_loop"] / 1e6
            print(f"{'':8} around: {_kinds(around)}; {written:.1f} MB written")
    shown = next((name for name in ("verify", "step", "cycle") if name in compiled), None)
    layers = _moe_layers(compiled[shown], job) if shown else {}
    if layers:
        layer = sorted(layers)[len(layers) // 2]
        print(f"\nlayer {layer} of {shown}: grid, threads, shared KiB, registers, spilled bytes")
        for launch in layers[layer]:
            print("  " + _line(launch, compiled[shown]))
    print(
        f"\nper device, GB: weights {memory['target_weight_bytes'] / 1e9:.2f}, drafter "
        f"{memory['drafter_weight_bytes'] / 1e9:.2f}, state {memory['state_bytes'] / 1e9:.2f}, "
        f"in all with temporaries {memory['total_bytes'] / 1e9:.2f} of "
        f"{memory['device_bytes'] / 1e9:.2f}: "
        + (f"fits, {memory['spare_bytes'] / 1e9:.2f} to spare" if memory["fits"] else "too much")
    )


def _cell(value: float, form: str) -> str:
    if form == "kb":
        return f"{value / 1e3:.1f}"
    return f"{value / 1e6:.1f}" if form == "mb" else f"{value:{form}}"


def _kinds(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.removeprefix('k')}" for kind, count in counts.items())


def _line(launch: Launch, program: Program) -> str:
    if not launch.is_kernel:
        size = f" {launch.num_bytes} bytes" if launch.num_bytes else ""
        return f"{launch.kind.removeprefix('k')}{size}"
    made = program.assembled.get(launch.name)
    told = f"{made.registers:4} {made.spilled_bytes:4}" if made else "   -    -"
    grid = "x".join(map(str, launch.grid))
    shared = f"{launch.shared_bytes / 1024:6.1f}"
    return f"{launch.name[:40]:40} {grid:14} {launch.threads:5} {shared} {told}"


# Single kernels.


def compile_kernels(op: str, spec: str, hardware: str) -> Program:
    """One op at one named shape, compiled for one GPU."""

    def run(operands: Any) -> Any:
        return OPS[op].call(spec, operands, "triton")

    return compile_only.compile_for(hardware, run, (OPS[op].specs[spec].shapes(),))


def check_ops(hardware: list[str], ops: list[str], prefix: str) -> int:
    """Compiles single kernels and prints; the exit status."""
    jobs = [
        (gpu, op, spec)
        for gpu in hardware
        for op in ops
        for spec in OPS[op].specs
        if spec.startswith(prefix)
    ]
    rows, failures = [], []
    print(f"{'hardware':13} {'op':14} {'shape':19} {'kernel':24} grid             "
          "threads shared KiB registers spilled")  # fmt: skip
    for gpu, op, spec in tqdm(jobs, "compiling", disable=None, leave=False):
        try:
            program = compile_kernels(op, spec, gpu)
        except Exception as error:  # a kernel that does not compile is the finding
            failures.append(f"{gpu} {op} {spec}: {_first_line(error)}")
            continue
        for launch in program.launches.kernels:
            made = program.assembled.get(launch.name)
            registers = made.registers if made else "-"
            spilled = made.spilled_bytes if made else "-"
            print(
                f"{gpu:13} {op:14} {spec:19} {launch.name[:24]:24} "
                f"{'x'.join(map(str, launch.grid)):16} {launch.threads:7} "
                f"{launch.shared_bytes / 1024:10.1f} {registers:>9} {spilled:>7}"
            )
        rows.append(
            {
                "hardware": gpu,
                "op": op,
                "shape": spec,
                "kernels": _kernel_list(program),
                "launches": count_kinds(program.launches.cycle),
                "temp_bytes": program.memory.temporaries,
                "compile_seconds": round(program.seconds, 1),
                "assembled": {k: dataclasses.asdict(v) for k, v in program.assembled.items()},
            }
        )
    for failure in failures:
        print("did not compile:", failure)
    print(json.dumps({"ops": rows, "failures": failures, "conditions": conditions()}))
    return int(bool(failures))


if __name__ == "__main__":
    main()
