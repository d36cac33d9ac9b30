"""Checkpoints in the kernels' layout: what such a folder holds, how it is checked and restored.

    config.json, tiktoken.model, ...   as published
    converted.json                     the record: layout, dtype, source, files, checksums
    pieces/layers.3.mlp.experts.gate_proj/, ...    arrays, written by orbax

A piece is one projection of a layer's routed experts, the rest of a layer, or one parameter outside
the layers. The record lists the pieces once all of them are there. `convert` writes such folders;
this knows nothing of the published tensors.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint.arrays import checksum, read_arrays
from kimi_jax.checkpoint.reader import CheckpointError, summarise
from kimi_jax.checkpoint.records import one_line
from kimi_jax.checkpoint.table import LAYOUT_VERSION, Parameter, parameters
from kimi_jax.config import ModelConfig

RECORD_NAME = "converted.json"
PIECES = "pieces"

_PIECE = re.compile(r"layers\.\d+\.mlp\.experts\.\w+|layers\.\d+|\w+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What `converted.json` says."""

    layout_version: int
    dtype: str
    """Of the floats; the embedding and the router's bias have their own."""
    is_int4: bool
    mesh: dict[str, int]
    """The files are cut as these devices would hold them."""
    source: dict[str, Any]
    """Folder, bytes, `config_sha256`, `weights_sha256` (see `fingerprint.weights_digest`), and the
    hashes the hub's client has left, by file."""
    written_by: dict[str, str]
    """Versions of kimi_jax, jax and orbax."""
    pieces: dict[str, dict[str, Any]] | None = None
    """Of each piece `parameters` (shape, dtype, checksum) and `files` (bytes); None while they are
    being written."""

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return dataclasses.asdict(self)

    @functools.cached_property
    def stored(self) -> dict[str, dict[str, Any]]:
        """Shape, dtype and checksum of each parameter."""
        pieces = (self.pieces or {}).values()
        return {path: about for piece in pieces for path, about in piece["parameters"].items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A whole converted checkpoint that fits the configuration.

    `cfg` has a `quantization` only if the experts are INT4, as a published checkpoint's `Plan`.
    """

    folder: Path
    cfg: ModelConfig
    parameters: dict[str, Parameter]
    is_int4: bool
    record: Record

    def stored_dtype(self, path: str) -> np.dtype:
        """The dtype a parameter has in the files."""
        return jnp.dtype(self.record.stored[path]["dtype"])


def piece_of(path: str) -> str:
    """The piece a parameter is in."""
    match = _PIECE.match(path)
    assert match is not None
    return match[0]


def group(paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths by piece."""
    out: dict[str, list[str]] = {}
    for path in paths:
        out.setdefault(piece_of(path), []).append(path)
    return out


def read_record(folder: str | os.PathLike[str]) -> Record | None:
    """What a folder's record says; None for a folder that is no converted checkpoint.

    Raises:
        CheckpointError: the record cannot be read or is of another layout.
    """
    path = Path(folder) / RECORD_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"not readable as JSON ({one_line(error)})"]) from None
    version = data.get("layout_version") if isinstance(data, dict) else None
    if version != LAYOUT_VERSION:
        by = data.get("written_by") if isinstance(data, dict) else None
        by = ", ".join(f"{k} {v}" for k, v in by.items()) if isinstance(by, dict) else "unknown"
        raise CheckpointError(
            folder,
            [
                f"holds layout {version!r} (written by {by}), this kimi_jax "
                f"{versions()['kimi_jax']} reads layout {LAYOUT_VERSION}: convert the published "
                "checkpoint again, or use the version that wrote this one"
            ],
        )
    names = {field.name for field in dataclasses.fields(Record)}
    if data.keys() != names:
        differing = summarise(sorted(data.keys() ^ names))
        raise CheckpointError(path, [f"not a record of this layout: {differing}"])
    return Record(**data)


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

    Nothing is read but the record and the files' sizes.

    Raises:
        CheckpointError: names everything that is missing or does not fit.
    """
    folder = Path(folder).expanduser().absolute()
    if record.pieces is None:
        done = len(written_pieces(folder))
        raise CheckpointError(
            folder,
            [
                f"its conversion is not finished ({done} pieces are there); go on with "
                f"scripts/convert_checkpoint.py {record.source['folder']} {folder}"
            ],
        )
    rows = parameters(cfg, is_int4=record.is_int4)
    problems = _check_parameters(record, rows)
    if record.is_int4 and cfg.quantization is None:
        problems.append("INT4 experts, but config.json has no quantization_config")
    problems += _check_files(folder, record.pieces)
    if problems:
        raise CheckpointError(folder, problems)
    return Converted(
        folder=folder,
        cfg=cfg if record.is_int4 else dataclasses.replace(cfg, quantization=None),
        parameters=rows,
        is_int4=record.is_int4,
        record=record,
    )


def restore_params(
    converted: Converted, wanted: Mapping[str, jax.ShapeDtypeStruct], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The parameters as arrays, by path: `load.load_params` of a converted checkpoint.

    Every device's share is read for it alone, a piece at a time, and every array is compared with
    the checksum it was written with. Floats are widened where a wider dtype is wanted.

    Raises:
        ValueError: a dtype that does not hold every stored value; nothing was read.
        CheckpointError: what cannot be read, or is not what was written.
    """
    stored = converted.record.stored
    narrowed = {
        path: str(leaf.dtype)
        for path, leaf in wanted.items()
        if not holds(leaf.dtype, jnp.dtype(stored[path]["dtype"]))
    }
    if narrowed:
        asked = " and ".join(sorted(set(narrowed.values())))
        raise ValueError(
            f"{converted.folder} is stored in {converted.record.dtype}, and {asked} would round "
            f"{summarise(narrowed, 2)}: ask for dtype {converted.record.dtype!r}, or convert "
            f"{converted.record.source['folder']} with --dtype {asked}"
        )
    sizes = {path: _num_bytes(stored[path]) for path in wanted}
    out: dict[str, jax.Array] = {}
    sums: dict[str, jax.Array] = {}
    bar = tqdm(
        total=sum(sizes.values()),
        unit="B",
        unit_scale=True,
        desc="restoring",
        disable=None if progress else True,
    )
    with bar:
        for piece, paths in group(wanted).items():
            for path, array in _read_piece(converted, piece, paths, wanted).items():
                sums[path] = checksum(array)
                out[path] = _widened(array, wanted[path].dtype)
            jax.block_until_ready([out[path] for path in paths])
            bar.update(sum(sizes[path] for path in paths))
    found = jax.device_get(sums)
    damaged = [path for path, value in found.items() if int(value) != stored[path]["checksum"]]
    if damaged:
        where = sorted({str(Path(PIECES) / piece_of(path)) for path in damaged})
        raise CheckpointError(
            converted.folder,
            [
                f"not what was written: {summarise(damaged)}. Remove {summarise(where)} and "
                f"run scripts/convert_checkpoint.py {converted.record.source['folder']} "
                f"{converted.folder} again: it writes what is missing"
            ],
        )
    return {path: out[path] for path in wanted}


def written_pieces(folder: Path) -> list[str]:
    """Names of the whole pieces in a folder: those that are being written have another name."""
    pieces = folder / PIECES
    names = os.listdir(pieces) if pieces.is_dir() else []
    return sorted(name for name in names if _PIECE.fullmatch(name))


def list_files(piece: Path) -> dict[str, int]:
    """Bytes of every file of a piece, by its path inside."""
    return {
        path.relative_to(piece).as_posix(): path.stat().st_size
        for path in sorted(piece.rglob("*"))
        if path.is_file()
    }


def spoilt_files(piece: Path, files: Mapping[str, int]) -> list[str]:
    """What is missing of a piece or has another size than is recorded."""
    if not piece.is_dir():
        return [f"{piece.name}: missing"]
    found = list_files(piece)
    out = []
    for name, size in files.items():
        if name not in found:
            out.append(f"{piece.name}/{name}: missing")
        elif found[name] != size:
            out.append(f"{piece.name}/{name}: {found[name]} bytes, {size} were written")
    return out


def holds(wanted: Any, stored: Any) -> bool:
    """Whether a dtype has every value of another."""
    if wanted == stored:
        return True
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wanted, stored)):
        return False
    wide, narrow = jnp.finfo(wanted), jnp.finfo(stored)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp


def _read_piece(
    converted: Converted,
    piece: str,
    paths: list[str],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        path: jax.ShapeDtypeStruct(
            wanted[path].shape,
            converted.stored_dtype(path),
            sharding=wanted[path].sharding or first_device,
        )
        for path in paths
    }
    try:
        return read_arrays(converted.folder / PIECES / piece, like)
    except MemoryError:
        raise
    except Exception as error:  # a broken file may raise nearly anything
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        where = converted.folder / PIECES / piece
        raise CheckpointError(where, [f"cannot be read ({one_line(error)})"]) from error


def _widened(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else array.astype(dtype)


def _check_parameters(record: Record, rows: Mapping[str, Parameter]) -> list[str]:
    stored = record.stored
    problems = []
    missing = [path for path in rows if path not in stored]
    unknown = [path for path in stored if path not in rows]
    shapes = [
        f"{path} {stored[path]['shape']}, expected {list(row.shape)}"
        for path, row in rows.items()
        if path in stored and tuple(stored[path]["shape"]) != row.shape
    ]
    if missing:
        problems.append(f"config.json asks for parameters that are not there: {summarise(missing)}")
    if unknown:
        problems.append(f"not part of this model: {summarise(unknown)}")
    if shapes:
        problems.append(f"shape: {summarise(shapes)}")
    return problems


def _check_files(folder: Path, pieces: Mapping[str, Mapping[str, Any]]) -> list[str]:
    spoilt = []
    for name, piece in pieces.items():
        spoilt += spoilt_files(folder / PIECES / name, piece["files"])
    return [f"{PIECES}: {summarise(spoilt)}"] if spoilt else []


def _num_bytes(about: Mapping[str, Any]) -> int:
    return math.prod(about["shape"]) * jnp.dtype(about["dtype"]).itemsize
