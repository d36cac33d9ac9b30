"""GPUs a program can be compiled for on a machine that has none, and what compiling shows of it.

A description of each GPU (public figures, in XLA's own form), devices that exist for the compiler
alone, and what XLA's dump, its memory analysis and the assembler say of a program compiled for
them. Nothing runs here, so nothing here is a time on a GPU. Needs the CUDA plugin (extra `cuda12`),
not a driver. Before JAX is imported, JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 has to be set, or the plugin
refuses to load without a driver, and JAX_PLATFORMS=cpu, or JAX starts a backend that has no device.
"""

import contextlib
import dataclasses
import importlib.util
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import dispatch, launch_list
from kernels_pallas.dispatch import Target
from kernels_pallas.launch_list import Launches, LaunchListError


class NoCudaPlugin(RuntimeError):
    """The compiler for NVIDIA GPUs is not installed; the message names the extra."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One GPU as XLA's compiler wants it described."""

    title: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    core_shared_bytes: int
    block_shared_bytes: int
    core_threads: int
    clock_ghz: float
    nvlinks: int = 0

    @property
    def target(self) -> Target:
        """The target kernels are chosen for."""
        return Target("gpu", self.capability)

    def describe(self) -> str:
        """XLA's `GpuTargetConfigProto` in text form."""
        major, minor = self.capability
        features = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        links = (
            f"\n  device_interconnect_info {{ active_links: {self.nvlinks} }}"
            if self.nvlinks
            else ""
        )
        return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  core_count: {self.cores}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.core_shared_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.block_shared_bytes}
  threads_per_core_limit: {self.core_threads}
  clock_rate_ghz: {self.clock_ghz}
  threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535{links}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 1 }}
device_description_str: "{self.title}"
"""


HARDWARE = {
    "rtx-pro-6000": Hardware(
        title="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        capability=(12, 0),
        cores=188,
        memory_bytes=103_079_215_104,
        bandwidth=1_792_000_000_000,
        l2_bytes=134_217_728,
        core_shared_bytes=131_072,
        block_shared_bytes=101_376,
        core_threads=1536,
        clock_ghz=2.6,
    ),
    "h200": Hardware(
        title="NVIDIA H200",
        capability=(9, 0),
        cores=132,
        memory_bytes=151_397_597_184,
        bandwidth=4_800_000_000_000,
        l2_bytes=52_428_800,
        core_shared_bytes=233_472,
        block_shared_bytes=232_448,
        core_threads=2048,
        clock_ghz=1.98,
        nvlinks=18,
    ),
    "h100": Hardware(
        title="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        memory_bytes=85_014_872_064,
        bandwidth=3_352_320_000_000,
        l2_bytes=52_428_800,
        core_shared_bytes=233_472,
        block_shared_bytes=232_448,
        core_threads=2048,
        clock_ghz=1.98,
        nvlinks=18,
    ),
    "b200": Hardware(
        title="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        memory_bytes=191_000_000_000,
        bandwidth=7_672_000_000_000,
        l2_bytes=132_644_864,
        core_shared_bytes=233_472,
        block_shared_bytes=232_448,
        core_threads=2048,
        clock_ghz=1.965,
        nvlinks=18,
    ),
    "a100": Hardware(
        title="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        memory_bytes=84_987_740_160,
        bandwidth=2_039_000_000_000,
        l2_bytes=41_943_040,
        core_shared_bytes=167_936,
        block_shared_bytes=166_912,
        core_threads=2048,
        clock_ghz=1.41,
        nvlinks=12,
    ),
}


def check_plugin() -> None:
    """Refuses an installation that cannot compile for NVIDIA GPUs.

    Raises:
        NoCudaPlugin: JAX's CUDA compiler is not installed.
    """
    modules = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    if not any(importlib.util.find_spec(module) for module in modules):
        raise NoCudaPlugin(
            "JAX's compiler for NVIDIA GPUs is not installed: pip install 'kimi-jax[cuda12]' "
            "(no GPU and no driver are needed)"
        )


def devices(name: str, count: int = 1) -> list[Any]:
    """`count` devices of the named GPU, for compiling only.

    Raises:
        NoCudaPlugin: JAX's CUDA compiler is not installed.
    """
    check_plugin()
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        topology=f"1x1x{count}",
        target_config=HARDWARE[name].describe(),
    ).devices


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What ptxas says of one kernel."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread, written to memory for want of registers."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device that a program needs, as XLA's buffer assignment has them."""

    arguments: int
    outputs: int
    aliased: int
    """Of the outputs, those that lie where a donated argument was."""
    temporaries: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and what the compiler wrote down about it."""

    launches: Launches
    assembled: dict[str, Assembled]
    """By kernel; empty where no ptxas is found."""
    memory: Memory
    seconds: float
    """To compile, lowering apart."""


def compile_for(name: str, function: Callable, operands: Any) -> Program:
    """The function compiled for one of the named GPUs, operands given as shapes.

    Raises:
        NoCudaPlugin: JAX's CUDA compiler is not installed.
    """
    mesh = Mesh(np.array(devices(name)), ("device",))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), operands
    )
    # Inside shard_map JAX knows the device from the mesh; compiling needs no other.
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    with dispatch.compile_for(HARDWARE[name].target):
        lowered = jax.jit(sharded).lower(*shapes)
    return compile_lowered(lowered, name)


def compile_lowered(
    lowered: jax.stages.Lowered,
    name: str,
    *,
    is_loop: bool = False,
    own_kernels: bool = False,
    keep: Path | None = None,
) -> Program:
    """A program compiled for one of the named GPUs, and read.

    Args:
        lowered: traced inside `dispatch.compile_for(HARDWARE[name].target)`, on `devices`.
        name: of the GPU.
        is_loop: the launches of interest are those of one pass over its outermost loop.
        own_kernels: assembles Pallas kernels alone, which are few, not all that XLA makes.
        keep: an empty folder for the compiler's dump, which stays there.
    """
    hardware = HARDWARE[name]
    with contextlib.ExitStack() as stack:
        dump = str(keep) if keep else stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(dump)
        options: dict[str, str | bool] = {"xla_dump_to": dump}
        if jax.__version_info__ >= (0, 11):
            # From there on machine code is written only where it is asked for.
            options["xla_dump_emitter_re"] = "ptx"
        began = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - began
        launches = _read_launches(folder, is_loop=is_loop)
        wanted = None
        if own_kernels:
            wanted = {x.name for x in launches.kernels if "pallas_call" in x.scope}
        assembled = _assemble(folder, hardware, wanted)
    stats: Any = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )
    return Program(launches, assembled, memory, seconds)


def device_bytes(tree: Any) -> int:
    """What one device holds of a tree of placed arrays, or of their shapes with placements."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _read_launches(folder: Path, *, is_loop: bool) -> Launches:
    # The second file appears only where a pass changed the list.
    files = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    files = files or sorted(folder.glob("*thunk_sequence.txt"))
    if not files:
        raise LaunchListError(f"the compiler left no launch list in {folder}: can it be written?")
    nodes = launch_list.parse("\n".join(file.read_text() for file in files))
    metadata = sorted(folder.glob("*thunk_metadata.txt"))
    names = launch_list.read_metadata("\n".join(file.read_text() for file in metadata))
    final = sorted(folder.glob("*gpu_after_optimizations.txt"))
    program = launch_list.read_program(
        "\n".join(file.read_text() for file in final), names.values()
    )
    launches = launch_list.launches_of(launch_list.annotate(nodes, names, program), is_loop=is_loop)
    collectives = launches.all_reduces + launches.all_gathers + launches.all_to_alls
    if unknown := [x.number for x in collectives if not x.num_bytes]:
        raise LaunchListError(f"collectives without an instruction: {unknown}")
    return launches


def _assemble(folder: Path, hardware: Hardware, wanted: set[str] | None) -> dict[str, Assembled]:
    ptxas = _find_ptxas()
    if ptxas is None:
        return {}
    major, minor = hardware.capability
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    found = {}
    for file in sorted(folder.glob("*.ptx")):
        entries = set(re.findall(r"\.entry (\w+)", file.read_text()))
        if wanted is not None and not entries & wanted:
            continue
        command = [ptxas, "-v", "--gpu-name", architecture, str(file), "-o", str(folder / "cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        names = re.findall(r"Function properties for (\S+)", said)
        spills = re.findall(r"(\d+) bytes spill stores", said)
        registers = re.findall(r"Used (\d+) registers", said)
        for kernel, spilled, used in zip(names, spills, registers, strict=False):
            found[kernel] = Assembled(int(used), int(spilled))
    return found


def _find_ptxas() -> str | None:
    """The assembler that comes with the CUDA extra, else one on the path."""
    for spec in (importlib.util.find_spec("nvidia"),):
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(folder).glob("**/bin/ptxas")):
                return str(file)
    return shutil.which("ptxas")
