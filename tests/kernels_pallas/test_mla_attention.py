"""Absorbed attention against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.mla_attention.reference import mla_attention

B, T, N, C, R, S = 2, 3, 4, 16, 8, 12
SCALE = 0.37

flat_attend = jax.jit(mla_attention, static_argnames="scale")


def attend(q_latent, q_rope, cache, positions, *, scale):
    """With the cache as [B, S, CR], which the loop reads row by row."""
    return flat_attend(q_latent, q_rope, cache.reshape(-1, C + R), positions, scale=scale)


def by_loop(q_latent, q_rope, cache, positions):
    out = np.zeros(q_latent.shape)
    for b, t, n in np.ndindex(out.shape[:3]):
        keys = cache[b, : positions[b, t] + 1].astype(np.float64)
        scores = SCALE * (keys[:, :C] @ q_latent[b, t, n] + keys[:, C:] @ q_rope[b, t, n])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ keys[:, :C] / weights.sum()
    return out


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, C), (B, T, N, R), (B, S, C + R)
    positions = np.array([[0, 1, 2], [8, 9, 10]], np.int32)
    return *(rng.normal(size=s).astype(np.float32) for s in shapes), positions


def test_equals_the_loop_with_another_start_in_every_row(arrays, assert_close):
    # Sums of at most 24 float32 products of magnitude about 1.
    assert_close(attend(*arrays, scale=SCALE), by_loop(*arrays), atol=2e-6)


def test_slots_past_a_position_have_no_weight(arrays):
    q_latent, q_rope, cache, positions = arrays
    expected = attend(*arrays, scale=SCALE)
    spoilt = cache.copy()
    spoilt[0, 3:], spoilt[1, 11:] = 1e30, -1e30
    np.testing.assert_array_equal(
        attend(q_latent, q_rope, spoilt, positions, scale=SCALE), expected
    )


def test_large_scores_do_not_overflow(arrays, assert_close):
    q_latent, q_rope, cache, positions = arrays
    out = attend(q_latent * 1e4, q_rope * 1e4, cache, positions, scale=SCALE)
    # Scores of 1e4 have a float32 step of 1e-3, so near-ties of the softmax keep three digits.
    assert_close(out, by_loop(q_latent * 1e4, q_rope * 1e4, cache, positions), atol=5e-2)


def test_bfloat16_cache_and_queries(arrays, assert_close):
    bf16 = jnp.bfloat16
    q_latent, q_rope, cache = (jnp.asarray(a).astype(bf16) for a in arrays[:3])
    out = attend(q_latent, q_rope, cache, arrays[3], scale=SCALE)
    assert out.dtype == bf16
    rounded = [np.asarray(a).astype(np.float64) for a in (q_latent, q_rope, cache)]
    # bfloat16 keeps 8 bits; softmax weights and the result are rounded once each.
    assert_close(out, by_loop(*rounded, arrays[3]), atol=2e-2)


def test_a_batch_of_one_equals_its_row_in_a_batch(arrays, assert_close):
    expected = attend(*arrays, scale=SCALE)
    for b in range(B):
        alone = attend(*(a[b : b + 1] for a in arrays), scale=SCALE)
        # Another product shape may sum in another order.
        assert_close(alone[0], expected[b], atol=1e-6)


def test_a_tree_sees_the_text_and_its_own_branch(arrays, assert_close):
    """Each query attends to the slots before the tree and to those its mask names, no others."""
    q_latent, q_rope, cache, _ = arrays
    # Two rows of a root with two children; the tree begins at slots 0 and 5.
    first = np.array([0, 5])
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)[None].repeat(B, axis=0)
    last = np.repeat(first[:, None] - 1, T, axis=1).astype(np.int32)
    out = jax.jit(mla_attention, static_argnames="scale")(
        q_latent, q_rope, cache.reshape(-1, C + R), last, scale=SCALE, tree_mask=mask
    )
    expected = np.zeros(q_latent.shape)
    for b, t, n in np.ndindex(expected.shape[:3]):
        slots = [*range(first[b]), *(first[b] + np.flatnonzero(mask[b, t]))]
        keys = cache[b, slots].astype(np.float64)
        scores = SCALE * (keys[:, :C] @ q_latent[b, t, n] + keys[:, C:] @ q_rope[b, t, n])
        weights = np.exp(scores - scores.max())
        expected[b, t, n] = weights @ keys[:, :C] / weights.sum()
    assert_close(out, expected, atol=2e-6)
