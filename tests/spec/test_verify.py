"""Acceptance on hand-made logits: exact choices, and exact distributions by count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.axes import WHOLE, replace
from kimi_jax.model.cache import LatentCache
from kimi_jax.runtime.decode import MAX_DRAFT_TOKENS, DecodeState, Finish, TokenLog
from kimi_jax.runtime.sampling import (
    SamplingParams,
    filter_logits,
    make_sampling_state,
    repeat_rows,
    sample_tokens,
)
from spec.draft import DRAFT_USE
from spec.verify import accept_equal, accept_sampled

V, K = 4, 2
ROWS = 40_000


def state_of(params: list[SamplingParams]) -> DecodeState:
    B = len(params)
    one = jnp.ones((B,), jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((B, 16), jnp.int32),
        lengths=3 * one,
        prompt_lengths=3 * one,
        limits=16 * one,
        stop_ids=-jnp.ones((B, 1), jnp.int32),
        reasons=jnp.full((B,), int(Finish.RUNNING), jnp.int32),
        cache=LatentCache(layers=()),
        sampling=make_sampling_state(params, V),
        log=TokenLog.empty(B),
        block_start=3 * one,
        cycles=0 * one,
        drafted=0 * one,
        accepted=jnp.zeros((B, MAX_DRAFT_TOKENS), jnp.int32),
    )


def one_hot_logits(tokens) -> jax.Array:
    return 10.0 * jax.nn.one_hot(jnp.asarray(tokens), V)


@pytest.mark.parametrize(
    "drafts, num",
    [([1, 2], 3), ([1, 0], 2), ([0, 2], 1), ([0, 0], 1)],
)
def test_greedy_keeps_the_prefix_that_matches(drafts, num):
    """All, match then miss, miss then match, none."""
    state = state_of([SamplingParams()])
    chosen, counts = accept_equal(
        one_hot_logits([[1, 2, 3]]), jnp.asarray([drafts], jnp.int32), state, WHOLE
    )
    assert counts.tolist() == [num]
    assert chosen.token[0, :num].tolist() == [1, 2, 3][:num]


def test_sampled_acceptance_is_greedy_at_temperature_zero():
    state = state_of([SamplingParams()])
    for drafts, num in (([1, 2], 3), ([1, 0], 2), ([0, 2], 1)):
        q = jnp.where(one_hot_logits([drafts]) > 0, 0.0, -jnp.inf)
        chosen, counts = jax.jit(accept_sampled, static_argnames="rules")(
            one_hot_logits([[1, 2, 3]]), jnp.asarray([drafts], jnp.int32), q, state, rules=WHOLE
        )
        assert counts.tolist() == [num]
        assert chosen.token[0, :num].tolist() == [1, 2, 3][:num]


TARGET = np.array([[1.0, 0.2, -0.5, 0.1], [0.0, 1.5, 0.3, -1.0], [0.4, -0.2, 0.9, 0.0]], np.float32)
DRAFTER = np.array([[0.2, 1.1, 0.0, -2.0], [1.0, 0.1, 0.4, 0.3]], np.float32)


@functools.partial(jax.jit, static_argnames="is_sampled")
def emitted(state: DecodeState, *, is_sampled: bool) -> tuple[jax.Array, jax.Array]:
    """Tokens and counts of one cycle of every row, one program for all options."""
    logits = jnp.broadcast_to(jnp.asarray(TARGET), (ROWS, K + 1, V))
    if not is_sampled:
        best = jnp.broadcast_to(jnp.asarray(DRAFTER).argmax(-1).astype(jnp.int32), (ROWS, K))
        chosen, counts = accept_equal(logits, best, state, WHOLE)
        return chosen.token, counts

    def draft(k: int) -> tuple[jax.Array, jax.Array]:
        q = filter_logits(jnp.broadcast_to(jnp.asarray(DRAFTER[k]), (ROWS, V)), state.sampling)
        positions = state.lengths + k
        return sample_tokens(q, sampling=state.sampling, positions=positions, use=DRAFT_USE), q

    drafts, q = (jnp.stack(part, axis=1) for part in zip(*map(draft, range(K)), strict=True))
    chosen, counts = accept_sampled(logits, drafts, q, state, WHOLE)
    return chosen.token, counts


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}]
)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_distribution_is_that_of_plain_sampling(options, is_sampled):
    """Pairs (first, second) of emitted tokens against the product of the target's own rows.

    The target's rows do not depend on the tokens before them, so the second token's distribution
    is row 1's whatever the first was; a pair is known where the first was an accepted draft, and
    else its second token is left to the next cycle. Both marginals are tested by chi-square.
    """
    params = [SamplingParams(seed=i, **{"temperature": 1.0} | options) for i in range(8)]
    state = state_of(params)
    # 8 requests repeated, each copy with a seed of its own.
    state = jax.tree.map(lambda x: jnp.repeat(x, ROWS // 8, axis=0), state)
    seeds = np.random.default_rng(0).integers(0, 2**32, (ROWS, 2), np.uint32)
    state = replace(state, sampling=replace(state.sampling, seed=jnp.asarray(seeds)))
    token, counts = map(np.asarray, emitted(state, is_sampled=is_sampled))
    rows = repeat_rows(make_sampling_state(params[:1], V), K + 1)
    expected = np.asarray(jax.nn.softmax(filter_logits(jnp.asarray(TARGET), rows), axis=-1))
    for place in range(K + 1):
        there = counts > place
        if there.sum() < 500:
            continue
        seen = np.bincount(token[there, place], minlength=V)
        want = expected[place] * there.sum()
        assert not seen[want == 0].any()
        kept = want > 0
        chi_square = np.sum((seen[kept] - want[kept]) ** 2 / want[kept])
        # The 99.99 % points for 3, 2, 1 and 0 degrees of freedom.
        assert chi_square < {4: 21.1, 3: 18.4, 2: 15.1, 1: 1e-9}[int(kept.sum())], place
    if is_sampled:
        # Leviathan et al.: a draft stands with probability sum(min(p, q)).
        q = np.asarray(
            jax.nn.softmax(
                filter_logits(jnp.asarray(DRAFTER[:1]), make_sampling_state(params[:1], V)), -1
            )
        )[0]
        rate = np.minimum(expected[0], q).sum()
        spread = 5 * np.sqrt(rate * (1 - rate) / ROWS)
        assert abs((counts > 1).mean() - rate) <= spread + 1e-9
