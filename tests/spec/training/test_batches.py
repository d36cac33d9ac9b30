"""Packing, and the order of the data."""

import numpy as np
import pytest

from spec.training.batches import Schedule, count_targets, lay_out, pack_order
from spec.training.samples import Sample


def sample(name: str, length: int, prompt: int = 1) -> Sample:
    mask = np.arange(length) >= prompt
    return Sample(id=name, input_ids=np.arange(length, dtype=np.int32) + 10, loss_mask=mask)


def test_every_sample_once_and_no_row_too_long():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200).tolist()
    order = rng.permutation(200).tolist()
    rows = pack_order(lengths, order, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert max(used) <= 64
    assert len(rows) <= 1.05 * sum(lengths) / 64 + 1


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 65 tokens, a row holds 64"):
        pack_order([3, 65], [0, 1], 64)


def test_lay_out_by_hand():
    samples = [sample("a", 3), sample("b", 2)]
    batch, placed = lay_out(samples, [[1, 0]], num_rows=2, length=6)
    assert batch.tokens.tolist() == [[10, 11, 10, 11, 12, 0], [0] * 6]
    assert batch.positions[0].tolist() == [0, 1, 0, 1, 2, 0]
    assert batch.first.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 4, 5]]
    assert batch.generated[0].tolist() == [False, True, False, True, True, False]
    assert batch.is_real.sum() == 5
    assert [(p.sample, p.row, p.start) for p in placed] == [(1, 0, 0), (0, 0, 2)]
    # Row i counts where token i + 2 is generated: one in "a", none in "b".
    assert count_targets(samples, [0, 1]) == 1


def test_steps_are_the_same_whoever_asks_and_cover_each_epoch():
    samples = [sample(str(i), 4 + i % 5) for i in range(23)]
    options = {"num_rows": 2, "length": 16, "seed": 7, "accumulate": 2}
    one, two = Schedule(samples, **options), Schedule(samples, **options)
    steps = one.steps_in(0) + one.steps_in(1)
    all_rows = [one.step_rows(step) for step in range(steps)]
    assert [two.step_rows(step) for step in reversed(range(steps))][::-1] == all_rows
    order = [[i for rows in step for row in rows for i in row] for step in all_rows]
    first = sum(order[: one.steps_in(0)], [])
    second = sum(order[one.steps_in(0) :], [])
    assert sorted(first) == sorted(second) == list(range(23)) and first != second
    assert all(len(rows) <= 2 for step in all_rows for rows in step)
    other = Schedule(samples, **options | {"seed": 8})
    assert [other.step_rows(step) for step in range(3)] != all_rows[:3]


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        Schedule([], num_rows=1, length=8, seed=0, accumulate=1)
