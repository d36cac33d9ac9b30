"""The target's hidden states in files: made once, read at every epoch.

A folder holds `states.json`, the header, and shards `states-00000.safetensors` and on, each of many
samples whose tokens lie one after the other: `input_ids`, `loss_mask`, `hidden_state` and
`aux_hidden_state` by token, `lengths` by sample, the samples' ids in the metadata. A shard has its
name only once it is whole, so that a writer that was killed is gone on from. It does not know how
the states are made.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from kimi_jax.checkpoint.reader import CheckpointError, summarise
from kimi_jax.checkpoint.writer import lack_of_space
from spec.training.samples import Sample

FORMAT = "kimi_jax hidden states"
VERSION = 1
HEADER_NAME = "states.json"
CONVENTIONS = {
    "taps": "ids of the layers whose input the streams are; the number of layers is the last's "
    "output",
    "hidden_state": "the target's last hidden state after its final norm",
    "aux_hidden_state": "the residual streams at the taps, no norm applied, side by side in "
    "ascending layer order",
}
"""What the numbers are, written into every header."""

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_SPELLINGS = {
    DTYPES["bfloat16"]: "BF16",
    DTYPES["float32"]: "F32",
    np.dtype(np.int32): "I32",
    np.dtype(np.bool_): "BOOL",
}
_PARTIAL = ".partial"
_MAX_OPEN = 64

_log = logging.getLogger(__name__)


class StatesError(CheckpointError):
    """A folder of stored states that cannot be used; `problems` lists every reason found."""


def states_bytes(num_tokens: int, hidden_size: int, num_taps: int, itemsize: int) -> int:
    """What the states of so many tokens take on disk; ids and masks add five bytes a token."""
    return num_tokens * (num_taps + 1) * hidden_size * itemsize


def check_space(folder: str | os.PathLike[str], num_bytes: int) -> None:
    """Refuses to begin what the disk cannot hold.

    Raises:
        StatesError: says how much is needed and how much is free.
    """
    folder = Path(folder).expanduser().absolute()
    if lack := lack_of_space(folder, num_bytes):
        raise StatesError(folder, [f"the states take {lack}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatesHeader:
    """What every shard of a folder has in common; `CONVENTIONS` says what the numbers are."""

    fingerprint: str
    """Of the target whose states they are."""
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    samples_sha256: str
    """Of the samples, `samples.digest_samples`."""
    num_samples: int
    """How many the folder holds once it is complete."""

    def __post_init__(self):
        problems = []
        if list(self.taps) != sorted({*self.taps}) or any(tap < 0 for tap in self.taps):
            problems.append(f"taps are {list(self.taps)}, expected ascending layer ids")
        if self.hidden_size < 1:
            problems.append(f"hidden_size is {self.hidden_size}, expected at least 1")
        if self.dtype not in DTYPES:
            problems.append(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if problems:
            raise ValueError("; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        fields = dataclasses.asdict(self) | {"taps": list(self.taps)}
        return {"format": FORMAT, "version": VERSION, "conventions": CONVENTIONS, **fields}

    def differences(self, other: "StatesHeader") -> list[str]:
        """What differs, "name: ours, theirs" each."""
        names = [field.name for field in dataclasses.fields(self)]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return [f"{name}: {a!r}, {b!r}" for name, (a, b) in pairs.items() if a != b]


class StatesWriter:
    """Adds samples' states to a folder, new or left by an earlier run for the same samples.

    Holds the states of one shard in memory; what is added is on the disk once its shard is full or
    after `close`. One writer at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: StatesHeader,
        *,
        max_shard_bytes: int = 2**30,
    ):
        """Opens the folder, and drops a shard that an earlier run did not finish.

        Args:
            folder: made when it does not exist.
            header: of every sample to come.
            max_shard_bytes: a shard is closed before its states grow past this (one sample may).

        Raises:
            StatesError: the folder has another header, or a shard that cannot be read.
        """
        self.folder = Path(folder).expanduser().absolute()
        self.header = header
        self.max_shard_bytes = max_shard_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / HEADER_NAME).exists():
            theirs = _read_header(self.folder)
            if differences := theirs.differences(header):
                problem = f"made with another header (there, here): {'; '.join(differences)}"
                raise StatesError(self.folder, [problem])
        elif names := _shard_names(self.folder):
            raise StatesError(self.folder, [f"no {HEADER_NAME}, but shards: {summarise(names)}"])
        for path in self.folder.glob(f"*{_PARTIAL}"):
            _log.info("%s: a shard that was not finished is dropped: %s", self.folder, path.name)
            path.unlink()
        shards = _read_shards(self.folder, header, None)
        self.done = {sample.id for shard in shards for sample in shard.samples}
        """The ids of the samples that are stored."""
        self._num_shards = len(shards)
        self._waiting: list[tuple[Sample, np.ndarray, np.ndarray]] = []
        self._num_bytes = 0
        self._ids = set(self.done)
        self._has_failed = False
        if not (self.folder / HEADER_NAME).exists():
            text = json.dumps(header.to_dict(), indent=2) + "\n"
            with _whole_file(self.folder / HEADER_NAME) as file:
                file.write(text.encode())

    def __enter__(self) -> "StatesWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def add(self, sample: Sample, hidden: Any, aux: Any) -> None:
        """Takes the states of one sample's tokens, copied.

        Args:
            sample: not stored before.
            hidden: [tokens, hidden_size], of the header's dtype.
            aux: [tokens, taps * hidden_size], of the header's dtype.

        Raises:
            ValueError: the id is used, or the states are not the header's or not finite.
            OSError: the disk is full; the shards before stay.
        """
        if sample.id in self._ids:
            raise ValueError(f"sample {sample.id!r} is stored already")
        num, width = len(sample.input_ids), self.header.hidden_size
        if not num:
            raise ValueError(f"sample {sample.id!r} has no tokens")
        states = []
        for name, value, columns in (
            ("hidden", hidden, width),
            ("aux", aux, width * len(self.header.taps)),
        ):
            value = np.array(value)
            if value.shape != (num, columns) or value.dtype != DTYPES[self.header.dtype]:
                raise ValueError(
                    f"sample {sample.id!r}: {name} is {value.dtype} {list(value.shape)}, expected "
                    f"{self.header.dtype} {[num, columns]}"
                )
            if not np.isfinite(value).all():
                raise ValueError(f"sample {sample.id!r}: {name} holds values that are not finite")
            states.append(value)
        size = sum(value.nbytes for value in states)
        if self._waiting and self._num_bytes + size > self.max_shard_bytes:
            self._write()
        self._ids.add(sample.id)
        self._waiting.append((sample, states[0], states[1]))
        self._num_bytes += size

    def close(self) -> None:
        """Writes what waits for its shard to fill.

        Raises:
            OSError: the disk is full; the shards before stay.
        """
        # What could not be written once is not tried again while that error is on its way.
        if self._waiting and not self._has_failed:
            self._write()

    def _write(self) -> None:
        path = self.folder / _shard_name(self._num_shards)
        if path.exists():
            raise StatesError(self.folder, [f"{path.name} was written by another writer meanwhile"])
        samples = [sample for sample, _, _ in self._waiting]
        columns = {
            "input_ids": [sample.input_ids.astype(np.int32) for sample in samples],
            "lengths": [np.array([len(sample.input_ids) for sample in samples], np.int32)],
            "hidden_state": [hidden for _, hidden, _ in self._waiting],
            "aux_hidden_state": [aux for _, _, aux in self._waiting],
            "loss_mask": [sample.loss_mask.astype(np.bool_) for sample in samples],
        }
        self._has_failed = True
        with _whole_file(path) as file:
            _write_shard(file, columns, [sample.id for sample in samples])
        self._has_failed = False
        self._num_shards += 1
        self.done |= {sample.id for sample in samples}
        self._waiting, self._num_bytes = [], 0


class StoredStates:
    """A checked folder of states; `samples` in the order they were added.

    The states stay on disk: `read` touches those of one sample only.
    """

    def __init__(self, folder: Path, header: StatesHeader, shards: "list[_Shard]"):
        self.folder = folder
        self.header = header
        self.samples: list[Sample] = []
        self._places: list[tuple[str, int, int]] = []
        for shard in shards:
            stops = np.cumsum([len(sample.input_ids) for sample in shard.samples]).tolist()
            starts = [0, *stops[:-1]]
            self._places += [
                (shard.name, start, stop) for start, stop in zip(starts, stops, strict=True)
            ]
            self.samples += shard.samples
        self._file = functools.lru_cache(_MAX_OPEN)(self._open_file)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        hidden_size: int,
        taps: tuple[int, ...],
        vocab_size: int,
        fingerprint: str | None = None,
    ) -> "StoredStates":
        """Checks the header and every shard; of the states themselves nothing is read.

        Args:
            folder: as a `StatesWriter` left it.
            hidden_size: the target's.
            taps: those the drafter reads.
            vocab_size: the target's.
            fingerprint: the target's, where it is known.

        Raises:
            StatesError: names everything that is wrong.
        """
        folder = Path(folder).expanduser().absolute()
        header = _read_header(folder)
        wanted = {"hidden_size": hidden_size, "taps": tuple(taps)}
        if fingerprint is not None:
            wanted["fingerprint"] = fingerprint
        problems = [
            f"{name} is {getattr(header, name)!r}, expected {value!r}"
            for name, value in wanted.items()
            if getattr(header, name) != value
        ]
        shards = _read_shards(folder, header, vocab_size, problems)
        stored = cls(folder, header, shards)
        if not stored.samples:
            raise StatesError(folder, ["no states in it"])
        if len(stored.samples) < header.num_samples:
            _log.warning(
                "%s: states of %d of %d samples; the run that stores them is not finished",
                folder,
                len(stored.samples),
                header.num_samples,
            )
        return stored

    def read(self, index: int) -> tuple[Float[np.ndarray, "T D"], Float[np.ndarray, "T X"]]:
        """The last hidden state and the tapped streams, side by side, of `samples[index]`."""
        name, start, stop = self._places[index]
        file = self._file(name)
        return (
            file.get_slice("hidden_state")[start:stop],
            file.get_slice("aux_hidden_state")[start:stop],
        )

    def _open_file(self, name: str) -> Any:
        return safe_open(self.folder / name, "np")


@dataclasses.dataclass(frozen=True)
class _Shard:
    name: str
    samples: list[Sample]


def _shard_name(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def _shard_names(folder: Path) -> list[str]:
    """Those in the folder, in the order they were written."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"states-\d+\.safetensors", name)]
    return sorted(names, key=lambda name: int(re.sub(r"\D", "", name)))


def _read_header(folder: Path) -> StatesHeader:
    path = folder / HEADER_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StatesError(path, [error.strerror or str(error)]) from None
    except (ValueError, RecursionError):
        raise StatesError(path, ["not JSON"]) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StatesError(path, [f'no header of stored states; expected "format": "{FORMAT}"'])
    if data.get("version") != VERSION:
        problem = f"version {data.get('version')!r} of the format, this reads {VERSION}"
        raise StatesError(path, [problem])
    fields: dict[str, Any] = {
        key: data[key] for key in data if key not in ("format", "version", "conventions")
    }
    problems = []
    if data.get("conventions") != CONVENTIONS:
        problems.append(f"conventions are {data.get('conventions')!r}, expected {CONVENTIONS!r}")
    kinds = {field.name: field.type for field in dataclasses.fields(StatesHeader)}
    problems += [f"{name}: missing" for name in kinds if name not in fields]
    problems += [f"{name}: not a field of the header" for name in fields if name not in kinds]
    for name, kind in kinds.items():
        if name not in fields:
            continue
        value = fields[name]
        if name == "taps":
            is_right = isinstance(value, list) and all(type(tap) is int for tap in value)
        else:
            is_right = type(value) is kind
        if not is_right:
            problems.append(f"{name} is {value!r:.60}")
    if problems:
        raise StatesError(path, problems)
    try:
        return StatesHeader(**{**fields, "taps": tuple(fields["taps"])})
    except ValueError as error:
        raise StatesError(path, [str(error)]) from None


def _read_shards(
    folder: Path,
    header: StatesHeader,
    vocab_size: int | None,
    problems: list[str] | None = None,
) -> list[_Shard]:
    """Every shard's samples; all that is wrong, and the problems found before, in one error."""
    problems = list(problems or [])
    names = _shard_names(folder)
    last = int(re.sub(r"\D", "", names[-1])) if names else -1
    expected = [_shard_name(number) for number in range(last + 1)]
    problems += [f"{name}: missing" for name in expected if name not in names]
    shards = []
    places: dict[str, str] = {}
    for name in names:
        try:
            samples = _read_shard(folder / name, header, vocab_size)
        except StatesError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
            continue
        for sample in samples:
            if sample.id in places:
                both = f"{places[sample.id]} and {name}"
                problems.append(f"sample {sample.id!r} is stored twice, in {both}")
            places[sample.id] = name
        shards.append(_Shard(name, samples))
    if problems:
        raise StatesError(folder, problems)
    return shards


def _read_shard(path: Path, header: StatesHeader, vocab_size: int | None) -> list[Sample]:
    """Its samples, after its tensors' names, dtypes and shapes are those of the header."""
    try:
        with safe_open(path, "np") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (x.get_dtype(), x.get_shape()) for name, x in tensors.items()}
            problems = _layout_problems(found, header)
            if problems:
                raise StatesError(path, problems)
            input_ids = file.get_tensor("input_ids")
            loss_mask = file.get_tensor("loss_mask")
            lengths = file.get_tensor("lengths")
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise StatesError(path, [f"not readable ({error})"]) from None
    ids = _sample_ids(metadata)
    if ids is None or len(ids) != len(lengths):
        problems.append("its metadata does not hold an id for each sample")
    if not len(lengths):
        problems.append("no samples in it")
    if (lengths < 1).any() or lengths.sum(dtype=np.int64) != len(input_ids):
        problems.append(f"lengths do not add up to its {len(input_ids)} tokens")
    if (input_ids < 0).any() or (vocab_size is not None and (input_ids >= vocab_size).any()):
        span = "negative" if vocab_size is None else f"outside the vocabulary of {vocab_size}"
        problems.append(f"token ids {span}: {int(input_ids.min())} to {int(input_ids.max())}")
    if problems or ids is None:
        raise StatesError(path, problems)
    cuts = np.cumsum(lengths)[:-1]
    parts = zip(ids, np.split(input_ids, cuts), np.split(loss_mask, cuts), strict=True)
    return [Sample(id=id, input_ids=tokens, loss_mask=mask) for id, tokens, mask in parts]


def _layout_problems(found: dict[str, tuple[str, list[int]]], header: StatesHeader) -> list[str]:
    """What is wrong with the names, dtypes and shapes of a shard's tensors."""
    width, floats = header.hidden_size, _SPELLINGS[DTYPES[header.dtype]]
    num = found["input_ids"][1][:1] if "input_ids" in found else []
    samples = found["lengths"][1][:1] if "lengths" in found else []
    expected = {
        "input_ids": ("I32", num),
        "loss_mask": ("BOOL", num),
        "hidden_state": (floats, [*num, width]),
        "aux_hidden_state": (floats, [*num, width * len(header.taps)]),
        "lengths": ("I32", samples),
    }
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: not a tensor of stored states" for name in found if name not in expected]
    if problems:
        return problems
    return [
        f"{name} is {found[name][0]} {found[name][1]}, expected {dtype} {shape}"
        for name, (dtype, shape) in expected.items()
        if found[name] != (dtype, shape) or not shape
    ]


def _sample_ids(metadata: dict[str, str]) -> list[str] | None:
    try:
        ids = json.loads(metadata["ids"])
    except (KeyError, ValueError, RecursionError):
        return None
    is_right = isinstance(ids, list) and all(isinstance(id, str) for id in ids)
    return ids if is_right else None


def _write_shard(file: BinaryIO, columns: dict[str, list[np.ndarray]], ids: list[str]) -> None:
    """A safetensors file, each tensor the rows of its arrays, never joined in memory.

    The caller names wide dtypes first, so that every tensor is aligned without a gap, which the
    format forbids.
    """
    header: dict[str, Any] = {"__metadata__": {"ids": json.dumps(ids)}}
    at = 0
    for name, parts in columns.items():
        end = at + sum(part.nbytes for part in parts)
        header[name] = {
            "dtype": _SPELLINGS[parts[0].dtype],
            "shape": [sum(map(len, parts)), *parts[0].shape[1:]],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for parts in columns.values():
        for part in parts:
            file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name only once all of it is on the disk."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The name, too, is to outlast a loss of power.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
