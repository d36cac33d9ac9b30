"""Which implementation of an op runs: its plain jnp reference or its kernel, and on what.

    None         the best the device supports: the kernel where it can run, else the reference
    "xla"        the plain jnp reference
    "triton"     the Pallas kernel in the Triton lowering (NVIDIA, compute capability 8.0 to 12.x)
    "interpret"  the same kernel, evaluated by JAX on any device; for tests

The choice is made while a program is traced, from the device it will run on: of the mesh inside
`jax.shard_map`, else JAX's default device. `compile_for` names another one, for programs compiled
on a machine that has no such device. Nothing here is part of a jit cache's key, so a jitted
function keeps what was chosen when it was first traced.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, cast, get_args

import jax

Implementation = Literal["xla", "triton", "interpret"]

OLDEST_CAPABILITY = (8, 0)
"""bfloat16 products in tensor cores begin here."""

_log = logging.getLogger(__name__)
_said: set[str] = set()


class ImplementationError(ValueError):
    """A named implementation that cannot run; the message says why."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for; `capability` is (9, 0) for an H100, None off NVIDIA."""

    platform: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: Any) -> "Target":
        """The target a `jax.Device` is."""
        text = getattr(device, "compute_capability", None)
        # AMD devices have one too ("gfx90a"); the kernels have never been compiled for them.
        parts = str(text).split(".")
        is_nvidia = device.platform in ("gpu", "cuda") and all(p.isdecimal() for p in parts)
        if not is_nvidia or len(parts) != 2:
            return cls(device.platform)
        return cls("gpu", (int(parts[0]), int(parts[1])))

    def obstacle(self) -> str | None:
        """Why no kernel runs here; None if kernels do."""
        if self.capability is None:
            return f"the Triton lowering needs an NVIDIA GPU, and the device is a {self.platform}"
        if self.capability < OLDEST_CAPABILITY:
            major, minor = self.capability
            return f"compute capability {major}.{minor} is below 8.0"
        return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation and the target it was chosen for."""

    implementation: Implementation
    target: Target

    @property
    def is_kernel(self) -> bool:
        """Whether the kernel runs, compiled or interpreted."""
        return self.implementation != "xla"

    @property
    def interpret(self) -> bool:
        """Whether the kernel is evaluated by JAX rather than compiled."""
        return self.implementation == "interpret"


_target: ContextVar[Target | None] = ContextVar("target", default=None)
_implementation: ContextVar[Implementation | None] = ContextVar("implementation", default=None)


@contextlib.contextmanager
def compile_for(target: Target) -> Iterator[None]:
    """Programs traced inside are for this target, whatever devices this machine has."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


@contextlib.contextmanager
def using(implementation: Implementation | None) -> Iterator[None]:
    """Ops traced inside that name no implementation take this one."""
    token = _implementation.set(_checked(implementation))
    try:
        yield
    finally:
        _implementation.reset(token)


def current_target() -> Target:
    """What a program traced here and now will run on."""
    named = _target.get()
    if named is not None:
        return named
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = _default_device()
    if abstract is None or abstract.device_kind == device.device_kind:
        return Target.of(device)
    with contextlib.suppress(RuntimeError):
        for other in jax.devices(abstract.platform):
            if other.device_kind == abstract.device_kind:
                return Target.of(other)
    return Target(abstract.platform or "device of an unknown kind")


def choose(
    op: str, implementation: Implementation | None, obstacle: Callable[[], str | None]
) -> Choice:
    """What runs `op`; `obstacle()` says why its kernel cannot take these operands, if it cannot.

    It is asked only where the device could run the kernel.

    Raises:
        ImplementationError: the implementation named, here or by `using`, cannot run.
    """
    wanted = _checked(implementation) or _implementation.get()
    target = current_target()
    if wanted == "xla":
        return Choice("xla", target)
    reason = None if wanted == "interpret" else target.obstacle()
    reason = reason or obstacle()
    if reason is None:
        return Choice(wanted or "triton", target)
    if wanted is not None:
        raise ImplementationError(f"{op} cannot run as {wanted!r}: {reason}")
    reason = f"{op} runs as plain XLA: {reason}"
    if reason not in _said:
        _said.add(reason)
        _log.info(reason)
    return Choice("xla", target)


def _checked(implementation: str | None) -> Implementation | None:
    if implementation is not None and implementation not in get_args(Implementation):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ImplementationError(f"no implementation {implementation!r}: there are {names}, None")
    return cast(Implementation | None, implementation)


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.devices(chosen)[0]
