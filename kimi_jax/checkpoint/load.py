"""Published tensors to sharded JAX arrays in the kernels' layout, a block of bytes at a time.

Of each published tensor the rows that devices of this process need are read once, in blocks of
some megabytes by many threads, transposed while they are in the processor's cache, and copied
into the shards. The host holds two parameters at most, the one being read and the one on its way
to the devices (5.6 GB of Kimi-K2.5, 59 % of a layer; on a CPU they are the arrays themselves), and
three blocks of at most 2 MiB a thread. It knows nothing of the model's code.
"""

import functools
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint.converted import Converted, open_converted, read_record, restore_params
from kimi_jax.checkpoint.reader import DTYPES, CheckpointFiles, summarise
from kimi_jax.checkpoint.table import Index, Parameter, Plan, check
from kimi_jax.config import ModelConfig

# Output columns copied at once: a transpose of bytes runs three times faster in strips that fit
# the cache (0.4 to 1.1 GB/s for 2048 x 3584 on one core).
_STRIP = 64
_ALIGNMENT = 64
_MAX_THREADS = 16
# Larger blocks spend less on calls, and three of them a thread are memory beside the weights: a
# four-thousandth of what is loaded, within these bounds (2 MiB was faster than 1 and 4 at full
# width).
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 18, 1 << 21
# Below this NumPy's transpose costs less than the call into XLA's.
_SMALLEST_FOR_XLA = 1 << 15

Cut = tuple[tuple[int, int], ...]
"""First and last (exclusive) of each axis of a parameter."""


def open_checkpoint(cfg: ModelConfig, folder: str | os.PathLike[str]) -> Plan | Converted:
    """How to load a checkpoint, published or converted, once all of it fits the configuration.

    Raises:
        CheckpointError: names everything that does not fit; no weights have been read.
    """
    record = read_record(folder)
    if record is not None:
        return open_converted(cfg, folder, record)
    return check(cfg, CheckpointFiles.open(folder))


def load_params(
    plan: Plan | Converted, wanted: Mapping[str, jax.ShapeDtypeStruct], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The checkpoint's parameters as arrays, by path.

    Floats are converted to the dtype wanted: exact when it holds every value of the stored one,
    else rounded to nearest even, which a converted checkpoint refuses.

    Args:
        plan: what `open_checkpoint` found.
        wanted: shape, dtype and sharding (None: the first local device) of every parameter of the
            plan. `packed` must be uint8 and `e_score_correction_bias` float32.
        progress: shows bytes, GB/s and the time left on stderr when that is a terminal.

    Raises:
        ValueError: `wanted` is not the set of parameters the checkpoint has; nothing was read.
        CheckpointError, OSError: a file that shrank, is damaged or cannot be read.
    """
    _check_wanted(plan, wanted)
    if isinstance(plan, Converted):
        return restore_params(plan, wanted, progress=progress)
    sizes = (math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in wanted.values())
    block = min(max(_SMALLEST_BLOCK, sum(sizes) // 4000), _LARGEST_BLOCK)
    reads = [_Read(plan, row, wanted[path], block) for path, row in plan.parameters.items()]
    # The largest first: what is in flight beside them then adds to little else.
    reads.sort(key=lambda read: -read.num_bytes)
    out: dict[str, jax.Array] = {}
    bar = tqdm(
        total=sum(read.num_bytes for read in reads),
        unit="B",
        unit_scale=True,
        desc="loading",
        disable=None if progress else True,
    )
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with bar, ThreadPoolExecutor(threads) as pool:
        moving: jax.Array | None = None
        for read in reads:
            array = read.load(pool, bar)
            # Transfers are asynchronous and keep their source alive until they end.
            jax.block_until_ready(moving)
            out[read.row.path] = moving = array
        jax.block_until_ready(moving)
    return {path: out[path] for path in plan.parameters}


class _Copy(NamedTuple):
    """One shard's share of a block: `shards[cut][:, *target] = dense[:, *source]`."""

    cut: Cut
    target: Index
    source: Index


class _Block(NamedTuple):
    """Rows first..last (of the first axis of `split_shape`) of one published tensor, and of the
    same rows of the experts after it, that one thread reads, transposes and shares out."""

    experts: range
    first: int
    last: int
    needed: Index
    copies: tuple[_Copy, ...]


class _Read:
    """One parameter: which blocks to read, and the shards they fill."""

    def __init__(self, plan: Plan, row: Parameter, wanted: jax.ShapeDtypeStruct, block_bytes: int):
        self.row = row
        self._block_bytes = block_bytes
        self._files = plan.files
        self._names = [plan.file_names[name] for name in row.names()]
        self._dtype = np.dtype(wanted.dtype)
        sharding = wanted.sharding
        self._sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        indices = self._sharding.addressable_devices_indices_map(row.shape).values()
        # Devices that hold copies of one shard share its host array.
        self._cuts = tuple(dict.fromkeys(self._cut(index) for index in indices))
        stored = DTYPES[plan.files.tensors[self._names[0]].dtype]
        self._stored = np.dtype(np.uint8) if row.kind == "words" else stored
        self._row_bytes = math.prod(row.split_shape[1:]) * self._stored.itemsize
        self._blocks = tuple(self._list_blocks())
        self.num_bytes = sum(len(b.experts) * (b.last - b.first) for b in self._blocks)
        self.num_bytes *= self._row_bytes

    def load(self, pool: ThreadPoolExecutor, bar: tqdm) -> jax.Array:
        """The array; its transfer may still be going on."""
        shards = _aligned_empties(self._cuts, self._dtype)
        # A parameter without experts is filled as if it were that of one.
        stacks = {c: a if self.row.num_experts else a[None] for c, a in shards.items()}
        for num_bytes in pool.map(lambda block: self._fill(stacks, block), self._blocks):
            bar.update(num_bytes)
        return jax.make_array_from_callback(
            self.row.shape,
            self._sharding,
            lambda index: shards[self._cut(index)],
            dtype=self._dtype,
        )

    def _cut(self, index: Index | None) -> Cut:
        parts = index or (slice(None),) * len(self.row.shape)
        bounds = (p.indices(size)[:2] for p, size in zip(parts, self.row.shape, strict=True))
        return tuple(bounds)

    def _list_blocks(self) -> Iterator[_Block]:
        height = 1 << max(0, (self._block_bytes // max(1, self._row_bytes)).bit_length() - 1)
        for experts, cuts in self._expert_ranges():
            split = {cut: self._split(cut) for cut in cuts}
            rows = [
                (first, min(first + height, end))
                for begin, end in _union([index[0] for index in split.values()])
                for first in range(begin, end, height)
            ]
            if not rows:
                continue
            # Small tensors go several experts at a time.
            depth = max(1, self._block_bytes // max(1, (rows[0][1] - rows[0][0]) * self._row_bytes))
            for first, last in rows:
                needed, copies = self._copies(split, first, last)
                for begin in range(experts.start, experts.stop, depth):
                    part = range(begin, min(begin + depth, experts.stop))
                    yield _Block(part, first, last, needed, copies)

    def _expert_ranges(self) -> Iterator[tuple[range, list[Cut]]]:
        """Experts that the same shards want, and those shards."""
        if self.row.num_experts is None:
            yield range(1), list(self._cuts)
            return
        edges = sorted({edge for cut in self._cuts for edge in cut[0]})
        for begin, end in itertools.pairwise(edges):
            yield range(begin, end), [cut for cut in self._cuts if cut[0][0] <= begin < cut[0][1]]

    def _split(self, cut: Cut) -> Index:
        """A cut as an index into the stored tensor of one expert, taken apart."""
        own = cut if self.row.num_experts is None else cut[1:]
        return self.row.split_index(tuple(slice(*bounds) for bounds in own))

    def _copies(
        self, split: dict[Cut, Index], first: int, last: int
    ) -> tuple[Index, tuple[_Copy, ...]]:
        """What to transpose of a block of rows, as an index into it, and where parts of that go."""
        # What nobody here wants of the other axes is left out.
        hull = [
            (min(part.start for part in parts), max(part.stop for part in parts))
            for parts in zip(*split.values(), strict=True)
        ]
        hull[0] = (first, last)
        copies = []
        for cut, index in split.items():
            bounds = [
                (max(low, part.start), min(high, part.stop))
                for part, (low, high) in zip(index, hull, strict=True)
            ]
            if all(low < high for low, high in bounds):
                target, source = (
                    tuple(
                        slice(bounds[axis][0] - origin[axis], bounds[axis][1] - origin[axis])
                        for axis in self.row.order
                    )
                    for origin in ([part.start for part in index], [low for low, _ in hull])
                )
                copies.append(_Copy(cut, target, source))
        return (slice(None), *(slice(*bounds) for bounds in hull[1:])), tuple(copies)

    def _fill(self, stacks: Mapping[Cut, np.ndarray], block: _Block) -> int:
        row, depth, rows = self.row, len(block.experts), block.last - block.first
        raw = _scratch(depth * rows * self._row_bytes).reshape(depth, -1)
        for target, expert in zip(raw, block.experts, strict=True):
            name = self._names[expert]
            self._files.read_into(target, name, block.first * self._row_bytes)
        stored = raw.view(self._stored).reshape(depth, rows, *row.split_shape[1:])
        needed = stored[(slice(None), *block.needed)]
        dense = _dense(needed.transpose(0, *(axis + 1 for axis in row.order)))
        if dense.dtype == self._dtype:
            bits = np.dtype(f"u{self._dtype.itemsize}")
            dense, stacks = dense.view(bits), {c: a.view(bits) for c, a in stacks.items()}
        for cut, target, source in block.copies:
            origin = cut[0][0] if row.num_experts else 0
            experts = slice(block.experts.start - origin, block.experts.stop - origin)
            np.copyto(
                stacks[cut][(experts, *target)], dense[(slice(None), *source)], casting="unsafe"
            )
        return raw.nbytes


def _union(parts: list[slice]) -> Iterator[tuple[int, int]]:
    """The intervals that the parts cover together."""
    begin = end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > end:
            if end > begin:
                yield begin, end
            begin = part.start
        end = max(end, part.stop)
    if end > begin:
        yield begin, end


_of_thread = threading.local()


def _scratch(num_bytes: int) -> np.ndarray:
    """Bytes that are this thread's until its next call; never given back, so never faulted in."""
    kept = getattr(_of_thread, "scratch", None)
    if kept is None or len(kept) < num_bytes:
        kept = _of_thread.scratch = np.empty(num_bytes, np.uint8)
    return kept[:num_bytes]


def _aligned_empties(cuts: Iterable[Cut], dtype: np.dtype) -> dict[Cut, np.ndarray]:
    """Fresh arrays at multiples of 64 bytes, which a CPU device takes over without a copy.

    All in one piece of memory: NumPy asks for huge pages, and faults are most of the cost of
    touching it for the first time.
    """
    shapes = {cut: [last - first for first, last in cut] for cut in cuts}
    spans, at = {}, 0
    for cut, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        spans[cut] = (at, at + size)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    raw = np.empty(at + _ALIGNMENT, np.uint8)
    raw = raw[-raw.ctypes.data % _ALIGNMENT :]
    return {
        cut: raw[slice(*spans[cut])].view(dtype).reshape(shape) for cut, shape in shapes.items()
    }


def _dense(view: np.ndarray) -> np.ndarray:
    """The same values, and if the view was a transposed one, contiguous.

    By XLA's host transpose, the one it uses for transfers: 2.5 GB/s of bytes on one core where
    strips of NumPy copies give 0.6 to 1.5.
    """
    if view.ndim < 2 or view.strides[-1] == view.itemsize:
        return view
    cpu = _cpu_device()
    if cpu is not None and view.itemsize <= 4 and view.nbytes >= _SMALLEST_FOR_XLA:
        bits = view.view(f"u{view.itemsize}") if view.itemsize > 1 else view.view(np.uint8)
        return np.asarray(jax.device_put(bits, cpu)).view(view.dtype)
    out = np.empty(view.shape, view.dtype)
    copy_converted(out, view)
    return out


@functools.cache
def _cpu_device() -> Any:
    """None where JAX has been told to have accelerators alone."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def copy_converted(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, with floats converted; in strips where one of them is transposed."""
    target, source = _same_bits(target, source)
    is_plain = all(a.ndim < 2 or a.strides[-1] == a.itemsize for a in (source, target))
    for strip in [slice(None)] if is_plain else _strips(source.shape[-1]):
        np.copyto(target[..., strip], source[..., strip], casting="unsafe")


def _same_bits(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As unsigned integers if they are of one dtype: NumPy copies those faster than added ones."""
    if source.dtype != target.dtype:
        return target, source
    bits = np.dtype(f"u{target.dtype.itemsize}")
    return target.view(bits), source.view(bits)


def _strips(width: int) -> Iterator[slice]:
    return (slice(first, first + _STRIP) for first in range(0, width, _STRIP))


def _check_wanted(plan: Plan | Converted, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
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
