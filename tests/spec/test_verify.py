"""Acceptance on hand-made logits: exact choices, and exact distributions by count."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.axes import WHOLE, replace
from kimi_jax.model.cache import LatentCache
from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH, DecodeState, Finish, TokenLog
from kimi_jax.runtime.sampling import (
    SamplingParams,
    add_noise,
    filter_logits,
    make_sampling_state,
    top_tokens,
)
from spec import StaticTree, verify
from spec.draft import DRAFT_USE
from spec.tree import Chain, Drafts, tree_mask
from spec.verify import accept_equal, accept_lossy, accept_sampled

V, K = 4, 2
ROWS = 16_000


def state_of(params: list[SamplingParams], vocab_size: int = V) -> DecodeState:
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
        sampling=make_sampling_state(params, vocab_size),
        log=TokenLog.empty(B),
        block_start=3 * one,
        cycles=0 * one,
        drafted=0 * one,
        accepted=jnp.zeros((B, MAX_DRAFT_DEPTH), jnp.int32),
    )


def one_hot_logits(tokens) -> jax.Array:
    return 10.0 * jax.nn.one_hot(jnp.asarray(tokens), V)


CHAIN = Chain(K)
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
SHAPES = (CHAIN, TREE)


@functools.partial(jax.jit, static_argnames=("rule", "shape"))
def accept(rule, logits, drafts, shape, state):
    """By a rule's name; "coin" is the lossy one where nothing is likely enough to stand by it."""
    if rule == "coin":
        return accept_lossy(logits, drafts, shape, state, WHOLE, threshold=1.1)
    exact = {"equal": accept_equal, "sampled": accept_sampled}[rule]
    return exact(logits, drafts, shape, state, WHOLE)


def drafts_of(shape, tokens, logits=None) -> Drafts:
    tokens = jnp.asarray(tokens, jnp.int32)
    parents = jnp.broadcast_to(jnp.asarray(shape.parents), tokens.shape)
    mask = None if shape.is_chain else tree_mask(parents, shape.depth)
    return Drafts(tokens, parents, mask, logits)


@pytest.mark.parametrize(
    "shape, drafts, path",
    [
        (CHAIN, [1, 2], [0, 1, 2]),
        (CHAIN, [1, 0], [0, 1]),
        (CHAIN, [0, 2], [0]),
        (CHAIN, [0, 0], [0]),
        # Nodes by depth: two, then two under the first and one under the second.
        (TREE, [1, 0, 2, 0, 2], [0, 1, 3]),
        (TREE, [1, 0, 0, 2, 2], [0, 1, 4]),
        (TREE, [0, 1, 2, 2, 2], [0, 2, 5]),
        (TREE, [0, 1, 2, 2, 0], [0, 2]),
        (TREE, [0, 3, 2, 1, 2], [0]),
    ],
)
@pytest.mark.parametrize("rule", ["equal", pytest.param("sampled", marks=pytest.mark.slow), "coin"])
def test_greedy_keeps_the_path_that_matches(shape, drafts, path, rule):
    """After any token of depth 0 the target says 1, then 2, then 3."""
    depths = [0, *(len(p) for p in shape.paths)]
    logits = one_hot_logits([[1 + depth for depth in depths]])
    state = state_of([SamplingParams()])
    num_proposers = len(set(shape.parents.tolist()))
    q = jnp.zeros((1, num_proposers, V)) if rule == "sampled" else None
    found = accept(rule, logits, drafts_of(shape, [drafts], q), shape, state)
    assert found.counts.tolist() == [len(path)]
    assert found.path[0, : len(path)].tolist() == path
    assert found.chosen.token[0, : len(path)].tolist() == [1, 2, 3][: len(path)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rejection_is_exact_by_enumeration(shape, monkeypatch):
    """All drafts that can be drawn, all coins: the emitted tokens' distribution to rounding.

    Every threshold p / q that can occur is a multiple of 1/GRID here, so that a grid of coins, one
    in the middle of each cell, weighs them exactly.
    """
    GRID = 12
    # The first sibling's thresholds are 1/2, 7/6 and 5/2, the second's 1/3 or over 1.
    q = np.array([1 / 2, 3 / 8, 1 / 8])
    rows = [[1 / 4, 7 / 16, 5 / 16], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]
    T = shape.num_draft_tokens + 1
    target = np.array([rows[row % 3] for row in range(T)])
    num_first = sum(len(path) == 1 for path in shape.paths)
    coins = (np.arange(GRID) + 0.5) / GRID
    proposers = sorted({int(parent) for parent in shape.parents})
    # Only the root's children are enumerated; below, one draw and one coin stand for all.
    cases, weights = [], []
    for children in itertools.permutations(range(3), num_first):
        weight, left = 1.0, 1.0
        for token in children:
            weight *= q[token] / left
            left -= q[token]
        for flips in itertools.product(coins, repeat=num_first):
            cases.append((children, flips))
            weights.append(weight / GRID**num_first)
    B = len(cases)
    tokens = np.zeros((B, T - 1), np.int32)
    flips = np.full((B, T), 0.999)
    for b, (children, own) in enumerate(cases):
        tokens[b, :num_first], flips[b, 1 : num_first + 1] = children, own
    drawn = {}

    def coin(state, depth, node):
        return jnp.take_along_axis(jnp.asarray(flips, jnp.float32), node[:, None], axis=1)[:, 0]

    def draw(logits, *, sampling, positions):
        drawn["left"] = np.exp(np.asarray(logits, np.float64))
        return jnp.zeros((B,), jnp.int32)

    monkeypatch.setattr(verify, "_coin", coin)
    monkeypatch.setattr(verify, "sample_tokens", draw)
    one = state_of([SamplingParams(temperature=1.0, seed=0)], vocab_size=3)
    state = jax.tree.map(lambda x: jnp.repeat(x, B, axis=0), one)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(target, jnp.float32)), (B, T, 3))
    draft_logits = jnp.broadcast_to(jnp.log(jnp.asarray(q, jnp.float32)), (B, len(proposers), 3))
    found = accept_sampled(logits, drafts_of(shape, tokens, draft_logits), shape, state, WHOLE)
    counts, path = np.asarray(found.counts), np.asarray(found.path)
    emitted = np.zeros(3)
    for b, weight in enumerate(weights):
        if counts[b] > 1:
            emitted[tokens[b, path[b, 1] - 1]] += weight
        else:
            emitted += weight * drawn["left"][b] / drawn["left"][b].sum()
    np.testing.assert_allclose(emitted, target[0], atol=1e-6)


@functools.partial(jax.jit, static_argnames=("shape", "rule"))
def emitted(state: DecodeState, *, shape: StaticTree, rule: str):
    """One cycle of every row, one program for all options."""
    is_sampled = rule == "sampled"
    T = shape.num_draft_tokens + 1
    logits = jnp.broadcast_to(jnp.asarray(TARGET[:T]), (ROWS, T, V))
    inner = sorted({int(parent) for parent in shape.parents})
    tokens, kept = jnp.zeros((ROWS, T - 1), jnp.int32), []
    for row in inner:
        q = jnp.broadcast_to(jnp.asarray(DRAFTER[row]), (ROWS, V))
        if is_sampled:
            q = filter_logits(q, state.sampling)
            kept.append(q)
            q = add_noise(
                q, sampling=state.sampling, positions=state.lengths, use=DRAFT_USE + 2 * row
            )
        children = np.flatnonzero(shape.parents == row)
        best, _, _ = top_tokens(q, len(children))
        tokens = tokens.at[:, children].set(best)
    logits_q = jnp.stack(kept, axis=1) if is_sampled else None
    found = accept(rule, logits, drafts_of(shape, tokens, logits_q), shape, state)
    return found.chosen.token, found.counts, found.path


RNG = np.random.default_rng(1)
TARGET, DRAFTER = RNG.standard_normal((2, 6, V)).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param({"top_k": 2}, marks=pytest.mark.slow),
        {"top_p": 0.6},
        pytest.param({"min_p": 0.5}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rule", ["equal", "sampled", "coin"])
@pytest.mark.parametrize("shape", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE], ids=str)
def test_the_distribution_is_that_of_plain_sampling(options, rule, shape):
    """The token after every row of the path, by chi-square against the target's own distribution.

    A row's distribution does not hang on the tokens before it, so what follows an accepted node is
    distributed as that node's row, whichever branch led there.
    """
    params = [SamplingParams(seed=0, **{"temperature": 1.0} | options)]
    state = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), state_of(params))
    seeds = np.random.default_rng(0).integers(0, 2**32, (ROWS, 2), np.uint32)
    state = replace(state, sampling=replace(state.sampling, seed=jnp.asarray(seeds)))
    token, counts, path = map(np.asarray, emitted(state, shape=shape, rule=rule))
    T = shape.num_draft_tokens + 1
    rows = make_sampling_state(params * T, V)
    expected = np.asarray(jax.nn.softmax(filter_logits(jnp.asarray(TARGET[:T]), rows), axis=-1))
    place = np.arange(path.shape[1])
    for row in range(T):
        there = (path == row) & (place < counts[:, None])
        if there.sum() < 500:
            continue
        seen = np.bincount(token[there], minlength=V)
        want = expected[row] * there.sum()
        assert not seen[want == 0].any()
        kept = want > 0
        chi_square = np.sum((seen[kept] - want[kept]) ** 2 / want[kept])
        # The 99.99 % points for 3, 2, 1 and 0 degrees of freedom.
        assert chi_square < {4: 21.1, 3: 18.4, 2: 15.1, 1: 1e-9}[int(kept.sum())], row
    if rule == "sampled" and shape == CHAIN:
        # Leviathan et al.: a draft stands with probability sum(min(p, q)).
        q = np.asarray(jax.nn.softmax(filter_logits(jnp.asarray(DRAFTER[:1]), rows_of(params)), -1))
        rate = np.minimum(expected[0], q[0]).sum()
        spread = 5 * np.sqrt(rate * (1 - rate) / ROWS)
        assert abs((counts > 1).mean() - rate) <= spread + 1e-9


def test_lossy_takes_what_is_likely_enough():
    """At a threshold under the draft's probability it always stands, over it as exact rules say."""
    draft = int(np.argsort(TARGET[0])[-2])
    params = [SamplingParams(seed=0, temperature=1.0)]
    state = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), state_of(params))
    seeds = np.random.default_rng(0).integers(0, 2**32, (ROWS, 2), np.uint32)
    state = replace(state, sampling=replace(state.sampling, seed=jnp.asarray(seeds)))
    logits = jnp.broadcast_to(jnp.asarray(TARGET[:2]), (ROWS, 2, V))
    p = float(jax.nn.softmax(TARGET[0])[draft])
    for threshold, rate in ((0.9 * p, 1.0), (1.1 * p, p)):
        found = jax.jit(accept_lossy, static_argnames=("shape", "rules", "threshold"))(
            logits,
            drafts_of(Chain(1), np.full((ROWS, 1), draft)),
            shape=Chain(1),
            state=state,
            rules=WHOLE,
            threshold=threshold,
        )
        spread = 5 * np.sqrt(rate * (1 - rate) / ROWS)
        assert abs(float((found.counts > 1).mean()) - rate) <= spread + 1e-9


def rows_of(params):
    return make_sampling_state(params, V)
