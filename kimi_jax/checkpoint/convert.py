"""Published checkpoints made into converted ones, a piece at a time and resumable.

A piece is loaded as `load` would for the devices of a mesh, and written under another name, which
becomes its own once everything is on the disk; meanwhile the next one is loaded, so that the host
holds two pieces (6.4 GB of Kimi-K2.5, 67 % of a layer). The next run goes on from where one was
killed: whole pieces stay. It knows nothing of the model's code.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from kimi_jax import locks
from kimi_jax.checkpoint.arrays import crc32_of, write_arrays
from kimi_jax.checkpoint.converted import (
    PIECES,
    RECORD_NAME,
    Piece,
    Record,
    Stored,
    group,
    list_files,
    read_piece_record,
    read_record,
    recorded_pieces,
    spoilt_files,
    versions,
)
from kimi_jax.checkpoint.fingerprint import weights_digest
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.reader import FILE_PATTERNS, INDEX_NAME, CheckpointError, summarise
from kimi_jax.checkpoint.records import as_json, differences, fields, one_line, write_json
from kimi_jax.checkpoint.table import LAYOUT_VERSION, Plan
from kimi_jax.checkpoint.verify import known_hashes
from kimi_jax.checkpoint.writer import lack_of_space

# Room for the small files, the record and the pieces' own metadata.
SPARE_BYTES = 50_000_000
_MAX_THREADS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be written where, and what of it is there already."""

    plan: Plan
    wanted: dict[str, jax.ShapeDtypeStruct]
    out: Path
    record: Record
    """Not complete: what must be the same in every part of a conversion."""
    whole: list[str]
    """Pieces that an earlier part has written."""
    spoilt: list[str]
    """What is wrong with pieces that are there; they are written again."""

    @property
    def pieces(self) -> dict[str, list[str]]:
        """Paths of the parameters of every piece."""
        return group(self.wanted)

    def num_bytes(self, pieces: list[str] | None = None) -> int:
        """Bytes of the arrays, of all pieces or of some."""
        names = self.pieces if pieces is None else pieces
        leaves = [self.wanted[path] for name in names for path in self.pieces[name]]
        return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    @property
    def left(self) -> list[str]:
        """Pieces to be written."""
        return [name for name in self.pieces if name not in self.whole]


def prepare(
    plan: Plan,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    out: str | os.PathLike[str],
    *,
    dtype: str,
    mesh: Mapping[str, int],
) -> Conversion:
    """A conversion that can begin, or go on; nothing has been written.

    Args:
        plan: the published checkpoint.
        wanted: shape, dtype and sharding of every parameter; the files are cut as the shards are.
        out: the folder to write, absent, empty, or left by an earlier part of the same conversion.
        dtype: the widest of the floats' dtypes, for the record.
        mesh: of the sharding, for the record.

    Raises:
        CheckpointError: everything that keeps it from being written.
    """
    out = Path(out).expanduser().absolute()
    record = Record(
        layout_version=LAYOUT_VERSION,
        is_complete=False,
        dtype=dtype,
        is_int4=plan.is_int4,
        mesh=dict(mesh),
        source=_describe_source(plan),
        written_by=versions(),
    )
    problems: list[str] = []
    whole: list[str] = []
    spoilt: list[str] = []
    if out.is_dir() and plan.files.folder.samefile(out):
        problems.append("is the source; converted checkpoints need a folder of their own")
    elif out.exists() and not out.is_dir():
        problems.append("is a file")
    elif out.is_dir():
        entries = {path.name for path in out.iterdir()} - {f"{RECORD_NAME}.partial"}
        try:
            earlier = read_record(out)
        except CheckpointError as error:
            problems += error.problems
        else:
            if earlier is not None:
                problems += _other_conversion(earlier, record)
                whole, spoilt = _look(out)
            elif entries:
                problems.append(
                    f"holds something else ({summarise(sorted(entries))}); give a folder of its own"
                )
    conversion = Conversion(
        plan=plan,
        wanted={path: _held_once(leaf) for path, leaf in wanted.items()},
        out=out,
        record=record,
        whole=whole,
        spoilt=spoilt,
    )
    needed = conversion.num_bytes(conversion.left)
    # What is there but not whole is removed first.
    there = sum(sum(list_files(path).values()) for path in _leftovers(out, whole))
    if needed and (lack := lack_of_space(out, max(0, needed + SPARE_BYTES - there))):
        problems.append(f"the disk is too small: this takes {lack}")
    if problems:
        raise CheckpointError(out, problems)
    return conversion


def convert(conversion: Conversion, *, progress: bool = True) -> Record:
    """Writes what is missing, and the record last; what it says.

    Raises:
        CheckpointError: the source changed or cannot be read, the disk failed, or another process
            is writing the folder. What is whole stays, and a further call goes on from it.
    """
    out = conversion.out
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        earlier = read_record(out)
        if earlier is not None and (problems := _other_conversion(earlier, conversion.record)):
            raise CheckpointError(out, problems)
        # Another process may have written pieces since the conversion was prepared.
        whole, spoilt = _look(out)
        conversion = dataclasses.replace(conversion, whole=whole, spoilt=spoilt)
        left = conversion.left
        if earlier is not None and earlier.is_complete and not left:
            _copy_small_files(conversion.plan.files.folder, out)
            return earlier
        # Before anything else: by it the folder is known.
        write_json(out / RECORD_NAME, conversion.record.to_dict())
        for path in _leftovers(out, conversion.whole):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _copy_small_files(conversion.plan.files.folder, out)
        (out / PIECES).mkdir(exist_ok=True)
        _write_pieces(conversion, left, progress)
        # The bytes were read between the two looks.
        now = _describe_source(conversion.plan)
        if changed := _source_differences(conversion.record.source, now):
            raise CheckpointError(
                conversion.plan.files.folder,
                [f"changed meanwhile ({'; '.join(changed)}): remove {out} and begin again"],
            )
        record = dataclasses.replace(conversion.record, is_complete=True)
        write_json(out / RECORD_NAME, record.to_dict())
    return record


def small_files(folder: Path) -> list[Path]:
    """What a checkpoint has beside its weights: configuration, tokenizer, template."""
    patterns = [pattern for pattern in FILE_PATTERNS if not pattern.endswith(".safetensors")]
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.name != INDEX_NAME)


def _write_pieces(conversion: Conversion, left: list[str], progress: bool) -> None:
    bar = tqdm(
        total=conversion.num_bytes(),
        initial=conversion.num_bytes(conversion.whole),
        unit="B",
        unit_scale=True,
        desc="converting",
        disable=None if progress else True,
    )
    with bar, ThreadPoolExecutor(1) as pool:
        writing: Future[None] | None = None
        for name in left:
            paths = conversion.pieces[name]
            rows = {path: conversion.plan.parameters[path] for path in paths}
            wanted = {path: conversion.wanted[path] for path in paths}
            arrays = load_params(
                dataclasses.replace(conversion.plan, parameters=rows), wanted, progress=False
            )
            if writing is not None:
                writing.result()
            writing = pool.submit(_write_piece, conversion, name, arrays, bar)
        if writing is not None:
            writing.result()


def _write_piece(
    conversion: Conversion, name: str, arrays: dict[str, jax.Array], bar: tqdm
) -> None:
    where = conversion.out / PIECES / name
    try:
        write_arrays(where, arrays)
        sizes = list_files(where)
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            sums = pool.map(lambda file: crc32_of(where / file), sizes)
            files = {f: (size, crc) for (f, size), crc in zip(sizes.items(), sums, strict=True)}
        stored = {
            path: Stored(
                shape=array.shape,
                dtype=str(array.dtype),
                part=array.sharding.shard_shape(array.shape),
            )
            for path, array in arrays.items()
        }
        # From here on the piece counts.
        record = Piece(arrays=stored, files=files)
        write_json(where.with_name(f"{name}.json"), record.to_dict())
    except Exception as error:  # a disk that is full or fails may raise nearly anything
        free = shutil.disk_usage(conversion.out).free / 1e9
        raise CheckpointError(
            where,
            [
                f"not written ({one_line(error)}); {free:.1f} GB are free. What is whole stays: "
                "the same command goes on from it"
            ],
        ) from error
    bar.update(conversion.num_bytes([name]))


def _held_once(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """On one device if all would hold it: orbax writes copies in slices, a file each."""
    sharding = leaf.sharding
    if sharding is None or not sharding.is_fully_replicated:
        return leaf
    first = min(sharding.device_set, key=lambda device: device.id)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(first)
    )


def _describe_source(plan: Plan) -> dict[str, Any]:
    folder = plan.files.folder
    description = {
        "folder": str(folder),
        "bytes": plan.files.num_bytes,
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights_sha256": weights_digest(folder),
        "hashes": known_hashes(folder),
    }
    return as_json(description, "source")


def _source_differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What says that the weights or the configuration are not the same; the folder may differ,
    and one of two copies may have come without hashes."""
    both = [{k: v for k, v in s.items() if k not in ("folder", "hashes")} for s in (theirs, ours)]
    out = differences(*both)
    hashes = [s["hashes"] for s in (theirs, ours)]
    shared = [n for n in hashes[0].keys() & hashes[1].keys() if n.endswith(".safetensors")]
    return out + differences(*({name: h[name] for name in shared} for h in hashes))


def _other_conversion(earlier: Record, record: Record) -> list[str]:
    """Why an earlier part's folder cannot be gone on with."""
    changed = _source_differences(earlier.source, record.source)
    problems = []
    if changed:
        problems.append(
            f"was begun from another source (there, here): {'; '.join(changed)}; begin again in "
            "an empty folder"
        )
    ours = [
        fields({"dtype": r.dtype, "mesh": r.mesh, "is_int4": r.is_int4}) for r in (earlier, record)
    ]
    if differing := differences(*ours):
        problems.append(
            f"was begun with other options (there, here): {'; '.join(differing)}; give those, or "
            "an empty folder"
        )
    return problems


def _look(out: Path) -> tuple[list[str], list[str]]:
    """Pieces that are whole, and what is wrong with others."""
    whole, spoilt = [], []
    for name in recorded_pieces(out):
        try:
            bad = spoilt_files(out, name, read_piece_record(out, name))
        except CheckpointError as error:
            bad = [str(error)]
        spoilt += bad
        if not bad:
            whole.append(name)
    return whole, spoilt


def _leftovers(out: Path, whole: list[str]) -> list[Path]:
    """What is among the pieces and belongs to no whole one: its writer was killed, or it is
    spoilt."""
    kept = {*whole, *(f"{name}.json" for name in whole)}
    pieces = out / PIECES
    return [path for path in pieces.iterdir() if path.name not in kept] if pieces.is_dir() else []


def _copy_small_files(source: Path, out: Path) -> None:
    """Those that are not there: a configuration may have been edited since."""
    for path in small_files(source):
        copy = out / path.name
        if not copy.exists():
            partial = copy.with_name(f"{copy.name}.partial")
            shutil.copyfile(path, partial)
            os.replace(partial, copy)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        if not locks.take(opened):
            raise CheckpointError(folder, ["another process is converting into it"])
        yield
    finally:
        os.close(opened)
