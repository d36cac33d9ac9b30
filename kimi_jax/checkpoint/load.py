"""Published tensors to sharded JAX arrays, one parameter at a time.

Every device's shard is made from the bytes of that shard alone: the pieces a device needs are cut
from the mapped files, transposed and converted, and handed to the device. The host holds one
parameter at most, in the dtype of the model. It knows nothing of the model's code.
"""

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint.reader import DTYPES, summarise
from kimi_jax.checkpoint.table import Index, Parameter, Plan

# Output columns copied at once: a transpose of bytes runs three times faster in strips that fit
# the cache (0.4 to 1.1 GB/s for 2048 x 3584 on one core).
_STRIP = 64
_ALIGNMENT = 64
_MAX_THREADS = 16


def load_params(
    plan: Plan, wanted: Mapping[str, jax.ShapeDtypeStruct], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The checkpoint's parameters as arrays, by path.

    Floats are converted to the dtype wanted: exact when it holds every value of the stored one,
    else rounded to nearest even.

    Args:
        plan: what `table.check` found in the checkpoint.
        wanted: shape, dtype and sharding (None: the first local device) of every parameter of the
            plan. `packed` must be uint8 and `e_score_correction_bias` float32.
        progress: shows a bar on stderr when that is a terminal.

    Raises:
        ValueError: `wanted` is not the set of parameters the checkpoint has; nothing was read.
    """
    _check_wanted(plan, wanted)
    total = sum(_num_bytes(plan, row) for row in plan.parameters.values())
    out: dict[str, jax.Array] = {}
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="loading", disable=None if progress else True
    )
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with bar, ThreadPoolExecutor(threads) as pool:
        # The largest first: the mapped pages it is read from then add to little else.
        for path, row in sorted(
            plan.parameters.items(), key=lambda item: -_num_bytes(plan, item[1])
        ):
            array = _load(plan, row, wanted[path], pool)
            # Transfers are asynchronous and keep their source alive until they end.
            out[path] = jax.block_until_ready(array)
            plan.files.release()
            bar.update(_num_bytes(plan, row))
    return out


def _load(
    plan: Plan, row: Parameter, wanted: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor
) -> jax.Array:
    made: dict[tuple, np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        cut = tuple(
            part.indices(size)[:2]
            for part, size in zip(index or (slice(None),) * len(row.shape), row.shape, strict=True)
        )
        # Devices that hold copies of one shard share its host array.
        if cut not in made:
            made[cut] = read_shard(plan, row, cut, np.dtype(wanted.dtype), pool)
        return made[cut]

    sharding = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(row.shape, sharding, shard, dtype=wanted.dtype)


def read_shard(
    plan: Plan,
    row: Parameter,
    cut: tuple[tuple[int, int], ...],
    dtype: np.dtype,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """The part of a parameter between `cut`'s (first, last) of each axis, in fresh memory."""
    out = _aligned_empty([last - first for first, last in cut], dtype)
    index = tuple(slice(first, last) for first, last in cut)
    if row.num_experts is None:
        _fill(out, plan, row, 0, index)
    else:
        jobs = zip(out, range(*cut[0]), strict=True)
        list(pool.map(lambda job: _fill(job[0], plan, row, job[1], index[1:]), jobs))
    return out


def _aligned_empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Fresh memory at a multiple of 64 bytes, which a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)


def _fill(target: np.ndarray, plan: Plan, row: Parameter, expert: int, index: Index) -> None:
    name = plan.file_names[row.name_of(expert)]
    dtype = np.uint8 if row.kind == "words" else None
    copy_converted(
        target,
        row.view(lambda i: plan.files.read(name, i, dtype=dtype, shape=row.split_shape), index),
    )


def copy_converted(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, with floats converted; in strips where one of them is transposed."""
    if source.dtype == target.dtype:
        # The same bits; numpy copies its own integers faster than added dtypes.
        bits = np.dtype(f"u{target.dtype.itemsize}")
        source, target = source.view(bits), target.view(bits)
    is_plain = all(a.ndim < 2 or a.strides[-1] == a.itemsize for a in (source, target))
    for strip in [slice(None)] if is_plain else _strips(source.shape[-1]):
        np.copyto(target[..., strip], source[..., strip], casting="unsafe")


def _strips(width: int) -> Iterator[slice]:
    return (slice(first, first + _STRIP) for first in range(0, width, _STRIP))


def _num_bytes(plan: Plan, row: Parameter) -> int:
    """Stored bytes of a parameter (both halves of kv_b_proj count their own)."""
    stored = plan.files.tensors[plan.file_names[row.name_of()]].dtype
    itemsize = 1 if row.kind == "words" else DTYPES[stored].itemsize
    return int(np.prod(row.shape, dtype=np.int64)) * itemsize


def _check_wanted(plan: Plan, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    problems = []
    absent = [path for path in wanted if path not in plan.parameters]
    unasked = [path for path in plan.parameters if path not in wanted]
    if absent:
        problems.append(f"the checkpoint has no {summarise(absent)}")
    if unasked:
        problems.append(f"the model has no {summarise(unasked)}")
    for path, row in plan.parameters.items():
        if path not in wanted:
            continue
        shape, dtype = tuple(wanted[path].shape), np.dtype(wanted[path].dtype)
        if shape != row.shape:
            problems.append(f"{path} is {list(shape)} in the model, {list(row.shape)} in the table")
        if row.kind == "words":
            is_right = dtype == np.uint8
        elif row.kind == "float32":
            is_right = dtype == np.float32
        else:
            is_right = jax.numpy.issubdtype(dtype, jax.numpy.floating)
        if not is_right:
            problems.append(f"{path} cannot be loaded as {dtype}")
    if problems:
        raise ValueError("; ".join(problems))
