"""What a measurement depends on, so that two runs can be told apart; and a count of compiles."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from kimi_jax.runtime.flags import settings

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = 0


@functools.cache
def _listen() -> None:
    def on_event(event: str, duration_secs: float, **_: Any) -> None:
        global _compiles
        _compiles += event == _COMPILE_EVENT

    jax.monitoring.register_event_duration_secs_listener(on_event)


def num_compiles() -> int:
    """Programs XLA has compiled in this process since the first call of this function."""
    _listen()
    return _compiles


def conditions(**more: Any) -> dict[str, Any]:
    """Versions, device, clocks, flags and commit of this run, and what else the caller knows."""
    devices = jax.devices()
    return {
        "kimi_jax": _version("kimi-jax"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "cuda_plugin": _version("jax-cuda12-plugin") or _version("jax-cuda13-plugin"),
        "backend": devices[0].client.platform_version.splitlines()[0],
        "flax": importlib.metadata.version("flax"),
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "device_count": len(devices),
        "cpu_cores": os.cpu_count(),
        "cpu": _cpu(),
        "clocks": _clocks(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": settings(),
        "commit": _commit(),
        **more,
    }


def _version(distribution: str) -> str | None:
    """Of an installed distribution; a checkout that is merely on the path has none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)


def _clocks() -> list[str] | None:
    """Each NVIDIA GPU's SM and memory clock, power limit and driver; None where there is none."""
    query = "clocks.sm,clocks.mem,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip().splitlines() if run.returncode == 0 else None


def _commit() -> str | None:
    """The checkout's commit, "-dirty" where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*args: str) -> str:
        run = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
        return run.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if head and git("status", "--porcelain", "-uno") else head or None
    except OSError:
        return None
