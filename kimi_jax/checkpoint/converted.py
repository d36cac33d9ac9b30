"""Checkpoints in the kernels' layout: what such a folder holds, how it is checked and restored.

    config.json, tiktoken.model, ...               as published
    converted.json                                 the record: layout, dtype, source
    pieces/layers.3.mlp.experts.gate_proj/         arrays, written by orbax
    pieces/layers.3.mlp.experts.gate_proj.json     what they are, their files' sizes and checksums

A piece is one projection of a layer's routed experts, the rest of a layer, or one parameter outside
the layers; it counts once its `.json` is there. `convert` writes such folders; this knows nothing
of the published tensors.
"""

import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from kimi_jax.checkpoint.arrays import crc32_of, read_arrays
from kimi_jax.checkpoint.reader import CheckpointError, summarise
from kimi_jax.checkpoint.records import one_line
from kimi_jax.checkpoint.table import LAYOUT_VERSION, Parameter, parameters
from kimi_jax.config import ModelConfig

RECORD_NAME = "converted.json"
PIECES = "pieces"

_PIECE = re.compile(r"layers\.\d+\.mlp\.experts\.\w+|layers\.\d+|\w+")
_MAX_THREADS = 16
# What is read of `Record.source`.
_SOURCE = {"folder": str, "weights_sha256": str, "hashes": dict}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What `converted.json` says."""

    layout_version: int
    is_complete: bool
    """Every piece has been written."""
    dtype: str
    """Of the floats; the embedding and large matrices may be narrower. The router's bias is
    float32."""
    is_int4: bool
    mesh: dict[str, int]
    """The files are cut as these devices would hold them."""
    source: dict[str, Any]
    """Folder, bytes, `config_sha256`, `weights_sha256` (see `fingerprint.weights_digest`), and the
    hashes the hub's client has left, by file."""
    written_by: dict[str, str]
    """Versions of kimi_jax, jax and orbax."""

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One array of a piece, as its `.json` says."""

    shape: tuple[int, ...]
    dtype: str
    part: tuple[int, ...]
    """Shape of what lies in one file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A whole piece."""

    arrays: dict[str, Stored]
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of every file, by its path inside the piece."""

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A whole converted checkpoint that fits the configuration.

    `cfg` has a `quantization` only if the experts are INT4, as a published checkpoint's `Plan`.
    """

    folder: Path
    cfg: ModelConfig
    parameters: dict[str, Parameter]
    record: Record
    pieces: dict[str, Piece]

    @functools.cached_property
    def stored(self) -> dict[str, Stored]:
        """Of every parameter."""
        return {path: own for piece in self.pieces.values() for path, own in piece.arrays.items()}


def group(paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths of parameters by the piece they are in."""
    out: dict[str, list[str]] = {}
    for path in paths:
        match = _PIECE.match(path)
        assert match is not None
        out.setdefault(match[0], []).append(path)
    return out


def read_record(folder: str | os.PathLike[str]) -> Record | None:
    """What a folder's record says; None for a folder that is no converted checkpoint.

    Raises:
        CheckpointError: the record cannot be read or is of another layout.
    """
    folder = Path(folder)
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    data = _read_json(path)
    version = data.get("layout_version")
    if version != LAYOUT_VERSION:
        by = data.get("written_by")
        by = ", ".join(f"{k} {v}" for k, v in by.items()) if isinstance(by, dict) else "unknown"
        raise CheckpointError(
            folder,
            [
                f"holds layout {version!r} (written by {by}); this is kimi_jax "
                f"{versions()['kimi_jax']}, which reads layout {LAYOUT_VERSION}: convert the "
                "published checkpoint again, or use the version that wrote this one"
            ],
        )
    record = Record(**_checked(Record, data, path))
    wrong = [name for name, kind in _SOURCE.items() if type(record.source.get(name)) is not kind]
    if wrong:
        raise CheckpointError(path, [f"not a record of this layout: source.{summarise(wrong)}"])
    return record


def read_piece_record(folder: Path, name: str) -> Piece:
    """What is recorded of a piece of a folder.

    Raises:
        CheckpointError: there is no such record, or it cannot be read.
    """
    path = folder / PIECES / f"{name}.json"
    data = _checked(Piece, _read_json(path), path)
    try:
        arrays = {
            name: Stored(
                shape=tuple(own["shape"]), dtype=str(own["dtype"]), part=tuple(own["part"])
            )
            for name, own in data["arrays"].items()
        }
        files = {name: (int(size), int(crc)) for name, (size, crc) in data["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, [f"not a record of a piece ({one_line(error)})"]) from None
    return Piece(arrays=arrays, files=files)


def versions() -> dict[str, str]:
    """Of what writes and reads converted checkpoints."""

    def of(distribution: str) -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    return {"kimi_jax": of("kimi-jax"), "jax": of("jax"), "orbax": of("orbax-checkpoint")}


def open_converted(cfg: ModelConfig, folder: str | os.PathLike[str], record: Record) -> Converted:
    """The checkpoint, once every parameter and every file of it are found as they should be.

    Nothing is read but the records and the files' sizes.

    Raises:
        CheckpointError: names everything that is missing or does not fit.
    """
    folder = Path(folder).expanduser().absolute()
    again = f"scripts/convert_checkpoint.py {record.source['folder']} {folder}"
    rows = parameters(cfg, is_int4=record.is_int4)
    if not record.is_complete:
        names = group(rows)
        num_done = sum((folder / PIECES / f"{name}.json").exists() for name in names)
        raise CheckpointError(
            folder,
            [f"its conversion stopped at {num_done} of {len(names)} pieces; go on with {again}"],
        )
    problems: list[str] = []
    if record.is_int4 and cfg.quantization is None:
        problems.append("INT4 experts, but config.json has no quantization_config")
    pieces: dict[str, Piece] = {}
    spoilt: list[str] = []
    for name in recorded_pieces(folder):
        try:
            pieces[name] = read_piece_record(folder, name)
        except CheckpointError as error:
            problems.append(f"{PIECES}/{name}.json: {error.problems[0]}")
        else:
            spoilt += spoilt_files(folder, name, pieces[name])
    if spoilt:
        problems.append(f"{summarise(spoilt)}; write what is missing with {again}")
    if not problems:
        stored = {path: own for piece in pieces.values() for path, own in piece.arrays.items()}
        problems += _check_parameters(stored, rows, again)
    if problems:
        raise CheckpointError(folder, problems)
    return Converted(
        folder=folder,
        cfg=cfg if record.is_int4 else dataclasses.replace(cfg, quantization=None),
        parameters=rows,
        record=record,
        pieces=pieces,
    )


def restore_params(
    converted: Converted, wanted: Mapping[str, jax.ShapeDtypeStruct], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The parameters as arrays, by path: `load.load_params` of a converted checkpoint.

    Every device's share is read for it alone, a piece at a time, after the checksums of the piece's
    files have been compared. Floats are widened where a wider dtype is wanted.

    Raises:
        ValueError: a dtype that does not hold every stored value; nothing was read.
        CheckpointError: everything that cannot be read, or is not what was written.
    """
    stored = converted.stored
    narrowed = {
        path: str(leaf.dtype)
        for path, leaf in wanted.items()
        if not holds(leaf.dtype, jnp.dtype(stored[path].dtype))
    }
    if narrowed:
        asked = " and ".join(sorted(set(narrowed.values())))
        raise ValueError(
            f"{converted.folder} is stored in {converted.record.dtype}, and {asked} would round "
            f"{summarise(narrowed, 2)}: ask for dtype {converted.record.dtype!r}, or convert "
            f"{converted.record.source['folder']} with --dtype {asked}"
        )
    _warn_of_needless_reads(converted, wanted)
    out: dict[str, jax.Array] = {}
    pieces = group(converted.parameters)
    spoilt: list[str] = []
    bar = _bar("restoring", sum(stored[path].num_bytes for path in wanted), progress)
    with bar:
        for name, changed in _changed_files(converted, list(pieces)):
            spoilt += changed
            if not changed:
                try:
                    out |= _read_piece(converted, name, {p: wanted[p] for p in pieces[name]})
                except MemoryError:
                    raise
                except Exception as error:  # a broken file may raise nearly anything
                    if "RESOURCE_EXHAUSTED" in str(error):
                        raise
                    spoilt.append(f"{PIECES}/{name}: cannot be read ({one_line(error)})")
            bar.update(sum(stored[path].num_bytes for path in pieces[name]))
    if spoilt:
        raise CheckpointError(converted.folder, [*spoilt, _advice(converted, spoilt)])
    return {path: out[path] for path in converted.parameters}


def verify_files(converted: Converted, *, progress: bool = True) -> list[str]:
    """Reads every file of every piece; those whose bytes are not what was written."""
    spoilt: list[str] = []
    sizes = {
        name: sum(size for size, _ in converted.pieces[name].files.values())
        for name in group(converted.parameters)
    }
    bar = _bar("verifying", sum(sizes.values()), progress)
    with bar:
        for name, changed in _changed_files(converted, list(sizes)):
            spoilt += changed
            bar.update(sizes[name])
    return [*spoilt, _advice(converted, spoilt)] if spoilt else []


def recorded_pieces(folder: Path) -> list[str]:
    """Names of the pieces of a folder whose records are there."""
    pieces = folder / PIECES
    names = [path.name.removesuffix(".json") for path in pieces.glob("*.json")]
    return sorted(name for name in names if _PIECE.fullmatch(name))


def list_files(piece: Path) -> dict[str, int]:
    """Bytes of every file of a piece, by its path inside."""
    found = {}
    for where, _, names in os.walk(piece):
        for name in names:
            path = os.path.join(where, name)
            found[os.path.relpath(path, piece)] = os.path.getsize(path)
    return dict(sorted(found.items()))


def spoilt_files(folder: Path, name: str, piece: Piece) -> list[str]:
    """What is missing of a piece, or has another size than is recorded."""
    found = list_files(folder / PIECES / name)
    if not found:
        return [f"{PIECES}/{name}: missing"]
    out = []
    for file, (size, _) in piece.files.items():
        if file not in found:
            out.append(f"{PIECES}/{name}/{file}: missing")
        elif found[file] != size:
            out.append(f"{PIECES}/{name}/{file}: {found[file]} bytes of {size}")
    return out


def holds(wanted: Any, stored: Any) -> bool:
    """Whether a dtype has every value of another."""
    if wanted == stored:
        return True
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wanted, stored)):
        return False
    wide, narrow = jnp.finfo(wanted), jnp.finfo(stored)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, ["missing"]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"not readable as JSON ({one_line(error)})"]) from None
    if not isinstance(data, dict):
        raise CheckpointError(path, [f"a JSON {type(data).__name__}, not an object"])
    return data


def _checked(kind: type, data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The data, if it has the fields of this kind of record, of their types."""
    types = {name: typing.get_origin(t) or t for name, t in typing.get_type_hints(kind).items()}
    wrong = data.keys() ^ types.keys()
    wrong |= {name for name in data.keys() & types.keys() if type(data[name]) is not types[name]}
    if wrong:
        raise CheckpointError(path, [f"not a record of this layout: {summarise(sorted(wrong))}"])
    return data


def _changed_files(converted: Converted, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each piece and its files whose bytes are not what was written; the next piece's are read
    meanwhile, which also brings them into the page cache."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:

        def start(name: str) -> dict[str, Future[int]]:
            where = converted.folder / PIECES / name
            files = converted.pieces[name].files
            return {file: pool.submit(crc32_of, where / file) for file in files}

        started = start(names[0]) if names else {}
        for at, name in enumerate(names):
            running, changed = started, []
            for file, (_, crc) in converted.pieces[name].files.items():
                try:
                    if running[file].result() != crc:
                        changed.append(f"{PIECES}/{name}/{file}: its bytes are not those written")
                except OSError as error:
                    changed.append(f"{PIECES}/{name}/{file}: not readable ({one_line(error)})")
            started = start(names[at + 1]) if at + 1 < len(names) else {}
            yield name, changed


def _read_piece(
    converted: Converted, name: str, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # Where a wider dtype is wanted orbax widens on the host.
    placed = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)
        for path, leaf in wanted.items()
    }
    return jax.block_until_ready(read_arrays(converted.folder / PIECES / name, placed))


def _bar(doing: str, num_bytes: int, progress: bool) -> tqdm:
    return tqdm(
        total=num_bytes,
        unit="B",
        unit_scale=True,
        desc=doing,
        disable=None if progress else True,
    )


def _advice(converted: Converted, spoilt: list[str]) -> str:
    pieces = dict.fromkeys("/".join(name.split(":")[0].split("/")[:2]) for name in spoilt)
    return (
        f"remove {summarise(pieces)} and run scripts/convert_checkpoint.py "
        f"{converted.record.source['folder']} {converted.folder} again: it writes what is missing"
    )


def _warn_of_needless_reads(
    converted: Converted, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    own = sum(converted.stored[path].num_bytes for path in wanted)
    read = sum(_bytes_read(converted.stored[path], leaf) for path, leaf in wanted.items())
    if read > own:
        cut = ",".join(f"{axis}={size}" for axis, size in converted.record.mesh.items())
        _log.warning(
            "%s is cut as %s: on this mesh up to %.1f GB are read for %.1f GB; converted with "
            "--mesh of this one, each byte is read once",
            converted.folder,
            cut,
            read / 1e9,
            own / 1e9,
        )


def _bytes_read(stored: Stored, leaf: jax.ShapeDtypeStruct) -> int:
    """At most, when each shard reads the files it overlaps whole."""
    shape = stored.shape
    shard = shape if leaf.sharding is None else leaf.sharding.shard_shape(shape)
    read = jnp.dtype(stored.dtype).itemsize
    for size, own, part in zip(shape, shard, stored.part, strict=True):
        covered = min(size, (own // part + 2) * part)
        if own % part == 0 or part % own == 0:
            covered = max(own, part)
        read *= size // own * covered
    return read


def _check_parameters(
    stored: Mapping[str, Stored], rows: Mapping[str, Parameter], again: str
) -> list[str]:
    problems = []
    missing = [path for path in rows if path not in stored]
    unknown = [path for path in stored if path not in rows]
    shapes = [
        f"{path} {list(stored[path].shape)}, expected {list(row.shape)}"
        for path, row in rows.items()
        if path in stored and stored[path].shape != row.shape
    ]
    dtypes = [
        f"{path} is {stored[path].dtype}"
        for path, row in rows.items()
        if path in stored and not _fits(stored[path].dtype, row.kind)
    ]
    if missing:
        problems.append(f"missing: {summarise(missing)}; write what is missing with {again}")
    if unknown:
        problems.append(f"not part of the model of config.json: {summarise(unknown)}")
    if shapes:
        problems.append(f"shape: {summarise(shapes)}")
    if dtypes:
        problems.append(f"dtype: {summarise(dtypes)}")
    return problems


def _fits(dtype: str, kind: str) -> bool:
    if kind == "float":
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    return dtype == {"words": "uint8", "float32": "float32"}[kind]
