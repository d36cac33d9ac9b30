"""Latent attention: its forms against each other and a float64 loop, and what the cache keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kimi_jax.axes import WHOLE
from kimi_jax.config import ModelConfig, RopeConfig
from kimi_jax.model import attention, mla, rope
from kimi_jax.model.cache import LatentCache, write_rows
from kimi_jax.model.mla import Attention, attention_layer

F32 = jnp.dtype("float32")
# Float32 sums of at most 64 terms in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def small_key_blocks():
    """Blocks of 8 keys, so that a few dozen slots are several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "KEY_BLOCK", 8)
        yield


@pytest.fixture(scope="module")
def attn(tiny, fill_module, shape_rngs) -> Attention:
    return fill_module(lambda: Attention(tiny, dtype=F32, rngs=shape_rngs()), seed=1)


def inputs(B: int, T: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, 64)).astype(np.float32)


def garbage(B: int, S: int, width: int = 24) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(B, S, width)).astype(np.float32)


def positions_from(start, T: int) -> jax.Array:
    return jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(T, dtype=jnp.int32)


def _layer(attn, cfg, x, cache, start, form):
    """With the cache as [B, S, CR] outside, and one axis of slots inside."""
    if cache is None:
        return _flat_layer(attn, cfg, x, cache, start, form)
    out, flat = _flat_layer(attn, cfg, x, cache.reshape(-1, cache.shape[-1]), start, form)
    return out, flat.reshape(cache.shape)


def _flat_layer(attn, cfg, x, cache, start, form):
    positions = positions_from(start, x.shape[1])
    angles = rope.cos_sin(positions, cfg.rope, cfg.qk_rope_head_dim)
    inputs = mla.compress(attn, x)
    if form != "naive":
        is_prefill = form == "blocked"
        return attention_layer(
            attn, cfg, inputs, cache, positions, angles, WHOLE, is_prefill=is_prefill
        )
    # Over the cache, which the layer itself never does: a mask in place of blocks.
    queries = mla.project(attn, cfg, inputs, *angles)
    cache = write_rows(cache, queries.rows, positions[:, 0])
    rows = cache.reshape(len(x), -1, cache.shape[-1])
    visible = jnp.arange(rows.shape[1], dtype=jnp.int32) <= positions[:, :, None]
    out = mla.attend_naive(attn, cfg, queries, rows, visible)
    return jnp.einsum("btnh,nhd->btd", out, attn.o_proj[...]), cache


_jit_layer = jax.jit(_layer, static_argnums=(1, 5))


@pytest.fixture(scope="module")
def run(tiny, attn):
    """One layer over x from the rows' start positions: output and cache."""

    def run(x, cache=None, start=None, form="absorbed", cfg=tiny):
        start = np.zeros(len(x), np.int32) if start is None else np.asarray(start, np.int32)
        return _jit_layer(attn, cfg, x, cache, start, form)

    return run


def by_loop(attn: Attention, cfg: ModelConfig, x: np.ndarray, queries) -> np.ndarray:
    """One row's outputs at these positions, in float64, from full keys and values."""
    w = {
        name: np.asarray(getattr(attn, name)[...], np.float64)
        for name in "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm "
        "kv_b_proj_k kv_b_proj_v o_proj".split()
    }
    U, R, C = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.kv_lora_rank
    fields = dataclasses.asdict(cfg.rope)
    inv_freq = oracles.yarn_inv_freq(R, fields.pop("theta"), **fields)
    m = oracles.yarn_mscale(cfg.rope.factor, cfg.rope.mscale_all_dim)
    turn = inv_freq, oracles.yarn_mscale(cfg.rope.factor, cfg.rope.mscale) / m
    scale = (U + R) ** -0.5 * m * m
    x, at = x.astype(np.float64), np.arange(len(x))
    q_latent = oracles.rms_norm(x @ w["q_a_proj"], w["q_a_layernorm"], cfg.latent_norm_eps)
    q = np.einsum("tq,qnc->tnc", q_latent, w["q_b_proj"])
    q = np.concatenate([q[..., :U], oracles.rotate(q[..., U:], at, *turn)], axis=-1)
    kv = x @ w["kv_a_proj_with_mqa"]
    latent = oracles.rms_norm(kv[:, :C], w["kv_a_layernorm"], cfg.latent_norm_eps)
    shared_key = oracles.rotate(kv[:, C:], at, *turn)
    out = []
    for t in queries:
        y = np.zeros(64)
        for n in range(cfg.num_attention_heads):
            key = np.concatenate([latent @ w["kv_b_proj_k"][n].T, shared_key], axis=1)
            weights = oracles.softmax(key[: t + 1] @ q[t, n] * scale)
            y += weights @ (latent[: t + 1] @ w["kv_b_proj_v"][n]) @ w["o_proj"][n]
        out.append(y)
    return np.array(out)


FORMS = ("absorbed", "naive", "blocked")
# Most tests share one shape, and so one compiled program a form: three rows, four new tokens, 24
# slots, that is three blocks.
B, T, S = 3, 4, 24


@pytest.fixture(scope="module")
def one_pass(run):
    """Rows of S tokens, their outputs without a cache, and what a prefill of all leaves in one."""
    x = inputs(B, S)
    out, no_cache = run(x)
    assert no_cache is None
    prefilled, cache = run(x, garbage(B, S), form="blocked")
    return x, np.asarray(out), np.asarray(prefilled), np.asarray(cache)


def test_whole_sequences_equal_the_loop(tiny, attn, one_pass, assert_close):
    x, out, prefilled, _ = one_pass
    expected = np.stack([by_loop(attn, tiny, row, range(S)) for row in x])
    assert_close(out, expected, atol=TOLERANCE)
    assert_close(prefilled, expected, atol=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_start_at_their_own_positions(run, one_pass, form, assert_close):
    """Each row continues its own context, as the whole row in one pass would."""
    context, whole, _, filled = one_pass
    start = (3, 17, 0)
    x, expected = (
        np.stack([row[at : at + T] for row, at in zip(rows, start, strict=True)])
        for rows in (context, whole)
    )
    is_old = np.arange(S)[:, None] < np.array(start)[:, None, None]
    kept = np.where(is_old, filled, garbage(B, S))
    out, cache = run(x, kept, start, form)
    assert_close(out, expected, atol=TOLERANCE)
    # Only the new tokens' slots were written, with what one pass writes there.
    for b, at in enumerate(start):
        assert_close(cache[b, : at + T], filled[b, : at + T], atol=TOLERANCE)
        np.testing.assert_array_equal(cache[b, :at], kept[b, :at])
        np.testing.assert_array_equal(cache[b, at + T :], kept[b, at + T :])


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_see_each_other(run, form, assert_close):
    start, x, cache = [0, 6, 18], inputs(B, T), garbage(B, S)
    out, new_cache = run(x, cache, start, form)
    for b in range(B):
        mixed = inputs(B, T, seed=1), garbage(B, S) + 1, np.array([11, 0, 2])
        for target, source in zip(mixed, (x, cache, start), strict=True):
            target[b] = source[b]
        beside, beside_cache = run(*mixed, form)
        np.testing.assert_array_equal(beside[b], out[b])
        np.testing.assert_array_equal(beside_cache[b], new_cache[b])
        # Alone, another batch size may sum in another order.
        alone, alone_cache = run(x[b : b + 1], cache[b : b + 1], start[b : b + 1], form)
        assert_close(alone[0], out[b], atol=TOLERANCE)
        assert_close(alone_cache[0], new_cache[b], atol=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_slots_past_a_position_may_hold_anything_finite(run, form):
    start, x, cache = [2, 9, 20], inputs(B, T), garbage(B, S)
    spoilt = cache.copy()
    # The blocks of row 2 are run over the other rows too, far past what they may see.
    spoilt[0, 6:], spoilt[1, 13:] = 1e30, -1e30
    out, _ = run(x, cache, start, form)
    np.testing.assert_array_equal(run(x, spoilt, start, form)[0], out)


@pytest.mark.parametrize("form", FORMS)
def test_append_then_drop_is_never_appended(run, form):
    """One of four drafted tokens is kept; the slots of the others are written over, or unseen."""
    start, x, cache = np.array([4, 13, 0]), inputs(B, T), garbage(B, S)
    _, appended = run(inputs(B, T, seed=3), cache, start, form)
    never = cache.copy()
    for b, at in enumerate(start):
        never[b, at] = appended[b, at]
    out, after = run(x, appended, start + 1, form)
    expected, after_never = run(x, never, start + 1, form)
    np.testing.assert_array_equal(out, expected)
    for b, at in enumerate(start):
        np.testing.assert_array_equal(after[b, : at + 1 + T], after_never[b, : at + 1 + T])


@pytest.mark.parametrize("k", [8, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 33))])
def test_prefill_then_decode_is_one_pass(run, k, assert_close):
    """Whatever the cut, and across the original length of 32 positions (MLA-3)."""
    x = inputs(1, 40)
    expected, _ = run(x)
    first, cache = run(x[:, :k], garbage(1, 40), form="blocked")
    outs = [np.asarray(first)]
    for t in range(k, 40):
        out, cache = run(x[:, t : t + 1], cache, [t])
        outs.append(np.asarray(out))
    assert_close(np.concatenate(outs, axis=1), expected, atol=TOLERANCE)


def test_mla_3_the_limit_changes_nothing(tiny, run):
    """Original length 32, factor 4: limits of 128 and of 64 give the same numbers."""
    x = inputs(1, 40)
    lower = dataclasses.replace(tiny, max_position_embeddings=64)
    assert tiny.max_position_embeddings == 128
    assert lower.softmax_scale == tiny.softmax_scale
    np.testing.assert_array_equal(run(x, cfg=lower)[0], run(x)[0])


@pytest.mark.parametrize("form", ["absorbed", "blocked"])
def test_mla_1_softmax_correction_at_every_position(tiny, attn, run, form, assert_close):
    """Position 0 is exact without the correction; later ones are not."""
    cfg = dataclasses.replace(
        tiny,
        rope=RopeConfig(
            theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
        ),
    )
    x, at = inputs(1, 104), [0, 1, 100]
    out, _ = run(x, garbage(1, 104), form=form, cfg=cfg)
    expected = by_loop(attn, cfg, x[0], at)
    assert_close(np.asarray(out)[0, at], expected, atol=TOLERANCE)
    uncorrected = dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, mscale_all_dim=0.0))
    wrong = by_loop(attn, uncorrected, x[0], at)
    difference = np.abs(wrong - expected).max(axis=1)
    assert difference[0] < 1e-12 and (difference[1:] > 1e-3).all()


def test_a_cache_of_part_of_a_block(run, one_pass, assert_close):
    context, whole, _, _ = one_pass
    # Fewer slots than a block are one block.
    out, _ = run(context[:, :T], garbage(B, T), form="blocked")
    assert_close(out, whole[:, :T], atol=TOLERANCE)
    with pytest.raises(ValueError, match="12 slots is not a multiple of the key block 8"):
        run(context[:, :T], garbage(B, 12), form="blocked")


@pytest.mark.parametrize("rows", [1, 3])
def test_write_rows(rows):
    cache, new = garbage(rows, 10), inputs(rows, T)[..., :24]
    start = np.array([6, 0, 3], np.int32)[:rows]
    expected = cache.copy()
    for b in range(rows):
        expected[b, start[b] : start[b] + T] = new[b]
    flat, expected = cache.reshape(-1, 24), expected.reshape(-1, 24)
    np.testing.assert_array_equal(jax.jit(write_rows)(flat, new, start), expected)
    bf16 = jax.jit(write_rows)(jnp.asarray(flat).astype(jnp.bfloat16), new, start)
    assert bf16.dtype == jnp.bfloat16
    np.testing.assert_array_equal(bf16, jnp.asarray(expected).astype(jnp.bfloat16))


def test_empty_cache(tiny, k25):
    cache = LatentCache.empty(tiny, 2, 24, F32)
    assert len(cache.layers) == 3
    assert all(layer.shape == (2 * 24, 24) and not layer.any() for layer in cache.layers)
    shapes = jax.eval_shape(lambda: LatentCache.empty(k25, 1, 262144, jnp.dtype("bfloat16")))
    # 70,272 bytes a token over 61 layers.
    assert sum(layer.size * 2 for layer in shapes.layers) == 70272 * 262144
