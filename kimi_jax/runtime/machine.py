"""What devices a machine has, whether they can serve together, and why a GPU is not among them.

The checks are functions of plain data, so that they can be asked about any machine.
"""

import dataclasses
import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_jax.runtime.mesh import MeshError

FIRST_DRIVERS = {"cuda13": 580, "cuda12": 525}
"""The oldest major version of the driver each extra runs on (CUDA's compatibility tables)."""

MOST_MEMORY_DIFFERENCE = 0.02
"""Of two devices that count as alike: XLA gives itself a share of what is free."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device; `memory_bytes` is what JAX may take of it, None where it does not say."""

    kind: str
    platform: str
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
    """What the system, not JAX, says of NVIDIA GPUs."""

    names: tuple[str, ...]
    """Those on the PCI bus, or that the driver lists."""
    driver: str | None
    """The driver's version; None where it does not answer."""
    plugin: str | None
    """The installed CUDA plugin of JAX, such as jax-cuda13-plugin."""


def devices_of(devices: Sequence[Any]) -> list[Device]:
    """What JAX says of its `jax.Device`s; those of a CPU share the memory that is available."""
    available = available_memory()
    share = None if available is None else available // len(devices)
    return [
        Device(
            kind=device.device_kind,
            platform=device.platform,
            memory_bytes=share
            if device.platform == "cpu"
            else (device.memory_stats() or {}).get("bytes_limit"),
        )
        for device in devices
    ]


def available_memory() -> int | None:
    """Bytes the system can give without swapping; None where Linux does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def used_memory(devices: Sequence[Any]) -> list[int] | None:
    """Bytes in use on each device; None where they do not report it."""
    stats = [device.memory_stats() for device in devices]
    if not all(each and "bytes_in_use" in each for each in stats):
        return None
    return [each["bytes_in_use"] for each in stats if each]


def find_gpus() -> Gpus:
    """What nvidia-smi, or else the PCI bus, and the installed packages say."""
    names, driver = [], None
    for line in _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"):
        name, _, driver = line.rpartition(", ")
        names.append(name)
    if not names:
        pci = [line for line in _lines("lspci") if "NVIDIA" in line]
        names = [
            line.partition(": ")[2]
            for line in pci
            if "3D controller" in line or "VGA compatible" in line
        ]
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    installed = [name for name in plugins if importlib.util.find_spec(name) is not None]
    plugin = installed[0].replace("_", "-") if installed else None
    return Gpus(names=tuple(names), driver=driver, plugin=plugin)


def _lines(*command: str) -> list[str]:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.strip().splitlines() if run.returncode == 0 else []


def wants_cpu(platform: str | None) -> bool:
    """Whether the CPU was asked for, by an option or in JAX_PLATFORMS."""
    return platform == "cpu" or (platform is None and os.environ.get("JAX_PLATFORMS") == "cpu")


def check_gpus_are_used(gpus: Gpus, backend: str) -> None:
    """Refuses to run on another backend where there are GPUs: ask for the CPU to do that.

    Raises:
        MeshError: what is missing, and how to get it.
    """
    if backend == "gpu" or not gpus.names:
        return
    here = f"{len(gpus.names)} NVIDIA GPU(s) are here ({gpus.names[0]}), but JAX runs on {backend}"
    on_cpu = "--platform cpu runs without them"
    if gpus.driver is None:
        raise MeshError(
            f"{here}: the NVIDIA driver does not answer (nvidia-smi); install driver "
            f"{FIRST_DRIVERS['cuda13']} or newer; {on_cpu}"
        )
    if gpus.plugin is None:
        raise MeshError(
            f'{here}: its CUDA plugin is not installed; pip install "kimi-jax[{_extra(gpus)}]" '
            f"(driver {gpus.driver}); {on_cpu}"
        )
    raise MeshError(
        f"{here}: {gpus.plugin} found no usable GPU with driver {gpus.driver}; "
        f"python -c \"import jax; jax.devices('cuda')\" says why (the extra for this driver is "
        f"{_extra(gpus)}; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES may hide GPUs); {on_cpu}"
    )


def _extra(gpus: Gpus) -> str:
    major = int((gpus.driver or "0").partition(".")[0])
    fitting = [extra for extra, first in FIRST_DRIVERS.items() if major >= first]
    return fitting[0] if fitting else "cuda12"


def check_count(devices: Sequence[Device], wanted: int) -> None:
    """Refuses a mesh of more devices than there are.

    Raises:
        MeshError: how many there are, and what to ask for.
    """
    if wanted <= len(devices):
        return
    platform = devices[0].platform
    hint = (
        "CUDA_VISIBLE_DEVICES may hide some"
        if platform == "gpu"
        else f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} simulates them"
    )
    raise MeshError(
        f"the mesh needs {wanted} devices, {len(devices)} {platform} found ({devices[0].kind}); "
        f"--mesh tensor={len(devices)} takes those; {hint}"
    )


def check_alike(devices: Sequence[Device]) -> None:
    """Refuses devices of several kinds or memory sizes: each holds the same share.

    Raises:
        MeshError: lists the devices by kind, and how to choose among them.
    """
    groups: dict[str, list[int]] = {}
    sizes = [device.memory_bytes for device in devices if device.memory_bytes]
    differ = bool(sizes) and min(sizes) < (1 - MOST_MEMORY_DIFFERENCE) * max(sizes)
    for place, device in enumerate(devices):
        memory = f" with {(device.memory_bytes or 0) / 1e9:.1f} GB" if differ else ""
        groups.setdefault(f"{device.kind}{memory}", []).append(place)
    if len(groups) < 2:
        return
    listed = "; ".join(f"{', '.join(map(str, at))}: {name}" for name, at in groups.items())
    most = max(groups.values(), key=len)
    raise MeshError(
        f"the mesh mixes devices, of which each would hold the same share ({listed}); choose alike "
        f"ones, such as CUDA_VISIBLE_DEVICES={','.join(map(str, most))}"
    )
