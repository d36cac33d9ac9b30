"""Every byte of a checkpoint read: the hub's hashes compared, values that are no numbers named.

The hashes are those the hub's client leaves beside a download: the metadata files of
`hf download --local-dir`, or the names of the blobs a cache snapshot links to. It knows nothing of
the model: names are only names.
"""

import bisect
import hashlib
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint.reader import DTYPES, CheckpointError, CheckpointFiles, TensorInfo

METADATA = Path(".cache") / "huggingface" / "download"
_CHUNK = 8 << 20
_MAX_THREADS = 16
# Bits of an infinity without its sign, by dtype: more is NaN.
_INFINITY = {
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F32": np.uint32(0x7F80_0000),
    "F64": np.uint64(0x7FF0_0000_0000_0000),
}


class Verified(NamedTuple):
    """What reading everything found."""

    problems: list[str]
    broken: dict[str, str]
    """Files whose bytes are not those of the hub, and why."""
    num_bytes: int
    hashed: list[str]
    """Files that were compared with a hash."""


def known_hashes(folder: Path) -> dict[str, str]:
    """Of each file of the folder that the hub's client has left a hash of: 64 hex digits are its
    sha256, 40 those of a git blob."""
    out: dict[str, str] = {}
    for path in folder.iterdir():
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            etag = target.name if target.parent.name == "blobs" else ""
        else:
            metadata = folder / METADATA / f"{path.name}.metadata"
            try:
                lines = metadata.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError):
                continue
            # Commit, hash, time.
            etag = lines[1].strip().strip('"') if len(lines) > 1 else ""
        if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", etag) and path.is_file():
            out[path.name] = etag
    return out


def verify(files: CheckpointFiles, hashes: Mapping[str, str], *, progress: bool = True) -> Verified:
    """Reads every shard once, and every other file that has a hash; many at a time.

    Args:
        files: the shards that are whole.
        hashes: by file name, as `known_hashes` gives them.
        progress: shows bytes, GB/s and the time left on stderr when that is a terminal.
    """
    tensors: dict[str, list[TensorInfo]] = {shard: [] for shard in files.shard_sizes}
    for info in files.tensors.values():
        tensors[info.shard].append(info)
    sizes = dict(files.shard_sizes)
    others = [name for name in hashes if not name.endswith(".safetensors")]
    sizes |= {name: (files.folder / name).stat().st_size for name in others}
    bar = tqdm(
        total=sum(sizes.values()),
        unit="B",
        unit_scale=True,
        desc="verifying",
        disable=None if progress else True,
    )
    problems: list[str] = []
    broken: dict[str, str] = {}
    with bar, ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        jobs = {
            pool.submit(_verify_shard, files, shard, infos, hashes.get(shard), bar): shard
            for shard, infos in tensors.items()
        }
        jobs |= {
            pool.submit(_verify_small, files.folder / name, hashes[name], bar): name
            for name in others
        }
        for job in as_completed(jobs):
            name = jobs[job]
            try:
                found, is_same = job.result()
            except (OSError, CheckpointError) as error:
                found, is_same = [f"{name}: not readable ({error})"], False
            problems += found
            if not is_same:
                broken[name] = found[-1].removeprefix(f"{name}: ")
    hashed = sorted(name for name in hashes if name in sizes)
    return Verified(sorted(problems), broken, sum(sizes.values()), hashed)


def _verify_small(path: Path, expected: str, bar: tqdm) -> tuple[list[str], bool]:
    data = path.read_bytes()
    bar.update(len(data))
    digest = _digest(expected, len(data))
    digest.update(data)
    return _compare(path.name, digest, expected)


def _verify_shard(
    files: CheckpointFiles, shard: str, infos: list[TensorInfo], expected: str | None, bar: tqdm
) -> tuple[list[str], bool]:
    """What is wrong with a shard, a different hash last; and whether its hash is the expected."""
    infos = sorted(infos, key=lambda info: info.offset)
    ends = [info.offset + info.num_bytes for info in infos]
    size, at = files.shard_sizes[shard], 0
    digest = None if expected is None else _digest(expected, size)
    bad: dict[str, list[int]] = {}
    buffer = _buffer()
    while at < size:
        stop = min(at + _CHUNK, size)
        crossing = bisect.bisect_left(ends, stop)
        if stop < size and crossing < len(infos) and infos[crossing].offset < stop:
            # No value is cut in two.
            info = infos[crossing]
            stop -= (stop - info.offset) % DTYPES[info.dtype].itemsize
        chunk = buffer[: stop - at]
        files.read_shard_into(chunk, shard, at)
        if digest is not None:
            digest.update(chunk.data)
        for info in infos[bisect.bisect_right(ends, at) :]:
            if info.offset >= stop:
                break
            first, last = max(info.offset, at), min(info.offset + info.num_bytes, stop)
            counts = _not_finite(info.dtype, chunk[first - at : last - at])
            if counts is not None:
                total = bad.setdefault(info.name, [0, 0])
                total[0] += counts[0]
                total[1] += counts[1]
        bar.update(stop - at)
        at = stop
    problems = []
    for name, (num_nan, num_infinite) in bad.items():
        parts = [f"{num_nan} NaN"] if num_nan else []
        parts += [f"{num_infinite} infinite"] if num_infinite else []
        problems.append(f"{name} ({shard}): {' and '.join(parts)} values")
    found, is_same = ([], True) if digest is None else _compare(shard, digest, expected or "")
    return problems + found, is_same


def _not_finite(dtype: str, raw: np.ndarray) -> tuple[int, int] | None:
    """Numbers of NaN and of infinite values among these bytes; None if there are none."""
    infinity = _INFINITY.get(dtype)
    if infinity is None:
        if not dtype.startswith("F8"):
            return None
        values = raw.view(DTYPES[dtype]).astype(np.float32)
        counts = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        return counts if any(counts) else None
    bits = raw.view(infinity.dtype) << infinity.dtype.type(1)  # the sign falls out
    limit = infinity << infinity.dtype.type(1)
    if not bits.size or bits.max() < limit:
        return None
    return int((bits > limit).sum()), int((bits == limit).sum())


def _digest(expected: str, size: int) -> Any:
    if len(expected) == 64:
        return hashlib.sha256()
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(f"blob {size}\0".encode())
    return digest


def _compare(name: str, digest: Any, expected: str) -> tuple[list[str], bool]:
    if digest.hexdigest() == expected:
        return [], True
    kind = "sha256" if len(expected) == 64 else "git hash"
    reason = f"its bytes are not those of the hub: {kind} {digest.hexdigest()}, expected {expected}"
    return [f"{name}: {reason}"], False


_of_thread = threading.local()


def _buffer() -> np.ndarray:
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = np.empty(_CHUNK, np.uint8)
    return _of_thread.buffer
