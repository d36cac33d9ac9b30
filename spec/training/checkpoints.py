"""Checkpoints of a training run: the newest whole one is gone on from, on any number of devices.

A step holds the arrays of a state by their paths in the tree, and beside them, in the same atomic
write, what else the run needs to go on. Orbax writes and reads them; this adds what a run that was
killed needs: a step that is not whole is passed over, one of another run or another structure is
refused. It knows nothing of the state, and runs in one process.
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from kimi_jax.checkpoint.reader import summarise
from kimi_jax.checkpoint.records import as_json, differences, fields, one_line, write_json

FINGERPRINT_NAME = "fingerprint.json"
_ASIDE = ".unusable"
# What orbax puts into a step's folder; all of it is there once the folder has its final name.
_PARTS = ("_CHECKPOINT_METADATA", "state", "about")

_log = logging.getLogger(__name__)


class ResumeError(ValueError):
    """Checkpoints that this run cannot go on from or add to; names what differs."""


class Checkpoints:
    """The checkpoints of one run in a folder, the last `keep` of them.

    Every save is on its way to the disk when `save` returns and complete after `wait`; a save that
    failed raises at the next call of either.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fingerprint: dict[str, Any],
        keep: int = 2,
        every: int = 1,
    ):
        """Opens a folder, new or left by an earlier part of the same run.

        Args:
            folder: made when it does not exist.
            fingerprint: all that must be the same in every part of the run, JSON.
            keep: how many of the newest checkpoints stay.
            every: `save` keeps the steps that are multiples of this.

        Raises:
            ResumeError: the folder is of a run with another fingerprint, or of something else.
        """
        if keep < 1 or every < 1:
            raise ValueError(f"keep is {keep}, every is {every}; both must be at least 1")
        self.folder = Path(folder).expanduser().absolute()
        self.every = every
        # A killed save leaves a folder under a temporary name.
        self._options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager: ocp.CheckpointManager | None = None
        self._saved: int | None = None
        self._unreadable: set[int] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_fingerprint(fingerprint)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def latest(self) -> int | None:
        """The newest step that is whole, or being written."""
        steps = [step for step in self._steps() if step not in self._unreadable]
        steps = [step for step in steps if not self._missing(step)]
        return max([*steps, *([] if self._saved is None else [self._saved])], default=None)

    def save(self, step: int, state: Any, extra: dict[str, Any], *, force: bool = False) -> bool:
        """Starts to write a step; False when it is stored already or is not to be kept.

        The arrays may be donated as soon as this returns.

        Args:
            step: how many steps the state has behind it.
            state: any tree of JAX arrays.
            extra: what else the run needs to go on, JSON.
            force: keeps a step that is no multiple of `every`.

        Raises:
            ResumeError: a later step is stored: the run did not go on from it.
            TypeError: a leaf is no JAX array, or `extra` is not JSON.
        """
        if step % self.every and not force:
            return False
        self.wait()
        latest = self.latest
        if step == latest:
            return False
        if latest is not None and step < latest:
            raise ResumeError(
                f"{self.folder}: step {step} is to be saved, step {latest} is stored already; go "
                "on from it (restore) or give an empty folder"
            )
        leaves = _named(state)
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"{name} of the state is a {type(leaf).__name__}, not a JAX array")
        about = {
            "extra": as_json(extra, "extra"),
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "checksums": _checksums(leaves),
        }
        self._open_manager().save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(leaves), about=ocp.args.JsonSave(about)
            ),
            # Whether to save was decided above.
            force=True,
        )
        self._saved = step
        return True

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest whole step: its number, state and `extra`; None where nothing was saved.

        Steps that are not whole or cannot be read are passed over, each with a warning in the log.

        Args:
            like: the state's tree, of arrays or of `jax.ShapeDtypeStruct`; what is read lies on
                the devices as its leaves do, without a sharding on the first device.

        Raises:
            ResumeError: the stored state has other leaves; or steps are there and none is readable.
        """
        self.wait()
        wanted = {name: _struct(leaf) for name, leaf in _named(like).items()}
        reasons = {}
        for step in self._steps():
            if missing := self._missing(step):
                _log.warning(
                    "%s: step %d is not whole (no %s), passed over",
                    self.folder,
                    step,
                    summarise(missing),
                )
                continue
            try:
                state, extra = self._read(step, wanted)
            except (ResumeError, MemoryError):
                raise
            except Exception as error:  # a broken file may raise nearly anything
                if "RESOURCE_EXHAUSTED" in str(error):
                    raise
                reasons[step] = one_line(error)
                self._unreadable.add(step)
                _log.warning(
                    "%s: step %d cannot be read (%s), passed over",
                    self.folder,
                    step,
                    reasons[step],
                )
                continue
            return step, jax.tree.unflatten(jax.tree.structure(like), state.values()), extra
        if reasons:
            lines = [f"step {step}: {reason}" for step, reason in reasons.items()]
            raise ResumeError(f"{self.folder}: no step can be read; {'; '.join(lines)}")
        return None

    def wait(self) -> None:
        """Returns once every save is on the disk; raises what kept one from it."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception:
            # It counts the step that failed as stored; a new one looks at the folder.
            manager, self._manager, self._saved = self._manager, None, None
            with contextlib.suppress(Exception):
                manager.close()
            raise

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self.wait()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    def _steps(self) -> list[int]:
        """Numbers of the folders that are named as steps, whole or not, the newest first."""
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return sorted((int(name) for name in names if _is_step(name)), reverse=True)

    def _missing(self, step: int) -> list[str]:
        folder = self.folder / str(step)
        return [name for name in _PARTS if not (folder / name).exists()]

    def _read(
        self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The leaves in the order of `wanted`, and the step's `extra`."""
        folder = self.folder / str(step)
        # A manager would read the other steps too.
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            args = ocp.args.Composite(about=ocp.args.JsonRestore())
            about = reader.restore(folder, args=args).about
            described = {name: _describe(leaf) for name, leaf in wanted.items()}
            if differing := differences(about["leaves"], described):
                raise ResumeError(
                    f"{self.folder}, step {step}: the stored state has other leaves (there, here): "
                    f"{summarise(differing)}"
                )
            args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            read = reader.restore(folder, args=args).state
        # Orbax notices files that are cut short, but not a changed bit of an array's values.
        for name, checksum in _checksums(read).items():
            if checksum != about["checksums"][name]:
                raise ValueError(f"{name} is not what was saved")
        return {name: read[name] for name in wanted}, about["extra"]

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            for step in self._steps():
                if step in self._unreadable or self._missing(step):
                    self._set_aside(step)
            self._manager = ocp.CheckpointManager(self.folder, options=self._options)
        return self._manager

    def _set_aside(self, step: int) -> None:
        # Orbax takes every folder of this name for a step, and would count and delete by it.
        name, number = f"{step}{_ASIDE}", 2
        while (self.folder / name).exists():
            name, number = f"{step}{_ASIDE}-{number}", number + 1
        os.rename(self.folder / str(step), self.folder / name)
        self._unreadable.discard(step)
        _log.warning("%s: step %d was set aside as %s", self.folder, step, name)

    def _check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        path = self.folder / FINGERPRINT_NAME
        ours = as_json(fingerprint, "fingerprint")
        if not path.exists():
            if steps := self._steps():
                raise ResumeError(
                    f"{self.folder} holds {summarise(map(str, steps))} but no {FINGERPRINT_NAME}; "
                    "it is not this run's folder"
                )
            write_json(path, ours)
            return
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{path}: not readable ({one_line(error)})") from None
        differing = differences(fields(theirs), fields(ours))
        if differing and not self._steps():
            # A run that ended before its first checkpoint binds no later one.
            write_json(path, ours)
        elif differing:
            raise ResumeError(
                f"{self.folder} is of a run that differs (there, here): {'; '.join(differing)}; "
                "give the options of that run, or another folder"
            )


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their path, in the tree's order."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        raise ValueError("two leaves of the state have the same path")
    return leaves


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"


def _checksums(leaves: dict[str, jax.Array]) -> dict[str, int]:
    sums = jax.device_get({name: _checksum(leaf) for name, leaf in leaves.items()})
    return {name: int(value) for name, value in sums.items()}


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Of the bits, modulo 2^32: exact, so the same however the array is cut over devices.

    Every odd factor has an inverse, so that no single changed element leaves the sum as it was.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    words = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    bits = lax.bitcast_convert_type(leaf, words).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place * jnp.uint32(size) + index
    factor = place * jnp.uint32(2) + jnp.uint32(1)
    return jnp.sum(bits * factor, dtype=jnp.uint32)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and name == str(int(name))
