"""Named JAX arrays in a folder of their own, written and read by orbax; checksums of their bits.

A folder appears under its name when everything in it is on the disk. Each array is cut into files
as it is cut over devices, uncompressed, so that a device whose share is made of whole files reads
those alone. It knows nothing of the model.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a folder that is being written, or was when its process was killed."""


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array], about: Any) -> None:
    """Writes the arrays, and `about` (JSON) beside them.

    Raises:
        Exception: what orbax and tensorstore raise when the disk fails them.
    """
    # Here and below: importing orbax takes a second, and gives the root logger a handler.
    import orbax.checkpoint as ocp

    with _without_ocdbt_warning(), ocp.Checkpointer(_handler()) as writer:
        writer.save(
            folder,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(dict(arrays)), about=ocp.args.JsonSave(about)
            ),
        )


def read_about(folder: Path) -> Any:
    """What was written beside the arrays."""
    return json.loads((folder / "about" / "metadata").read_text(encoding="utf-8"))


def read_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """These arrays of a folder, each device's share read for that device.

    Orbax notices files that are missing or cut short, but no changed bit: compare `checksums`.

    Raises:
        Exception: what orbax and tensorstore raise when something is missing or spoilt.
    """
    import orbax.checkpoint as ocp

    tree = dict(wanted)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=True,
    )
    with ocp.Checkpointer(_handler()) as reader:
        read = reader.restore(folder, args=ocp.args.Composite(arrays=args)).arrays
    return {name: read[name] for name in wanted}


def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """The `checksum` of each, read back at once."""
    sums = jax.device_get({name: checksum(leaf) for name, leaf in leaves.items()})
    return {name: int(value) for name, value in sums.items()}


@jax.jit
def checksum(leaf: jax.Array) -> jax.Array:
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


def _handler() -> Any:
    import orbax.checkpoint as ocp

    # Packed weights do not compress. A file for each part of an array, not a database of them
    # (OCDBT): its size is known, and copying tools see it.
    return ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
        about=ocp.JsonCheckpointHandler(),
    )


@contextlib.contextmanager
def _without_ocdbt_warning() -> Iterator[None]:
    """Orbax warns at every save that there is no OCDBT database to merge."""

    def keep(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in record.getMessage()

    log = logging.getLogger("absl")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
