"""A checkpoint folder's tensors, every shard's header checked before anything is built.

Finds the folder (a path, or a hub id through huggingface_hub's cache), reads the safetensors index
and the header of each shard itself, gathers all that is wrong into one error, and hands out
memory-mapped views with exact dtypes. It knows nothing of the model: names are only names.
"""

import dataclasses
import json
import logging
import math
import mmap
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# What running a published model needs; its remote code, figures and other weights stay away.
FILE_PATTERNS = ("*.json", "*.jinja", "tiktoken.model", "model*.safetensors")
# The limit of the safetensors library itself.
LARGEST_HEADER = 100_000_000

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; `problems` lists every reason found."""

    def __init__(self, where: str | Path, problems: Sequence[str]):
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{where}: {self.problems[0]}")
        else:
            lines = [f"{where}: {len(self.problems)} problems", *self.problems]
            super().__init__("\n  ".join(lines))


def summarise(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many there are when that is more."""
    names = list(names)
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more ({len(names)} in all)"


def resolve(
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    patterns: Sequence[str] = FILE_PATTERNS,
) -> Path:
    """The local folder of a checkpoint: a folder as it is, a hub id through the hub's cache.

    Only a plain "owner/name" goes to the hub. An existing folder never does, nor does anything
    that looks like a path. With the network off (HF_HUB_OFFLINE, or no connection) a cached
    snapshot is used.

    Raises:
        CheckpointError: no such folder, or the hub cannot give one; or a revision of a folder.
    """
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if text and path.is_dir():
        if revision is not None:
            raise CheckpointError(text, [f"is a folder; revision {revision!r} is for hub ids"])
        return path.absolute()
    if path.is_symlink() and not path.exists():
        raise CheckpointError(text, [f"a dangling link to {os.readlink(path)}"])
    if text and path.exists():
        raise CheckpointError(text, ["is a file; give the folder that holds it"])
    if not isinstance(path_or_id, str) or not _is_hub_id(text):
        raise CheckpointError(repr(text), ["no such folder (a hub id is written owner/name)"])
    return _download(text, revision, patterns)


def _is_hub_id(text: str) -> bool:
    # "models/kimi" is a path where a folder "models" exists; "./x/y" and "/x" never are ids.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII):
        return False
    return not Path(text).parent.exists()


def _download(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(patterns))
        ).absolute()
    except Exception as error:  # the hub's client raises its own, httpx's and OS errors alike
        partial = getattr(error, "snapshot_path", None)
        if partial is not None and Path(partial).is_dir():
            _log.warning("%s: the cached snapshot is incomplete and the hub is out of reach", repo)
            return Path(partial).absolute()
        reason = f"no such folder here, and the hub did not give it ({_one_line(error)})"
        raise CheckpointError(repo, [reason]) from error


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: shard, offset from the file's start, dtype as the file spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class CheckpointFiles:
    """The tensors of a checked checkpoint folder, by published name.

    The shards stay mapped and open while this object or an array read from it lives, so neither a
    change of the working directory nor a renamed folder matters.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], shards: dict[str, "_Shard"]):
        self.folder = folder
        self.tensors = tensors
        self._shards = shards

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "CheckpointFiles":
        """Maps the shards and checks their headers against the files and the index.

        Raises:
            CheckpointError: names everything that is wrong; no tensor has been read.
        """
        found = survey(folder)
        files = found.files
        if found.problems:
            raise CheckpointError(files.folder, found.problems)
        return cls(files.folder, files.tensors, files._shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read(
        self,
        name: str,
        index: tuple[slice, ...] = (),
        *,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """A read-only view of the mapped file; bytes come from disk when they are touched.

        Args:
            name: published name.
            index: the part wanted; the rest is never read.
            dtype: reinterprets the stored bytes, no conversion.
            shape: of the array that `index` cuts, by default the stored one.
        """
        info = self.tensors[name]
        start, stop = info.offset, info.offset + info.num_bytes
        raw = np.frombuffer(self._shards[info.shard].mapped, np.uint8)[start:stop]
        array = raw.view(DTYPES[info.dtype] if dtype is None else dtype)
        return array.reshape(info.shape if shape is None else shape)[(*index, ...)]

    def read_into(self, target: np.ndarray, name: str, first_byte: int = 0) -> None:
        """Fills `target` (contiguous) with the tensor's stored bytes from `first_byte` on.

        Through the file, not the mapping: a buffer used again and again costs no page faults, and
        the process is never charged for pages of the file. Safe to call from many threads.

        Raises:
            CheckpointError: the file ends before the tensor does.
            OSError: the file cannot be read.
        """
        info = self.tensors[name]
        wanted = target.reshape(-1).view(np.uint8).data
        if not 0 <= first_byte <= first_byte + len(wanted) <= info.num_bytes:
            raise ValueError(
                f"{name}: bytes {first_byte}..{first_byte + len(wanted)} of {info.num_bytes}"
            )
        self._shards[info.shard].read_into(wanted, info.offset + first_byte)

    @property
    def shard_sizes(self) -> dict[str, int]:
        """Bytes of every shard, header included."""
        return {name: shard.size for name, shard in self._shards.items()}

    def read_shard_into(self, target: np.ndarray, shard: str, offset: int) -> None:
        """Fills `target` (contiguous) with bytes of a shard, its header included."""
        self._shards[shard].read_into(target.reshape(-1).view(np.uint8).data, offset)


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a folder holds, as its headers and file sizes tell; nothing of it has been read."""

    files: CheckpointFiles
    """The shards that are whole; the others are left out."""
    problems: list[str]
    broken: dict[str, str]
    """Files that are missing or spoilt, and why."""
    absent: frozenset[str]
    """Tensors that the index puts into those."""


def survey(folder: str | os.PathLike[str]) -> Survey:
    """Opens what can be opened and says what is wrong with the rest.

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder"])
    shards, weight_map, broken, problems = _list_shards(folder)
    tensors: dict[str, TensorInfo] = {}
    opened: dict[str, _Shard] = {}
    for shard in shards:
        try:
            opened[shard], infos = _open_shard(folder / shard)
        except CheckpointError as error:
            problems += [f"{shard}: {problem}" for problem in error.problems]
            broken[shard] = error.problems[0]
            continue
        for info in infos:
            if info.name in tensors:
                both = f"{tensors[info.name].shard} and {shard}"
                problems.append(f"{info.name} is in two shards, {both}")
            tensors[info.name] = info
    absent: set[str] = set()
    if weight_map is not None:
        problems += _compare_index(weight_map, tensors, set(opened))
        absent = {name for name, shard in weight_map.items() if shard in broken}
    files = CheckpointFiles(folder, tensors, opened)
    return Survey(files, problems, broken, frozenset(absent))


class _Shard:
    """One open file: mapped, and readable at any place."""

    def __init__(self, path: Path, fd: int):
        self.path = path
        self.size = os.fstat(fd).st_size
        self.mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes from `offset` on."""
        at = 0
        while at < len(target):
            if hasattr(os, "preadv"):
                count = os.preadv(self._fd, [target[at:]], offset + at)
            else:
                part = os.pread(self._fd, len(target) - at, offset + at)
                count = len(part)
                target[at : at + count] = part
            if count == 0:
                raise CheckpointError(self.path, [f"ends at byte {offset + at} while it is read"])
            at += count


def _list_shards(
    folder: Path,
) -> tuple[list[str], dict[str, str] | None, dict[str, str], list[str]]:
    """The shards to open, the index's weight map when there is one, files that are missing or no
    index, and what is wrong."""
    on_disk = sorted(
        name
        for name in os.listdir(folder)
        if name.endswith(".safetensors") and not name.startswith(".")
    )
    index = folder / INDEX_NAME
    if not index.is_symlink() and not index.exists():
        if not on_disk:
            reason = f"neither {SINGLE_NAME} nor {INDEX_NAME} is in the folder"
            return [], None, {INDEX_NAME: "missing"}, [reason]
        if on_disk == [SINGLE_NAME]:
            return on_disk, None, {}, _link_problems(folder, on_disk)
        problems = [f"no {INDEX_NAME}, but shards: {summarise(on_disk)}"]
        unlisted = _missing_numbers(on_disk)
        if unlisted:
            problems.append(f"missing by the numbers of the others: {summarise(unlisted)}")
        return on_disk, None, dict.fromkeys([INDEX_NAME, *unlisted], "missing"), problems
    weight_map, problems = _read_index(index)
    if weight_map is None:
        return on_disk, None, {INDEX_NAME: problems[0]}, problems
    named = sorted(set(weight_map.values()))
    broken = {}
    for shard in named:
        if shard not in on_disk:
            num = sum(value == shard for value in weight_map.values())
            problems.append(f"{shard}: missing, the index puts {num} tensors there")
            broken[shard] = "missing"
    problems += [f"{shard}: not in {INDEX_NAME}" for shard in on_disk if shard not in named]
    return [shard for shard in on_disk if shard in named], weight_map, broken, problems


def _missing_numbers(names: list[str]) -> list[str]:
    """What shards named "x-00002-of-00064.safetensors" say of others that are not there."""
    found = [m for m in (re.fullmatch(r"(.*-)(\d+)-of-(\d+)\.safetensors", n) for n in names) if m]
    every = {
        f"{m[1]}{number:0{len(m[2])}}-of-{m[3]}.safetensors"
        for m in found
        for number in range(1, min(int(m[3]), 10_000) + 1)
    }
    return sorted(every - set(names))


def _read_index(path: Path) -> tuple[dict[str, str] | None, list[str]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [f"{path.name}: a dangling link to {os.readlink(path)}"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        return None, [f"{path.name}: not readable as JSON ({_one_line(error)})"]
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return None, [f"{path.name}: holds no weight_map"]
    bad = [
        f"{name}: {shard!r}"
        for name, shard in weight_map.items()
        if not isinstance(shard, str) or shard != os.path.basename(shard) or "\\" in shard
    ]
    if bad:
        return None, [f"{path.name}: not the name of a file in this folder: {summarise(bad)}"]
    return weight_map, []


def _compare_index(
    weight_map: dict[str, str], tensors: dict[str, TensorInfo], readable: set[str]
) -> list[str]:
    """What the index says of tensors that the readable shards contradict."""
    moved, absent = [], []
    for name, shard in weight_map.items():
        info = tensors.get(name)
        if info is not None and info.shard != shard:
            moved.append(f"{name} is in {info.shard}, the index says {shard}")
        elif info is None and shard in readable:
            absent.append(f"{name} ({shard})")
    extra = [f"{name} ({info.shard})" for name, info in tensors.items() if name not in weight_map]
    problems = [summarise(moved)] if moved else []
    if absent:
        problems.append(f"in the index but not in its shard: {summarise(absent)}")
    if extra:
        problems.append(f"in a shard but not in the index: {summarise(extra)}")
    return problems


def _link_problems(folder: Path, names: list[str]) -> list[str]:
    return [
        f"{name}: a dangling link to {os.readlink(folder / name)}"
        for name in names
        if (folder / name).is_symlink() and not (folder / name).exists()
    ]


def _open_shard(path: Path) -> tuple[_Shard, list[TensorInfo]]:
    """The open file and its tensors.

    Raises:
        CheckpointError: every fault of this file.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(path, [f"a dangling link to {os.readlink(path)}"])
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, problem = _read_header(file, size)
            if problem:
                raise CheckpointError(path, [problem])
            opened = _Shard(path, file.fileno())
    except OSError as error:
        raise CheckpointError(path, [f"not readable ({_one_line(error)})"]) from None
    start = 8 + int.from_bytes(opened.mapped[:8], "little")
    infos, problems = _check_header(header, path.name, start, size)
    if problems:
        raise CheckpointError(path, problems)
    return opened, infos


def _read_header(file: Any, size: int) -> tuple[dict[str, Any], str]:
    """The header's JSON object, or what keeps it from being read."""
    if size < 8:
        return {}, f"truncated: {size} bytes, a safetensors file begins with 8 bytes of length"
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER or length < 2:
        return {}, f"not a safetensors file: a header of {length} bytes"
    if 8 + length > size:
        return {}, f"truncated: a header of {length} bytes in a file of {size} bytes"
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return out

    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        return {}, f"the header is not JSON ({_one_line(error)})"
    if not isinstance(header, dict):
        return {}, f"the header is a JSON {type(header).__name__}, not an object"
    if repeated:
        return {}, f"the header names these twice: {summarise(repeated)}"
    return header, ""


def _check_header(
    header: dict[str, Any], shard: str, start: int, size: int
) -> tuple[list[TensorInfo], list[str]]:
    """Tensors in file order; the data must be tiled by them without gap, overlap or rest."""
    infos: list[TensorInfo] = []
    problems: list[str] = []
    spans: list[tuple[int, int, str]] = []
    is_whole = True
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        parsed = _parse_entry(entry)
        if isinstance(parsed, str):
            problems.append(f"{name}: {parsed}")
            is_whole = False
            continue
        dtype, shape, begin, end = parsed
        spans.append((begin, end, name))
        info = TensorInfo(name, dtype, shape, shard, start + begin)
        if end - begin != info.num_bytes:
            problems.append(
                f"{name}: {end - begin} bytes, but {dtype} {list(shape)} takes {info.num_bytes}"
            )
        infos.append(info)
    if not is_whole:
        return infos, problems
    spans.sort()
    at, before = 0, "the header"
    for begin, end, name in spans:
        if begin != at:
            kind = "overlaps" if begin < at else f"leaves {begin - at} bytes unused after"
            problems.append(f"{name} {kind} {before}")
        at, before = max(at, end), name
    if at > size - start:
        outside = [name for _, end, name in spans if end > size - start]
        problems.append(
            f"truncated: {size} bytes of {start + at}; outside the file: {summarise(outside)}"
        )
    elif at < size - start:
        problems.append(f"{size - start - at} bytes after the last tensor belong to none")
    return sorted(infos, key=lambda info: info.offset), problems


def _parse_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int] | str:
    """dtype, shape, begin, end of a header's entry; or what is wrong with it."""
    if not isinstance(entry, dict):
        return f"described by {entry!r:.60}, not an object"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {dtype!r:.60}"
    if not _is_sizes(shape):
        return f"shape is {shape!r:.60}"
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets are {offsets!r:.60}"
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
