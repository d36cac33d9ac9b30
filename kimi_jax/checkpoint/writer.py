"""Writes checkpoints in the published layout: safetensors shards, their index, `config.json`.

Shards are written one tensor at a time under temporary names and renamed at the end, the index
and `config.json` last, so that a run that was cut short never looks like a checkpoint.
`export_params` goes from model parameters back to published tensors through `table`.
"""

import dataclasses
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from kimi_jax.checkpoint.load import copy_converted
from kimi_jax.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME, summarise
from kimi_jax.checkpoint.table import TEXT_PREFIX, Parameter, parameters, weight_shapes
from kimi_jax.config import ModelConfig

_SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}
_PARTIAL = ".partial"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor of known shape and dtype, made when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, np.ndarray | LazyTensor]],
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """The folder, with the tensors in shards of about `max_shard_bytes` and the config beside.

    Holds one `LazyTensor`'s value at a time, and arrays of one shard at most. One shard becomes
    `model.safetensors` without an index.

    Args:
        folder: made when it does not exist; other files in it are left alone.
        tensors: published names and values, each name once.
        config: written to `config.json`.
        max_shard_bytes: a shard is closed before it grows past this (one tensor may).
        overwrite: replaces the weights a folder already holds.

    Raises:
        FileExistsError: the folder holds weights and `overwrite` is off.
        ValueError: a name twice, no tensors, or a dtype the format lacks.
    """
    folder = Path(folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    old = [name for name in os.listdir(folder) if _is_weights(name)]
    if old and not overwrite:
        raise FileExistsError(f"{folder} already holds {summarise(sorted(old))}")
    partial: list[Path] = []
    weight_map: dict[str, int] = {}
    total = 0
    try:
        for shard in _shards(tensors, max_shard_bytes):
            path = folder / f"{len(partial) + 1:05d}{_PARTIAL}"
            partial.append(path)
            for name, tensor in shard:
                if name in weight_map:
                    raise ValueError(f"{name} is given twice")
                weight_map[name] = len(partial)
                total += _num_bytes(tensor)
            _write_shard(path, shard)
        if not weight_map:
            raise ValueError("no tensors to write")
        names = _shard_names(len(partial))
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[at - 1] for name, at in sorted(weight_map.items())},
        }
        texts = {"config.json": dict(config)}
        if len(names) > 1:
            texts = {INDEX_NAME: index, **texts}
        for name, data in texts.items():
            partial.append(folder / f"{name}{_PARTIAL}")
            partial[-1].write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        # From here on it is quick; the index goes first and comes last.
        for name in sorted(old, key=lambda name: name != INDEX_NAME):
            (folder / name).unlink()
        for path, name in zip(list(partial), [*names, *texts], strict=True):
            os.replace(path, folder / name)
    except BaseException:
        for path in partial:
            path.unlink(missing_ok=True)
        raise
    _log.info("%s: %d tensors, %d bytes, %d shards", folder, len(weight_map), total, len(names))
    return folder


def lack_of_space(folder: Path, num_bytes: int) -> str | None:
    """How much is needed and how much is free, where a folder's disk cannot hold so much more.

    The folder need not exist yet.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes <= free:
        return None
    return f"{num_bytes / 1e9:.1f} GB ({num_bytes} bytes), {free / 1e9:.1f} GB are free"


def export_params(
    params: Mapping[str, Any],
    cfg: ModelConfig,
    *,
    prefix: str = "",
    dtype: Any = None,
) -> Iterator[tuple[str, LazyTensor]]:
    """Published names and tensors of the model's parameters, for `write_checkpoint`.

    Experts are INT4 when the parameters are. One parameter's host copy is kept at a time.

    Args:
        params: arrays (NumPy or JAX) by path, the whole model.
        cfg: of the model.
        prefix: before every name, `language_model.` for the layout of Kimi-K2.5.
        dtype: of the published floats; by default each parameter's own. Router biases keep theirs.

    Raises:
        ValueError: the paths or shapes are not those of the model.
    """
    if prefix not in ("", TEXT_PREFIX):
        raise ValueError(f"prefix is {prefix!r}, published: '' or {TEXT_PREFIX!r}")
    is_int4 = any(path.endswith(".packed") for path in params)
    rows = parameters(cfg, is_int4=is_int4)
    if params.keys() != rows.keys():
        differing = summarise(sorted(params.keys() ^ rows.keys()))
        raise ValueError(f"not the parameters of this model: {differing}")
    for path, row in rows.items():
        if tuple(params[path].shape) != row.shape:
            raise ValueError(f"{path} is {list(params[path].shape)}, expected {list(row.shape)}")
    return _export(params, cfg, rows, prefix, dtype, is_int4)


def _export(
    params: Mapping[str, Any],
    cfg: ModelConfig,
    rows: dict[str, Parameter],
    prefix: str,
    dtype: Any,
    is_int4: bool,
) -> Iterator[tuple[str, LazyTensor]]:
    parts: dict[str, list[Parameter]] = {}
    for row in rows.values():
        parts.setdefault(row.name, []).append(row)
    kept: dict[str, np.ndarray] = {}

    def on_host(row: Parameter) -> np.ndarray:
        if row.num_experts is None:
            return _to_host(params[row.path])
        if row.path not in kept:
            kept.clear()
            kept[row.path] = _to_host(params[row.path])
        return kept[row.path]

    def published(group: list[Parameter], expert: int, dtype: np.dtype) -> np.ndarray:
        row = group[0]
        out = np.empty(row.split_shape, np.uint8 if row.kind == "words" else dtype)
        for part in group:
            value = on_host(part)
            value = value if part.num_experts is None else value[expert]
            # The same view that loading reads through, written to.
            copy_converted(part.view(out.__getitem__, (slice(None),) * value.ndim), value)
        return out.view(dtype).reshape(row.published_shape)

    for group in parts.values():
        row = group[0]
        kind = np.dtype(params[row.path].dtype)
        if row.kind == "words":
            kind = np.dtype(np.int32)
        elif row.kind == "float" and dtype is not None:
            kind = np.dtype(dtype)
        for expert, name in enumerate(row.names()):
            make = _bind(published, group, expert, kind)
            yield prefix + name, LazyTensor(row.published_shape, kind, make)
    if is_int4:
        for name, shape in weight_shapes(cfg).items():
            value = np.array(shape, np.int32)
            yield prefix + name, LazyTensor(value.shape, value.dtype, _bind(np.copy, value))


def _to_host(array: Any) -> np.ndarray:
    # A JAX array keeps the host copy made of it; of a copy, it goes with the copy.
    return np.asarray(array.copy() if isinstance(array, jax.Array) else array)


def _bind(function: Callable[..., np.ndarray], *args: Any) -> Callable[[], np.ndarray]:
    return lambda: function(*args)


def _shards(
    tensors: Iterable[tuple[str, np.ndarray | LazyTensor]], max_bytes: int
) -> Iterator[list[tuple[str, np.ndarray | LazyTensor]]]:
    shard: list[tuple[str, np.ndarray | LazyTensor]] = []
    size = 0
    for name, tensor in tensors:
        if np.dtype(tensor.dtype) not in _SPELLINGS:
            raise ValueError(f"{name}: safetensors has no {tensor.dtype}")
        num = _num_bytes(tensor)
        if shard and size + num > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += num
    if shard:
        yield shard


def _write_shard(path: Path, shard: list[tuple[str, np.ndarray | LazyTensor]]) -> None:
    # Wide dtypes first, so that every tensor is aligned without a gap, which the format forbids.
    shard = sorted(shard, key=lambda item: -np.dtype(item[1].dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in shard:
        end = at + _num_bytes(tensor)
        header[name] = {
            "dtype": _SPELLINGS[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, tensor in shard:
            _write_tensor(file, name, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, name: str, tensor: np.ndarray | LazyTensor) -> None:
    value = tensor.make() if isinstance(tensor, LazyTensor) else tensor
    if value.shape != tuple(tensor.shape) or value.dtype != np.dtype(tensor.dtype):
        raise ValueError(
            f"{name}: {value.dtype} {list(value.shape)} was made, "
            f"{tensor.dtype} {list(tensor.shape)} announced"
        )
    file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _is_weights(name: str) -> bool:
    return name == INDEX_NAME or (name.endswith(".safetensors") and not name.startswith("."))


def _num_bytes(tensor: np.ndarray | LazyTensor) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
