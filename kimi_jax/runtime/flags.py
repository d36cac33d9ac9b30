"""Process-wide settings of XLA, NCCL and JAX's compile cache, in one place.

XLA and NCCL read theirs once, when a backend starts. What the user has set stays, and wins.
"""

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
from jax._src import xla_bridge  # the only place that tells whether a backend has started

MOST_SIMULATED_DEVICES = 64
"""A mesh is simulated on a CPU up to this size; a typo is not."""

_log = logging.getLogger(__name__)


def set_host_device_count(count: int) -> None:
    """Makes the CPU backend show `count` devices, for running a mesh without accelerators.

    Raises:
        RuntimeError: the backend is already up with fewer.
    """
    if xla_bridge.backends_are_initialized():
        if jax.device_count() < count:
            raise RuntimeError(
                f"{count} devices are wanted, but JAX has already started with "
                f"{jax.device_count()}: call set_host_device_count before anything that uses JAX, "
                f"or set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        return
    flag = "--xla_force_host_platform_device_count"
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{flag}={count}"])
    _log.info("XLA_FLAGS=%s", os.environ["XLA_FLAGS"])


def simulate_mesh(sizes: Mapping[str, int] | None) -> None:
    """Makes the CPU backend show the devices of a mesh; None, and a mesh of one, need nothing.

    Harmless where there turn out to be accelerators.

    Raises:
        RuntimeError: the backend is already up with fewer.
    """
    count = 1 if sizes is None else math.prod(sizes.values())
    if 1 < count <= MOST_SIMULATED_DEVICES:
        set_host_device_count(count)


GRAPHS_WITH_COLLECTIVES = "--xla_gpu_enable_command_buffer=+COLLECTIVES"


def set_gpu_flags(*, collectives_in_graphs: bool = True) -> None:
    """Makes XLA put collectives into CUDA graphs too, so that a whole cycle can be one graph.

    JAX before 0.11 accepts the flag and keeps collectives outside, so there nothing is set. Flags
    the user has set in XLA_FLAGS stay, and win. Harmless without a GPU.

    Args:
        collectives_in_graphs: False leaves XLA's default, one graph between each two collectives:
            collectives inside have been reported as slow (openxla/xla#35360) and as hanging
            (marin#8277).

    Raises:
        RuntimeError: a GPU's backend is already up without them.
    """
    name = GRAPHS_WITH_COLLECTIVES.partition("=")[0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    is_settled = any(flag.partition("=")[0] == name for flag in flags)
    if not collectives_in_graphs or jax.__version_info__ < (0, 11) or is_settled:
        return
    if xla_bridge.backends_are_initialized():
        if jax.default_backend() == "cpu":
            return
        raise RuntimeError(
            "JAX has already started, and XLA reads its flags once: call set_gpu_flags before "
            f"anything that uses JAX, or set XLA_FLAGS={GRAPHS_WITH_COLLECTIVES}"
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, GRAPHS_WITH_COLLECTIVES])
    _log.info("XLA_FLAGS=%s", os.environ["XLA_FLAGS"])


MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
GPU_ENVIRONMENT = {MEMORY_FRACTION: "0.95", "NCCL_P2P_LEVEL": "SYS"}
"""XLA takes 0.75 of a GPU's memory by default, and the weights of Kimi-K2.5 on 8 GPUs of 96 GB
alone are 0.74 of it; the context, NCCL and graphs live in the rest. NCCL may go directly from GPU
to GPU wherever the machine can, also across PCIe root complexes."""

_OLD_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def parse_nccl(text: str) -> dict[str, str]:
    """Settings from "NCCL_PROTO=LL,NCCL_ALGO=Ring".

    Raises:
        ValueError: another form.
    """
    settings: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not name.startswith("NCCL_") or not value or name in settings:
            raise ValueError(f"{text!r}: expected e.g. NCCL_PROTO=LL,NCCL_P2P_LEVEL=SYS")
        settings[name] = value
    return settings


def set_gpu_environment(nccl: Mapping[str, str] | None = None) -> None:
    """Sets `GPU_ENVIRONMENT` where the user has set nothing, and these NCCL settings over it.

    Harmless without a GPU.

    Raises:
        RuntimeError: a GPU's backend is already up without them.
    """
    defaults = dict(GPU_ENVIRONMENT)
    if _OLD_MEMORY_FRACTION in os.environ:
        # XLA refuses both.
        del defaults[MEMORY_FRACTION]
    wanted = {name: value for name, value in defaults.items() if name not in os.environ}
    wanted |= nccl or {}
    missing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if not missing:
        return
    if xla_bridge.backends_are_initialized():
        if jax.default_backend() == "cpu":
            return
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        raise RuntimeError(
            "JAX has already started: call set_gpu_environment before anything that uses JAX, or "
            f"set {words}"
        )
    os.environ.update(missing)
    _log.debug("%s", missing)


def settings() -> dict[str, str]:
    """What of all this is set in this process's environment, by name."""
    names = (
        "XLA_FLAGS",
        MEMORY_FRACTION,
        _OLD_MEMORY_FRACTION,
        "CUDA_VISIBLE_DEVICES",
        "JAX_PLATFORMS",
    )
    told = {name: os.environ[name] for name in names if os.environ.get(name)}
    return told | {name: os.environ[name] for name in sorted(os.environ) if name[:5] == "NCCL_"}


def default_compile_cache() -> Path:
    """`JAX_COMPILATION_CACHE_DIR` where it is set, else a folder of the user's cache."""
    if named := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kimi_jax" / "compiled"


def set_compile_cache(folder: Path | None) -> None:
    """Keeps compiled programs in this folder from run to run; None keeps none.

    Every program, however quickly compiled: there are few, and a start needs all of them.

    Raises:
        OSError: the folder cannot be made.
    """
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
