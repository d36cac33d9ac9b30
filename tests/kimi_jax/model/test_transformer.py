"""The tiny model against the numpy oracle: streams, experts, logits, with a cache and without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.model import attention
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.layers import weight
from kimi_jax.model.transformer import Kimi, forward, logits

F32 = jnp.dtype("float32")
BF16 = jnp.dtype("bfloat16")
# Of the largest value: float32 against float64, three layers deep.
TOLERANCE = 1e-4
TOKENS = tuple(np.random.default_rng(11).integers(0, 64, 40).tolist())  # past the original 32


@pytest.fixture(scope="module", autouse=True)
def small_key_blocks():
    """Blocks of 8 keys, so that 40 slots are several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "KEY_BLOCK", 8)
        yield


def batch(tokens, start: int = 0):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return tokens, start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]


@jax.jit
def score(model, tokens, positions):
    """Every stream (last first), logits and experts of whole sequences."""
    streams = tuple(range(model.cfg.num_hidden_layers, -1, -1))
    out = forward(model, tokens, positions, taps=streams)
    return out, logits(model, out.hidden)


NAMES = (
    "plain",
    "int4",
    "tied, no shared expert",
    "groups, two shared experts, unlike mscales",
)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_oracle(name, variants, model_of, oracle_forward, assert_close_to_scale):
    cfg = variants[name]
    expected = oracle_forward(cfg, TOKENS)
    out, scores = score(model_of(cfg), *batch(TOKENS))
    for ours, theirs in zip(out.routing, expected.experts.values(), strict=True):
        np.testing.assert_array_equal(ours.expert_ids, theirs)
    # Taps come in the order asked for: here the last stream first.
    taps = np.stack([np.asarray(tap[0]) for tap in reversed(out.taps)])
    assert_close_to_scale(taps, expected.hidden, TOLERANCE)
    np.testing.assert_array_equal(out.hidden, out.taps[0])
    assert scores.dtype == jnp.float32 and out.cache is None
    assert_close_to_scale(scores[0], expected.logits, TOLERANCE)


def test_prefill_then_decode_equals_the_oracle(
    variants, model_of, oracle_forward, assert_close_to_scale
):
    """Also the experts' path for one token, and for few: a verification of three tokens."""
    cfg = variants["int4"]
    model, expected = model_of(cfg), oracle_forward(cfg, TOKENS)

    @jax.jit(static_argnames="is_prefill")
    def step(model, tokens, positions, cache, is_prefill=False):
        out = forward(model, tokens, positions, cache, is_prefill=is_prefill)
        return logits(model, out.hidden), out.cache

    cache = LatentCache.empty(cfg, 1, 40, F32)
    prefill, cache = step(model, *batch(TOKENS[:30]), cache, is_prefill=True)
    outs = [prefill]
    for first, last in [(30, 31), (31, 34), (34, 35), (35, 38), (38, 39), (39, 40)]:
        out, cache = step(model, *batch(TOKENS[first:last], first), cache)
        outs.append(out)
    assert_close_to_scale(jnp.concatenate(outs, axis=1)[0], expected.logits, TOLERANCE)


def test_padding_and_neighbours_do_not_reach_real_tokens(tiny, model_of, assert_close_to_scale):
    """Prompts of 1, 3 and 17 tokens together and alone; the rest of each row is padding."""
    cfg = dataclasses.replace(tiny, num_hidden_layers=1, first_k_dense_replace=0)
    model, lengths = model_of(cfg), np.array([1, 3, 17])
    positions = jnp.tile(jnp.arange(20, dtype=jnp.int32), (3, 1))
    is_real = positions < lengths[:, None]

    @jax.jit
    def run(tokens, is_real):
        cache = LatentCache.empty(cfg, 3, 24, F32)
        out = forward(model, tokens, positions, cache, is_real=is_real, is_prefill=True)
        return logits(model, out.hidden)

    tokens = np.random.default_rng(0).integers(0, 64, (3, 20)).astype(np.int32)
    out = run(tokens, is_real)
    others = np.where(is_real, tokens, (tokens + 1) % 64).astype(np.int32)
    repadded = run(others, is_real)
    for b in range(3):
        alone = np.zeros_like(tokens)
        alone[b] = tokens[b]
        only_b = is_real & (np.arange(3) == b)[:, None]
        solo = run(alone, only_b)
        for other in (repadded, solo):
            # Experts' tokens are grouped otherwise; the products are the same.
            assert_close_to_scale(other[b, : lengths[b]], out[b, : lengths[b]], 1e-5)


@pytest.mark.parametrize("tap", [-1, 4, 100])
def test_a_tap_that_names_no_stream_is_refused(tiny, model_of, tap):
    model = model_of(tiny)
    with pytest.raises(ValueError, match=f"tap {tap} names no stream .*0..2 enter a layer, 3 "):
        forward(model, *batch(TOKENS), taps=(0, tap))


def test_taps_come_as_asked_for(tiny, model_of):
    def taps_of(*ids):
        def run(model):
            out = forward(model, *batch(TOKENS), taps=ids)
            # Streams are told apart by identity, so nothing has to run.
            return [next(i for i, tap in enumerate(out.taps) if tap is one) for one in out.taps]

        found = []
        jax.eval_shape(lambda model: (found.append(run(model)), jnp.zeros(()))[1], model_of(tiny))
        return found[0]

    assert taps_of() == []
    assert taps_of(2, 0, 3, 2) == [0, 1, 2, 0]


def test_dtypes(tiny, variants, shape_rngs):
    """bfloat16 weights and cache; logits, routing and the router's bias stay float32."""
    for cfg in (tiny, variants["int4"]):
        model = nnx.eval_shape(lambda cfg=cfg: Kimi(cfg, dtype=BF16, rngs=shape_rngs()))
        assert model.layers[1].mlp.e_score_correction_bias.dtype == F32
        for form in (True, False):

            def run(model, form=form, cfg=cfg):
                cache = LatentCache.empty(cfg, 1, 40, BF16)
                out = forward(model, *batch(TOKENS), cache, taps=(0, 2), is_prefill=form)
                return out, logits(model, out.hidden)

            out, scores = jax.eval_shape(run, model)
            assert scores.dtype == F32 and scores.shape == (1, 40, 64)
            assert out.hidden.dtype == BF16 and {t.dtype for t in out.taps} == {BF16}
            assert {layer.dtype for layer in out.cache.layers} == {BF16}
            assert {r.combine_f32.dtype for r in out.routing} == {F32}


def test_gradients(tiny, model_of):
    """Finite for every weight, and together what a small step changes; with `remat`."""
    cfg = dataclasses.replace(tiny, num_hidden_layers=2)
    graph, state = nnx.split(model_of(cfg))
    tokens, positions = batch(TOKENS)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(state):
        model = nnx.merge(graph, state)
        out = forward(model, tokens, positions, remat=True)
        log_probs = jax.nn.log_softmax(logits(model, out.hidden)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))

    _, gradients = loss_and_gradients(state)
    by_path = dict(nnx.to_flat_state(gradients))
    assert by_path.keys() == dict(nnx.to_flat_state(state)).keys()
    for path, gradient in by_path.items():
        value = np.asarray(gradient[...])
        assert np.isfinite(value).all(), path
        # The router's bias chooses, and choices have no gradient.
        assert value.any() != (path[-1] == "e_score_correction_bias"), path

    # Along the gradient the loss has its steepest slope: the gradient's own length.
    length = float(np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradients))))

    def loss_at(step: float) -> float:
        moved = jax.tree.map(lambda w, g: w + step / length * g, state, gradients)
        return float(loss_and_gradients(moved)[0])

    # Losses of about 5 in float32 over a step of 0.02, and the cubic term.
    np.testing.assert_allclose((loss_at(1e-2) - loss_at(-1e-2)) / 2e-2, length, rtol=5e-3)


def test_new_weights_are_random_with_the_deviation_asked_for():
    rngs = nnx.Rngs(0)
    first, second = (weight(rngs, "D F", (64, 48), BF16, 25) for _ in range(2))
    assert first.dtype == BF16 and first.get_metadata("axes") == "D F"
    # 3072 values tell their deviation to 1.3 %.
    np.testing.assert_allclose(np.std(np.asarray(first[...], np.float32)), 0.2, rtol=0.06)
    assert (np.asarray(first[...]) != np.asarray(second[...])).mean() > 0.9
