"""Tells a checkpoint from another without reading it all, in published form or converted."""

import hashlib
import os
from pathlib import Path

from kimi_jax.checkpoint.converted import read_record

_SAMPLED_BYTES = 1 << 16


def checkpoint_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Of the configuration and the weights; the same for a checkpoint and what was converted of it.

    Tells a fine-tuned model from its origin.
    """
    folder = Path(folder)
    record = read_record(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    weights = weights_digest(folder) if record is None else record.source["weights_sha256"]
    digest.update(weights.encode())
    return digest.hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Of each safetensors shard its name, size and header, and its first and last 64 KiB.

    Cheap, since nothing else is read; it does not see a change in the middle of a shard that keeps
    the shard's size, which only the hub's hashes or reading everything would.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            digest.update(file.read(size + _SAMPLED_BYTES))
            file.seek(max(0, path.stat().st_size - _SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
