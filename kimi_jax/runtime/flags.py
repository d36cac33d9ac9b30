"""Process-wide XLA settings, in one place because XLA reads them once, when its backend starts."""

import logging
import math
import os
from collections.abc import Mapping

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
