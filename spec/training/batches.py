"""Samples packed into rows of one length, in an order that the seed and the step decide.

A row holds samples one after the other; positions start anew with each, and `first` keeps them
apart in attention. Which samples make up a step is a function of the seed and the step alone, so a
resumed run goes on where it stopped, on any number of devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Bool, Int

from kimi_jax.axes import pytree_dataclass
from spec.training.samples import Sample

_OPEN_ROWS = 16
"""Rows being filled at a time: enough to waste little, few enough to keep the order random."""


if TYPE_CHECKING:
    HostOrDevice = Array
else:
    # Laid out on the host, then placed; what runs on the devices sees arrays of theirs alone.
    HostOrDevice = Array | np.ndarray


@pytree_dataclass
class Batch:
    """Rows of T tokens. Padding is not real, not generated, and sees itself alone."""

    tokens: Int[HostOrDevice, "B T"]
    positions: Int[HostOrDevice, "B T"]
    first: Int[HostOrDevice, "B T"]
    """The place in the row of the first token of each token's sample."""
    generated: Bool[HostOrDevice, "B T"]
    is_real: Bool[HostOrDevice, "B T"]


@dataclasses.dataclass(frozen=True)
class Placed:
    """One sample's place in a batch: which sample, its row, and where it begins there."""

    sample: int
    row: int
    start: int


def pack_order(lengths: Sequence[int], order: Sequence[int], length: int) -> list[list[int]]:
    """Rows of samples, each row at most `length` tokens; every sample of `order` once.

    A sample goes into the open row it fills best; of too many open rows the fullest is closed.
    """
    closed: list[list[int]] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for sample in order:
        need = lengths[sample]
        if need > length:
            raise ValueError(f"sample {sample} has {need} tokens, a row holds {length}")
        fitting = [i for i, left in enumerate(room) if left >= need]
        if fitting:
            at = min(fitting, key=room.__getitem__)
        else:
            if len(rows) == _OPEN_ROWS:
                fullest = min(range(len(rows)), key=room.__getitem__)
                closed.append(rows.pop(fullest))
                room.pop(fullest)
            rows.append([])
            room.append(length)
            at = len(rows) - 1
        rows[at].append(sample)
        room[at] -= need
    return closed + rows


def lay_out(
    samples: Sequence[Sample], rows: Sequence[Sequence[int]], *, num_rows: int, length: int
) -> tuple[Batch, list[Placed]]:
    """The batch (NumPy arrays) of these rows, padded to `num_rows` rows of `length` tokens."""
    shape = (num_rows, length)
    tokens = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    # A padding token is a sample of its own, so that its attention has something to see.
    first = np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy()
    generated = np.zeros(shape, np.bool_)
    is_real = np.zeros(shape, np.bool_)
    placed = []
    for row, members in enumerate(rows):
        at = 0
        for index in members:
            sample = samples[index]
            end = at + len(sample.input_ids)
            tokens[row, at:end] = sample.input_ids
            positions[row, at:end] = np.arange(end - at)
            first[row, at:end] = at
            generated[row, at:end] = sample.loss_mask
            is_real[row, at:end] = True
            placed.append(Placed(index, row, at))
            at = end
    columns: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "first": first,
        "generated": generated,
        "is_real": is_real,
    }
    return Batch(**columns), placed


def count_targets(samples: Sequence[Sample], indices: Sequence[int]) -> int:
    """Rows of these samples that the first draft step is trained on; see `unroll.valid_rows`."""
    masks = [samples[i].loss_mask for i in indices]
    return int(sum(np.count_nonzero(mask[2:]) for mask in masks))


class Schedule:
    """What each step trains on: epochs of all samples, shuffled and packed anew."""

    def __init__(
        self, samples: Sequence[Sample], *, num_rows: int, length: int, seed: int, accumulate: int
    ):
        if not samples:
            raise ValueError("no samples to train on")
        self._samples = samples
        self._lengths = [len(sample.input_ids) for sample in samples]
        self.num_rows, self.length, self.accumulate = num_rows, length, accumulate
        self._seed = seed
        self._epoch, self._rows = -1, [[0]]
        self._starts: list[int] = [0]

    def step_rows(self, step: int) -> list[list[list[int]]]:
        """The step's micro-batches, each the rows of sample indices it holds."""
        while len(self._starts) < 2 or self._starts[-1] <= step:
            self._starts.append(self._starts[-1] + self.steps_in(len(self._starts) - 1))
        epoch = max(e for e, start in enumerate(self._starts[:-1]) if start <= step)
        rows = self._epoch_rows(epoch)
        per_step = self.num_rows * self.accumulate
        at = (step - self._starts[epoch]) * per_step
        mine = rows[at : at + per_step]
        return [mine[i : i + self.num_rows] for i in range(0, len(mine), self.num_rows)]

    def steps_in(self, epoch: int) -> int:
        """Steps one pass over all samples takes."""
        per_step = self.num_rows * self.accumulate
        return -(-len(self._epoch_rows(epoch)) // per_step)

    def _epoch_rows(self, epoch: int) -> list[list[int]]:
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self._samples)).tolist()
            rows = pack_order(self._lengths, order, self.length)
            # The last rows to close are the emptiest; spread over the epoch.
            self._rows = [rows[i] for i in rng.permutation(len(rows))]
            self._epoch = epoch
        return self._rows
