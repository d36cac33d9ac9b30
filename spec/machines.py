"""Machines to plan for: what their figures are, where each is from, and which are assumptions.

Memory and bandwidth of the GPUs are in `kernels_pallas.compile_only`. Here are the shares of that
bandwidth kernels reach, fixed costs of launches, and how long collectives take by interconnect; the
last also from a file that `scripts/probe_collectives.py` measured. No time of this project on a GPU
is among them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kernels_pallas.compile_only import Hardware
from spec.economics import Latency, Machine, Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One constant of the model of time."""

    value: float
    unit: str
    source: str
    is_assumption: bool = False
    """Whether it was not measured, or on something else than what is planned."""


DENSE_EFFICIENCY = Figure(
    value=0.78,
    unit="of the memory's bandwidth",
    source="Llama-1B in bfloat16 as one kernel on an H100 (hazyresearch.stanford.edu, 'Look Ma, No "
    "Bubbles', May 2025): 78 %; taken for every GPU",
    is_assumption=True,
)
PACKED_EFFICIENCY = Figure(
    value=0.54,
    unit="of the memory's bandwidth",
    source="INT4 in groups of 32, Llama-2-70B on an A100 (gpt-fast README): 1097.66 of 2039 GB/s; "
    "taken for every GPU and for these expert kernels",
    is_assumption=True,
)
GRAPH_GAP = Figure(
    value=1.3,
    unit="us a kernel",
    source="between kernels of a CUDA graph on an H100 (the same article): about 1.3 us; taken for "
    "every GPU",
    is_assumption=True,
)
KERNEL_RAMP = Figure(
    value=0.7,
    unit="us a kernel",
    source="first loads and last stores of a kernel, while memory is not busy: about one latency "
    "of memory",
    is_assumption=True,
)
HOST_LAUNCH = Figure(
    value=5.0,
    unit="us a launch",
    source="4 to 6 us a launch through driver and runtime (susun-blog.com, pegainfer (3)); a graph "
    "counts as one",
    is_assumption=True,
)
RESERVED = Figure(
    value=1.5,
    unit="GB a device",
    source="CUDA context, machine code, graphs and NCCL's buffers: not measured",
    is_assumption=True,
)

FIGURES = {
    "dense efficiency": DENSE_EFFICIENCY,
    "INT4 efficiency": PACKED_EFFICIENCY,
    "gap in a graph": GRAPH_GAP,
    "ramp of a kernel": KERNEL_RAMP,
    "host launch": HOST_LAUNCH,
    "reserved memory": RESERVED,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interconnect:
    """How long a collective over all devices of a machine takes, by its payload."""

    title: str
    latencies: Mapping[str, Latency]
    """By kind, "all-reduce" and "all-gather"."""
    source: str
    assumption: str = ""
    """What of it was not measured."""
    devices: int = 8
    """Measured over so many."""


def _table(
    *points: tuple[Number, Number], bytes_per_second: Number = math.inf
) -> dict[str, Latency]:
    """Both kinds alike, from (KiB, us): where one of them is known only, it stands for both."""
    latency = Latency(
        points=tuple((size * 1024, us * 1e-6) for size, us in points),
        bytes_per_second=bytes_per_second,
    )
    return {"all-reduce": latency, "all-gather": latency}


_PCIE = 20e9
"""Bytes of payload a second of a ring of 8 over PCIe 5.0 x16: 35 GB/s a link by 7/4. Assumed."""
_BEYOND = "above 64 KB, 20 GB/s of payload; all-gathers as all-reduces"

INTERCONNECTS = {
    "pcie-switch": Interconnect(
        title="PCIe switches, NCCL",
        latencies=_table((1, 24), (64, 24), bytes_per_second=_PCIE),
        source="NCCL on 8x RTX PRO 6000 behind PCIe switches: about 24 us, flat up to 64 KB (17 to "
        "24 us on a board with two switches)",
        assumption=_BEYOND,
    ),
    "pcie-switch-one-shot": Interconnect(
        title="PCIe switches, a one-shot kernel in place of NCCL",
        latencies=_table((1, 7.5), (8, 9.2), (32, 16.5), (64, 25.9)),
        source="a custom one-shot all-reduce on 8x RTX PRO 6000: 7.5 us at 1 KB, 9.2 at 8, 16.5 at "
        "32, 25.9 at 64",
        assumption="above 64 KB as steep as below; all-gathers as all-reduces; this project has no "
        "such kernel",
    ),
    "pcie-direct": Interconnect(
        title="PCIe, GPUs on the roots of two sockets, NCCL",
        latencies=_table((1, 48), (64, 48), bytes_per_second=_PCIE),
        source="NCCL on 8x RTX PRO 6000 attached directly to two sockets: 48 us",
        assumption=_BEYOND,
    ),
    "pcie-direct-tuned": Interconnect(
        title="PCIe, two sockets, NCCL with a topology file",
        latencies=_table((1, 26), (64, 26), bytes_per_second=_PCIE),
        source="the same after an NCCL topology file: 26 us",
        assumption=_BEYOND,
    ),
    "nvlink": Interconnect(
        title="NVLink, one-shot kernels",
        latencies=_table((16, 7), (32, 8), (128, 8), (256, 9), (512, 11), (1024, 17), (2048, 26)),
        source="one-stage custom all-reduce on B300 (vllm pull request 37756): 7 us at 16 KiB, 8 "
        "at 32 to 128, 26 at 2 MiB",
        assumption="that XLA's own one-shot kernels are as fast, on every GPU with NVLink and over "
        "8 of them; all-gathers as all-reduces",
    ),
    "nvlink-nccl": Interconnect(
        title="NVLink, NCCL",
        latencies=_table((1, 19.5), (16, 20.7), (32, 22.7), (128, 23.7), (512, 25.2), (1024, 32.4)),
        source="NCCL on 8x H100 (Triton-distributed issue 57): 19.5 us at 1 KB, 20.7 at 16, 23.7 "
        "at 128, 32.4 at 1 MB",
        assumption="all-gathers as all-reduces",
    ),
}


def measured_interconnect(run: Mapping[str, Any], where: str) -> Interconnect:
    """What `scripts/probe_collectives.py` found.

    Args:
        run: the object of its file.
        where: the file's name, for errors.

    Raises:
        ValueError: the file is of something else, or lacks a kind of collective.
    """
    rows, told = run.get("rows"), run.get("conditions")
    if run.get("measures") != "collectives" or not isinstance(told, dict):
        raise ValueError(f"{where}: not a file of scripts/probe_collectives.py")
    points: dict[str, dict[float, float]] = {"all-reduce": {}, "all-gather": {}}
    try:
        for row in rows or []:
            points[row["name"]][float(row["bytes"])] = 1e-6 * float(row["us"])
        devices = int(told["devices"])
        latencies = {
            kind: Latency(points=tuple(sorted(found.items()))) for kind, found in points.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a whole measurement of collectives ({error})") from None
    device = str(told.get("device"))
    return Interconnect(
        title=f"measured on {device}",
        latencies=latencies,
        source=f"{where}: {devices} devices, {device}",
        assumption="" if told.get("platform") == "gpu" else f"measured on {device}, no GPU",
        devices=devices,
    )


def make_machine(hardware: Hardware, interconnect: Interconnect, devices: int) -> Machine:
    """The machine of so many of these GPUs; alone, one has no collectives."""
    return Machine(
        bytes_per_second=hardware.bandwidth,
        kernel_seconds=1e-6 * (GRAPH_GAP.value + KERNEL_RAMP.value),
        host_launch_seconds=1e-6 * HOST_LAUNCH.value,
        latencies=interconnect.latencies if devices > 1 else {},
    )
