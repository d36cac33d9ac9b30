"""A cache's slots shared out over devices, against plain numpy over all of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.slots import ALL, Share, write_rows


def shares_of(cache: np.ndarray, batch: int, count: int) -> list[np.ndarray]:
    """What each device holds of [B*S, ...]."""
    rows = cache.reshape(batch, -1, *cache.shape[1:])
    return [rows[:, i::count].reshape(-1, *cache.shape[1:]) for i in range(count)]


def test_slots_by_hand():
    """Slots 0..9 over 4 devices: 0 4 8 | 1 5 9 | 2 6 | 3 7."""
    assert [int(Share(i, 4).last(jnp.int32(9))) for i in range(4)] == [2, 2, 1, 1]
    assert [int(Share(i, 4).last(jnp.int32(0))) for i in range(4)] == [0, -1, -1, -1]
    assert [int(Share(i, 4).first(jnp.int32(6))) for i in range(4)] == [2, 2, 1, 1]
    assert [int(Share(i, 4).slot(jnp.int32(2))) for i in range(4)] == [8, 9, 10, 11]
    assert [Share(0, 4).most(n) for n in (1, 4, 5)] == [1, 1, 2]
    assert ALL.is_all and not Share(0, 2).is_all


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    count=st.sampled_from([1, 2, 4, 8]),
    B=st.integers(1, 3),
    T=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_rows_are_written_where_they_are_held_and_nowhere_else(count, B, T, seed):
    """Up to the last slot; a row next to it belongs to another batch row."""
    rng = np.random.default_rng(seed)
    S = 24
    cache = rng.normal(size=(B * S, 2)).astype(np.float32)
    rows = rng.normal(size=(B, T, 2)).astype(np.float32)
    start = rng.integers(0, S - T + 1, B).astype(np.int32)
    expected = cache.copy().reshape(B, S, 2)
    for b in range(B):
        expected[b, start[b] : start[b] + T] = rows[b]
    wanted = shares_of(expected.reshape(B * S, 2), B, count)
    for index, own in enumerate(shares_of(cache, B, count)):
        share = ALL if count == 1 else Share(index, count)
        written = write_rows(jnp.asarray(own), jnp.asarray(rows), jnp.asarray(start), share)
        np.testing.assert_array_equal(written, wanted[index])


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("last", [0, 3, 7, 12])
@pytest.mark.parametrize("X", [1, 5, 9])
def test_a_trees_mask_is_shared_out(count, last, X):
    mask = np.random.default_rng(X).random((1, 3, X)) < 0.5
    seen = np.zeros((3, 64), bool)
    seen[:, last + 1 : last + 1 + X] = mask[0]
    for index in range(count):
        share = Share(index, count)
        own = share.tree_mask(jnp.asarray(mask), jnp.asarray([last]))[0]
        first = int(share.last(jnp.int32(last))) + 1
        assert own.shape == (3, share.most(X))
        np.testing.assert_array_equal(own, seen[:, index::count][:, first : first + own.shape[1]])
