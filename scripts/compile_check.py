"""Compiles every kernel for a GPU on a machine that has none, and says what the compiler made of it.

    python scripts/compile_check.py                             # every kernel, every GPU
    python scripts/compile_check.py --hardware rtx-pro-6000 --ops mla_attention

For each named shape of Kimi-K2.5 on one of 8 devices: launches, grid, threads, shared memory,
registers and spilled bytes where an assembler is found, temporaries, compile time. A tile that
needs more shared memory than the GPU has fails here. Nothing runs, so this says nothing of speed.

Needs the extra `cuda12`, no driver. Prints a table, then one JSON line; the status is 1 if a kernel
did not compile.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# Read when JAX is imported: kernels_pallas.compile_only says why.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax  # noqa: E402

from kernels_pallas import compile_only  # noqa: E402
from kernels_pallas.compile_only import HARDWARE, NoCudaPlugin, Program  # noqa: E402
from kernels_pallas.grouped_matmul import arg_specs as expert_specs  # noqa: E402
from kernels_pallas.grouped_matmul import expert_ffn  # noqa: E402
from kernels_pallas.mla_attention import arg_specs as mla_specs  # noqa: E402
from kernels_pallas.mla_attention import mla_attention_with_lse  # noqa: E402

SCALE = 0.1
"""Of the scores: it does not change what is compiled."""


def _attend(q_latent: Any, q_rope: Any, cache: Any, last: Any, tree_mask: Any = None) -> Any:
    return mla_attention_with_lse(
        q_latent,
        q_rope,
        cache,
        last,
        scale=SCALE,
        tree_mask=tree_mask,
        implementation="triton",
    )


OPS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "mla_attention": (_attend, mla_specs.SPECS),
    "expert_ffn": (functools.partial(expert_ffn, implementation="triton"), expert_specs.SPECS),
}


def compile_kernels(op: str, spec: str, hardware: str) -> Program:
    """One op at one named shape, compiled for one GPU."""
    function, specs = OPS[op]
    return compile_only.compile_for(hardware, function, specs[spec].shapes())


def main() -> None:
    """Parses the command line, compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", nargs="+", choices=HARDWARE, default=list(HARDWARE))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--shapes", default="kimi", help="prefix of the named shapes (kimi)")
    args = parser.parse_args()
    rows, failures = [], []
    print(f"{'hardware':13} {'op':14} {'shape':16} {'kernel':24} grid             "
          "threads shared KiB registers spilled")  # fmt: skip
    for hardware in args.hardware:
        for op in args.ops:
            for spec in (name for name in OPS[op][1] if name.startswith(args.shapes)):
                try:
                    program = compile_kernels(op, spec, hardware)
                except NoCudaPlugin as error:
                    sys.exit(str(error))
                except Exception as error:  # a kernel that does not compile is the finding
                    failures.append(f"{hardware} {op} {spec}: {str(error).splitlines()[0]}")
                    continue
                for launch in program.launches:
                    made = program.assembled.get(launch.name)
                    registers = made.registers if made else "-"
                    spilled = made.spilled_bytes if made else "-"
                    print(
                        f"{hardware:13} {op:14} {spec:16} {launch.name[:24]:24} "
                        f"{'x'.join(map(str, launch.grid)):16} {launch.threads:7} "
                        f"{launch.shared_bytes / 1024:10.1f} {registers:>9} {spilled:>7}"
                    )
                rows.append(
                    {"hardware": hardware, "op": op, "shape": spec, **dataclasses.asdict(program)}
                )
    for failure in failures:
        print("did not compile:", failure)
    print(json.dumps({"programs": rows, "failures": failures, "jax": jax.__version__}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
