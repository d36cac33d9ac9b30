"""The attention kernel, interpreted, against the plain form and against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.mla_attention import mla_attention, mla_attention_with_lse, pallas_triton
from kernels_pallas.mla_attention.arg_specs import SPECS, MlaSpec
from kernels_pallas.mla_attention.reference import merge_parts, visible_slots
from kernels_pallas.tiles import MlaTiles

SCALE = 0.11

# float32 sums of a few hundred terms in another order. bfloat16 keeps 8 bits: the reference and the
# kernel round different softmax weights, and the result once.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

# What takes seconds interpreted at its full number of slots is cut to a text of this many.
INTERPRETED_SLOTS = 512


@functools.partial(jax.jit, static_argnames="implementation")
def run(q_latent, q_rope, cache, last, tree_mask=None, implementation="interpret"):
    return mla_attention_with_lse(
        q_latent,
        q_rope,
        cache,
        last,
        scale=SCALE,
        tree_mask=tree_mask,
        implementation=implementation,
    )


def oracle(q_latent, q_rope, cache, last, tree_mask=None):
    """Context and log-sum-exp in float64."""
    f64 = np.float64
    B, T, N, C = q_latent.shape
    S = cache.shape[0] // B
    rows = np.asarray(cache).astype(f64).reshape(B, S, -1)
    query = np.concatenate([np.asarray(q).astype(f64) for q in (q_latent, q_rope)], axis=-1)
    seen = np.zeros((B, T, S), bool)
    for b, t in np.ndindex(B, T):
        seen[b, t, : last[b, t] + 1] = True
        if tree_mask is not None:
            first = last[b, 0] + 1
            seen[b, t, first : first + tree_mask.shape[2]] |= tree_mask[b, t]
    scores = SCALE * np.einsum("btnc,bsc->btns", query, rows)
    scores = np.where(seen[:, :, None], scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.maximum(scores.max(-1, keepdims=True), -1e300)
        lse = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
        weights = np.where(np.isfinite(lse)[..., None], np.exp(scores - lse[..., None]), 0.0)
    return np.einsum("btns,bsc->btnc", weights, rows[..., :C]), lse


def check(arrays, dtype, assert_close_to_scale, assert_close):
    out, lse = run(*arrays)
    plain, plain_lse = run(*arrays, implementation="xla")
    assert out.dtype == plain.dtype == arrays[0].dtype and lse.dtype == jnp.float32
    exact, exact_lse = oracle(*arrays)
    empty = np.isinf(exact_lse)
    for given_lse in (lse, plain_lse):
        np.testing.assert_array_equal(np.isneginf(given_lse), empty)
        # Scores are float32 sums of products of the given operands, up to about 50 in magnitude.
        assert_close(np.where(empty, 0, given_lse), np.where(empty, 0, exact_lse), atol=2e-5)
    largest = max(float(np.abs(exact).max()), 1e-3)
    assert_close(out, exact, atol=TOLERANCE[dtype] * largest)
    assert_close(out, np.asarray(plain).astype(np.float64), atol=TOLERANCE[dtype] * largest)


def interpreted(spec: MlaSpec) -> MlaSpec:
    return MlaSpec(**{**vars(spec), "S": min(spec.S, INTERPRETED_SLOTS)})


FAST = {"kimi-verify", "kimi-tree", "tiny-verify", "tiny-tree"}


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SPECS]
)
def test_named_shapes(name, assert_close_to_scale, assert_close):
    spec = interpreted(SPECS[name])
    check(spec.operands(), spec.dtype, assert_close_to_scale, assert_close)


@pytest.mark.parametrize("tree", [False, True])
def test_lengths_at_the_ends(tree, assert_close_to_scale, assert_close):
    """Text of no slot, one slot, a tile's edge, and up to the capacity."""
    X = 6 if tree else 0
    spec = MlaSpec(B=6, T=3, N=2, S=96, C=32, R=16, X=X, dtype="float32")
    arrays = spec.operands(lengths=(0, 1, 15, 16, 17, 96 - (X or 3)))
    check(arrays, "float32", assert_close_to_scale, assert_close)


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity():
    spec = MlaSpec(B=2, T=2, N=2, S=32, C=16, R=16, dtype="float32")
    *arrays, last = spec.operands()
    last = np.array([[-1, -1], [-1, 4]], np.int32)
    for implementation in ("interpret", "xla"):
        out, lse = run(*arrays, last, implementation=implementation)
        assert np.isneginf(lse[0]).all() and np.isneginf(lse[1, 0]).all()
        assert np.isfinite(lse[1, 1]).all()
        assert not np.asarray(out[0]).any() and not np.asarray(out[1, 0]).any()
        assert np.isfinite(out).all()


def test_slots_nobody_sees_are_never_read():
    """They hold nan, which no weight of zero would hide."""
    spec = MlaSpec(B=2, T=3, N=4, S=160, C=32, R=16, dtype="float32")
    q_latent, q_rope, cache, last = spec.operands(lengths=(0, 70))
    spoilt = cache.reshape(2, 160, -1).copy()
    spoilt[0, 3:], spoilt[1, 73:] = np.nan, np.nan
    expected = run(q_latent, q_rope, cache, last)
    for a, b in zip(run(q_latent, q_rope, spoilt.reshape(cache.shape), last), expected):  # noqa: B905
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_parts_of_a_cache_merge_by_their_log_sum_exp(assert_close):
    """What a cache cut along its slots needs: each part's result, weighted, is the whole's."""
    spec = MlaSpec(B=1, T=2, N=2, S=64, C=32, R=16, dtype="float32")
    q_latent, q_rope, cache, last = spec.operands(lengths=(40,))
    whole, whole_lse = run(q_latent, q_rope, cache, last)
    parts = [
        run(q_latent, q_rope, cache[first : first + 16], np.clip(last - first, -1, 15))
        for first in range(0, 64, 16)
    ]
    out, lse = (jnp.stack(each) for each in zip(*parts, strict=True))
    # The last part holds nothing that a query sees.
    assert bool(jnp.isneginf(lse[3]).all())
    # The same sums of 43 float32 terms, in another order.
    assert_close(jax.nn.logsumexp(lse, axis=0), whole_lse, atol=1e-5)
    assert_close(merge_parts(out, lse), whole, atol=1e-5)
    nothing = merge_parts(out, jnp.full_like(lse, -jnp.inf))
    np.testing.assert_array_equal(nothing, np.zeros_like(whole))


def test_a_nan_comes_out_again():
    """A broken row of the cache is not to be taken for one nobody sees."""
    q_latent, q_rope, cache, last = SPECS["tiny-verify"].operands()
    broken = np.array(cache)
    broken[0] = np.nan
    out, lse = run(q_latent, q_rope, broken, np.maximum(last, 0))
    assert np.isnan(np.asarray(out, np.float32)[0]).all() and np.isnan(lse[0]).all()


def test_large_scores_do_not_overflow(assert_close):
    spec = MlaSpec(B=1, T=2, N=2, S=48, C=32, R=16, dtype="float32")
    q_latent, q_rope, cache, last = spec.operands(lengths=(46,))
    arrays = q_latent * np.float32(1e4), q_rope * np.float32(1e4), cache, last
    # Scores of 1e4 have a float32 step of 1e-3, so near-ties of the softmax keep three digits.
    assert_close(run(*arrays)[0], oracle(*arrays)[0], atol=5e-2)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_drawn_shapes(data):
    """Tiles that divide nothing, ragged rows, masks of more than one word, splits without slots."""
    B, T, N = (data.draw(st.integers(1, most), label=x) for x, most in zip("BTN", (3, 5, 5)))  # noqa: B905
    X = data.draw(st.sampled_from([0, T, T + 3, 33 + T]), label="X")
    S = data.draw(st.integers(max(T, X), max(T, X) + 90), label="S")
    spec = MlaSpec(B=B, T=T, N=N, S=S, C=16, R=16, X=X, dtype="float32")
    arrays = spec.operands(data.draw(st.integers(0, 1000), label="seed"))
    tiles = MlaTiles(
        rows=16,
        keys=data.draw(st.sampled_from([16, 32])),
        num_warps=4,
        num_stages=1,
        num_splits=data.draw(st.sampled_from([1, 4, 16])),
        least_chunk=data.draw(st.sampled_from([1, 16, 50])),
    )
    out, lse = pallas_triton.mla_attention_with_lse(
        *arrays, scale=SCALE, tiles=tiles, interpret=True
    )
    exact, exact_lse = oracle(*arrays)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=2e-5)


def test_packed_masks_hold_the_bits():
    mask = np.random.default_rng(0).random((2, 3, 70)) < 0.5
    mask[0, 0] = True
    words = np.asarray(pallas_triton.pack_bits(jnp.asarray(mask))).view(np.uint32)
    assert words.shape == (2, 3, 3)
    for index in np.ndindex(mask.shape):
        word = int(words[index[0], index[1], index[2] // 32])
        assert (word >> (index[2] % 32)) & 1 == mask[index]
    assert not (words[..., 2] >> 6).any()


def test_off_a_gpu_the_op_is_its_reference():
    """The same operations, so that a CPU pays nothing for the kernel's existence."""
    spec = SPECS["tiny-verify"]
    from kernels_pallas.mla_attention import reference

    def text(op):
        return str(jax.make_jaxpr(functools.partial(op, scale=SCALE))(*spec.shapes()))

    assert text(mla_attention) == text(reference.mla_attention)
    assert text(mla_attention_with_lse) == text(reference.mla_attention_with_lse)


def test_visible_slots_agree_with_the_oracle_of_this_file():
    spec = SPECS["tiny-tree"]
    *_, last, mask = spec.operands()
    seen = visible_slots(jnp.asarray(last), spec.S, jnp.asarray(mask))
    assert int(seen.sum()) == int((last + 1).sum() + mask.sum())
