"""Sampling against a sort-based float64 oracle, then what makes it safe to serve.

Filters compare exactly (which tokens stay), log-probabilities to 1e-5: float32 against float64.
"""

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from kimi_jax.axes import replace
from kimi_jax.runtime.sampling import (
    Choice,
    SamplingParams,
    SamplingState,
    argmax_tokens,
    choose_tokens,
    edit_logits,
    filter_logits,
    make_sampling_state,
    position_keys,
    repeat_rows,
    sample_tokens,
)

# Tests share one batch shape, because compiling takes longer than all they run.
B, V, S = 8, 304, 12

jit_edit = jax.jit(edit_logits)
jit_filter = jax.jit(filter_logits)
jit_sample = jax.jit(sample_tokens)
traced: list[tuple[int, ...]] = []


@jax.jit
def jit_choose(logits: jax.Array, **context: Any) -> Choice:
    traced.append(logits.shape)
    return choose_tokens(logits, **context)


def padded(rows: Any) -> jax.Array:
    """Rows of a small vocabulary in a larger batch and vocabulary, -inf beyond."""
    rows = np.asarray(rows, np.float32)
    out = np.full((B, V), -np.inf, np.float32)
    out[: rows.shape[0], : rows.shape[1]] = rows
    return jnp.asarray(out)


def choose(logits: jax.Array, params: list[SamplingParams], position: int = 1) -> Choice:
    """The choice after one token 0 of prompt; rows without params are greedy."""
    num_rows, vocab_size = logits.shape
    params = params + [SamplingParams()] * (num_rows - len(params))
    return jit_choose(
        logits,
        tokens=jnp.zeros((num_rows, S), jnp.int32),
        lengths=jnp.full((num_rows,), position, jnp.int32),
        prompt_lengths=jnp.ones((num_rows,), jnp.int32),
        sampling=make_sampling_state(params, vocab_size),
    )


# The oracle: one row, numpy float64, sorts.


def oracle_edit(
    logits: np.ndarray, prompt: list[int], output: list[int], p: SamplingParams
) -> np.ndarray:
    x = logits.astype(np.float64)
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in set(prompt) | set(output):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(output):
        x[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    return x


def oracle_filter(x: np.ndarray, p: SamplingParams) -> tuple[np.ndarray, float]:
    """Which tokens stay, and how far the closest threshold in probability was."""
    margin = math.inf
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature == 0:
        order = order[:1]
    else:
        weight = np.exp((x - x.max()) / p.temperature)
        if p.min_p > 0:
            margin = min(margin, np.abs(weight - p.min_p).min())
            order = [i for i in order if weight[i] >= p.min_p]
        if p.top_k not in (None, 0, -1):
            order = order[: p.top_k]
        if p.top_p < 1:
            total = weight[order].sum()
            before = (np.cumsum(weight[order]) - weight[order]) / total
            margin = min(margin, np.abs(before - p.top_p).min())
            order = [i for i, mass in zip(order, before, strict=True) if mass < p.top_p]
    is_kept = np.zeros(len(x), bool)
    is_kept[order] = True
    return is_kept & (x > -np.inf), margin


def oracle_logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


# Quarters, so that sums, penalties and temperatures below are exact in both precisions.
quarters = st.integers(-24, 24).map(lambda n: n / 4)


@st.composite
def requests(draw: Any, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        top_k=draw(st.none() | st.integers(-1, 12) | st.integers(1, vocab_size + 2)),
        top_p=draw(st.just(1.0) | st.floats(0.01, 0.999)),
        min_p=draw(st.just(0.0) | st.floats(0.001, 0.9)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -0.5, 1.25])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.25, 0.5])),
        logit_bias=draw(st.none() | st.dictionaries(ids, quarters, max_size=4)),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


# A few values, so that most logits tie.
few_values = st.sampled_from([quarters, st.integers(-1, 1).map(float), st.just(1.5)]).flatmap(
    lambda values: st.lists(values, min_size=1, max_size=12)
)


@st.composite
def batches(draw: Any) -> tuple[int, list[SamplingParams]]:
    size = draw(st.integers(1, V))
    return size, [draw(requests(size)) for _ in range(B)]


@settings(max_examples=60, deadline=None)
@given(batch=batches(), few=few_values, entropy=st.integers(0, 2**32))
def test_every_option_agrees_with_the_oracle(
    batch: tuple[int, list[SamplingParams]], few: list[float], entropy: int
):
    size, params = batch
    rng = np.random.default_rng(entropy)
    # A smaller vocabulary is a larger one that ends in -inf: all sizes run in one program.
    logits = np.full((B, V), -np.inf, np.float32)
    logits[:, :size] = rng.choice(np.array(few, np.float32), (B, size))
    tokens = rng.integers(0, size, (B, S)).astype(np.int32)
    lengths = rng.integers(1, S + 1, B).astype(np.int32)
    prompt_lengths = rng.integers(1, lengths + 1).astype(np.int32)

    wanted, margins = [], []
    for row, p in enumerate(params):
        ids = tokens[row].tolist()
        prompt, output = (
            ids[: prompt_lengths[row]],
            ids[prompt_lengths[row] : lengths[row]],
        )
        edited = oracle_edit(logits[row], prompt, output, p)
        is_kept, margin = oracle_filter(edited, p)
        wanted.append((edited, is_kept))
        margins.append(margin)

    state = make_sampling_state(params, V)
    context = dict(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        prompt_lengths=jnp.asarray(prompt_lengths),
        sampling=state,
    )
    edited = jit_edit(jnp.asarray(logits), **context)
    filtered = jit_filter(edited, state)
    choice = jit_choose(jnp.asarray(logits), **context)
    edited, filtered, choice = jax.device_get((edited, filtered, choice))
    for row, p in enumerate(params):
        oracle_edited, is_kept = wanted[row]
        np.testing.assert_array_equal(edited[row], oracle_edited)
        # Nearer than this float32 may round a probability over the threshold.
        if margins[row] < 1e-5:
            continue
        np.testing.assert_array_equal(filtered[row] > -np.inf, is_kept)
        scaled = (oracle_edited - oracle_edited.max()) / (p.temperature or 1)
        np.testing.assert_allclose(filtered[row][is_kept], scaled[is_kept], rtol=1e-6)
        assert is_kept[choice.token[row]]
        check_logprobs(choice, row, p, oracle_logprobs(logits[row]))


def check_logprobs(choice: Choice, row: int, p: SamplingParams, logprobs: np.ndarray) -> None:
    if p.logprobs is None:
        assert choice.logprob[row] == 0
        assert (choice.top_ids[row] == -1).all() and (choice.top_logprobs[row] == -np.inf).all()
        return
    np.testing.assert_allclose(choice.logprob[row], logprobs[choice.token[row]], atol=1e-5)
    order = sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:20]
    num = len(order)
    np.testing.assert_array_equal(choice.top_ids[row][:num], order)
    np.testing.assert_allclose(choice.top_logprobs[row][:num], logprobs[order], atol=1e-5)
    assert (choice.top_ids[row][num:] == -1).all()
    assert (choice.top_logprobs[row][num:] == -np.inf).all()


def test_a_vocabulary_smaller_than_the_logprobs():
    size = 7
    logits = np.random.default_rng(size).normal(size=(1, size)).astype(np.float32)
    p = SamplingParams(temperature=1.0, top_k=3, top_p=0.8, seed=3, logprobs=20)
    choice = jax.device_get(choose(jnp.asarray(logits), [p]))
    assert oracle_filter(logits[0].astype(np.float64), p)[0][choice.token[0]]
    check_logprobs(choice, 0, p, oracle_logprobs(logits[0]))


def kept(logits: list[float], **options: Any) -> list[int]:
    state = make_sampling_state([SamplingParams(temperature=1.0, **options)] * B, V)
    filtered = jit_filter(padded([logits]), state)
    return np.flatnonzero(np.asarray(filtered[0]) > -np.inf).tolist()


def test_ties_at_the_threshold_keep_the_lowest_ids():
    logits = [1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 0.0]
    assert kept(logits, top_k=1) == [3]
    assert kept(logits, top_k=3) == [0, 1, 3]
    assert kept(logits, top_k=4) == [0, 1, 2, 3]
    assert kept([0.0, -0.0, 0.0, -0.0], top_k=2) == [0, 1]
    assert kept([5.0] * 8, top_k=5) == [0, 1, 2, 3, 4]


def test_the_token_that_crosses_p_stays():
    uniform = [0.0] * 8
    assert kept(uniform, top_p=1e-6) == [0]
    assert kept(uniform, top_p=0.125) == [0]
    assert kept(uniform, top_p=0.126) == [0, 1]
    assert kept(uniform, top_p=0.5) == [0, 1, 2, 3]
    assert kept(uniform, top_p=0.99) == list(range(8))
    logits = np.log([0.1, 0.5, 0.1, 0.3]).tolist()
    assert kept(logits, top_p=0.49) == [1]
    assert kept(logits, top_p=0.51) == [1, 3]
    assert kept(logits, top_p=0.81) == [0, 1, 3]
    assert kept(logits, top_p=0.99) == [0, 1, 2, 3]
    # p is a share of what top_k left: 0.5 of 0.8 is 0.625.
    assert kept(logits, top_k=2, top_p=0.62) == [1]
    assert kept(logits, top_k=2, top_p=0.63) == [1, 3]


def test_one_token_always_stays():
    for options in (dict(min_p=1.0), dict(top_p=1e-30), dict(top_k=1), dict(min_p=1, top_p=1e-9)):
        assert kept([0.0, 3.0, 1.0], **options) == [1]
    assert kept([-np.inf, -np.inf, 0.5], top_k=3, top_p=0.999) == [2]


@pytest.mark.parametrize("top_k", [None, 0, -1, V, V + 1, 10**12])
def test_top_k_off_spellings_keep_the_whole_vocabulary(top_k: int | None):
    # SMP-2: the off value must not act as 1.
    drawn = set()
    for first in range(0, 200, B):
        params = [
            SamplingParams(temperature=1.0, top_k=top_k, seed=first + row) for row in range(B)
        ]
        drawn |= set(np.asarray(choose(jnp.zeros((B, V)), params).token).tolist())
    assert len(drawn) > 120


def test_a_seeded_request_draws_the_same_tokens_anywhere():
    # SMP-3: alone, at any slot, beside unseeded rows, after other calls.
    num_steps = 10
    table = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32) * 2
    mine = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, seed=1234)
    others = SamplingParams(temperature=1.3)

    def generate(num_rows: int, slot: int) -> list[int]:
        last, out = np.zeros(num_rows, np.int64), []
        params = [mine if row == slot else others for row in range(num_rows)]
        for step in range(num_steps):
            last = np.asarray(choose(jnp.asarray(table[last]), params, step + 1).token)
            out.append(int(last[slot]))
        return out

    alone = generate(1, 0)
    assert len(set(alone)) > 3
    assert generate(8, 3) == alone
    for _ in range(5):
        choose(jnp.asarray(table[:8]), [others] * 8)
    assert generate(8, 0) == alone
    assert generate(8, 7) == alone
    assert generate(1, 0) == alone


def test_requests_without_a_seed_differ():
    params = [SamplingParams(temperature=1.0)] * 8
    first, second = (np.asarray(choose(jnp.zeros((B, V)), params).token) for _ in range(2))
    assert len(set(first.tolist())) > 4
    assert (first != second).any()


def test_both_words_of_the_seed_count():
    seeds = [5, 5 + 2**32, 5 + 2**63]
    keys = position_keys(
        make_sampling_state([SamplingParams(seed=s) for s in seeds], 4), jnp.zeros(3, jnp.int32)
    )
    assert len({tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()}) == 3
    wanted = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), 0)
    np.testing.assert_array_equal(jax.random.key_data(keys)[0], jax.random.key_data(wanted))


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_filtered_distribution(over: str):
    num = 20_000
    logits = np.array([1.0, 0.5, -0.5, 2.0, 0.5, -3.0, 0.0, 1.5], np.float32)
    p = SamplingParams(temperature=0.9, top_k=6, top_p=0.95, min_p=0.05, seed=11)
    filtered = jit_filter(padded([logits]), make_sampling_state([p] * B, V))
    filtered = np.asarray(filtered)[:1, :8]
    probs = scipy.special.softmax(filtered[0].astype(np.float64))
    assert 3 < (probs > 0).sum() < 7
    many = jax.jit(repeat_rows, static_argnums=1)(make_sampling_state([p], 8), num)
    count = np.arange(num)
    if over == "seeds":
        many = replace(many, seed=jnp.asarray(np.stack([count * 0, count], 1), jnp.uint32))
        count = count * 0 + 17
    drawn = jit_sample(
        jnp.asarray(np.tile(filtered, (num, 1))),
        sampling=many,
        positions=jnp.asarray(count, jnp.int32),
    )
    observed = np.bincount(np.asarray(drawn), minlength=8)
    assert (observed[probs == 0] == 0).all()
    expected = probs[probs > 0] / probs.sum() * num
    assert scipy.stats.chisquare(observed[probs > 0], expected, sum_check=False).pvalue > 1e-3


def test_a_greedy_row_keeps_its_argmax_alone():
    for p in (SamplingParams(), SamplingParams(temperature=1e-9, top_k=3)):
        state = make_sampling_state([p] * B, V)
        filtered = jit_filter(padded([[0.0, 2.0, 2.0, 1.0]]), state)
        np.testing.assert_array_equal(np.exp(filtered)[0, :4], [0, 1, 0, 0])


def test_small_and_large_values_stay_in_range():
    rows = [[3e38, -3e38, 1.0, np.inf]] * 3 + [[2.0, 0.0, 0.0, 0.0]]
    params = [SamplingParams(temperature=t, seed=1, top_p=0.5) for t in (1e-5, 1.0, 1e30)]
    params.append(SamplingParams(logit_bias={1: 3e38, 2: -3e38}, repetition_penalty=1e-3))
    chosen = np.asarray(choose(padded(rows), params).token).tolist()
    assert chosen[:2] == [3, 3] and chosen[2] < 4 and chosen[3] == 1


def test_nan_logits_are_never_chosen():
    nan, inf = np.nan, np.inf
    rows = [[nan, 1, 2, nan], [nan] * V, [-inf], [-inf, nan, -inf, 0.5], [0, 1, 0]]
    rows = np.stack(
        [np.pad(np.array(r, float), (0, V - len(r)), constant_values=-inf) for r in rows]
    )
    options = dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1, frequency_penalty=1.0)
    for p in (SamplingParams(logprobs=3), SamplingParams(logprobs=3, seed=5, **options)):
        choice = choose(padded(rows), [p] * 5)
        assert np.asarray(choice.token).tolist()[1:4] == [0, 0, 3]
        assert int(choice.token[0]) in (1, 2)
        assert np.isnan(choice.logprob[:5]).tolist() == [True, True, True, True, False]
        assert np.asarray(choice.top_ids[0, :2]).tolist() == [2, 1]


def test_options_do_not_retrace():
    everything: dict[str, Any] = dict(
        temperature=0.7,
        top_k=5,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={3: 1.0},
        seed=4,
        logprobs=4,
    )
    logits = jnp.zeros((B, V))
    choose(logits, [])
    before = len(traced)
    for option in (everything, *({name: value} for name, value in everything.items())):
        choose(logits, [SamplingParams(**option)])
    assert len(traced) == before > 0


def test_lowered_for_gpu_the_filters_hold_no_loop():
    program = jit_filter.trace(padded([[0.0]]), make_sampling_state([SamplingParams()] * B, V))
    assert "stablehlo.while" not in program.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in program.lower(lowering_platforms=("cpu",)).as_text()


# The vocabulary cut over devices.

MESHES = {"one_axis": ((8,), ("model",), "model"), "two_axes": ((2, 4), ("x", "y"), ("x", "y"))}


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def state_pspecs(state: SamplingState, axis: Any) -> SamplingState:
    pspecs = jax.tree.map(lambda _: PartitionSpec(), state)
    return replace(pspecs, logit_bias=PartitionSpec(None, axis))


def sharded_choose(mesh_name: str, state: SamplingState):
    shape, names, axis = MESHES[mesh_name]
    mesh = make_mesh(shape, names)

    def local(logits: Any, tokens: Any, lengths: Any, prompt_lengths: Any, state: SamplingState):
        context = dict(tokens=tokens, lengths=lengths, prompt_lengths=prompt_lengths)
        return choose_tokens(logits, sampling=state, axis=axis, **context)

    everywhere = PartitionSpec()
    in_specs = (PartitionSpec(None, axis), *[everywhere] * 3, state_pspecs(state, axis))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=everywhere))


def test_eight_devices_choose_as_one():
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)
    lengths = jnp.asarray([3, 12, 7, 5] * 2, jnp.int32)
    prompt_lengths = jnp.asarray([1, 6, 7, 2] * 2, jnp.int32)
    edits = dict(
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={0: 0.5, 150: 2.0, V - 1: 2.0},
    )
    draws = dict(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=7)
    mixed: list[dict] = [{}, edits | dict(logprobs=2), draws, edits | draws | dict(logprobs=20)]
    batches = [[SamplingParams(**o) for o in batch] for batch in ([{}] * B, [edits] * B, mixed * 2)]
    run = None
    for params in batches:
        state = make_sampling_state(params, V)
        run = run or sharded_choose("two_axes", state)
        # Small integers tie on and across devices.
        # The last leaves devices without any number.
        few = np.where(np.arange(V) < V // 3, rng.normal(size=(B, V)), -np.inf)
        for logits in (rng.integers(-2, 2, (B, V)), rng.normal(size=(B, V)) * 3, few):
            logits = jnp.asarray(logits, jnp.float32)
            many = run(logits, tokens, lengths, prompt_lengths, state)
            one = jit_choose(
                logits,
                tokens=tokens,
                lengths=lengths,
                prompt_lengths=prompt_lengths,
                sampling=state,
            )
            np.testing.assert_array_equal(many.token, one.token)
            np.testing.assert_array_equal(many.top_ids, one.top_ids)
            np.testing.assert_allclose(many.logprob, one.logprob, atol=1e-5)
            np.testing.assert_allclose(many.top_logprobs, one.top_logprobs, atol=1e-5)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_greedy_devices_exchange_pairs_and_ties_go_to_the_lowest_id(mesh_name: str):
    shape, names, axis = MESHES[mesh_name]
    run = jax.jit(
        jax.shard_map(
            lambda x: argmax_tokens(x, axis),
            mesh=make_mesh(shape, names),
            in_specs=PartitionSpec(None, axis),
            out_specs=PartitionSpec(),
        )
    )
    logits = np.zeros((4, V), np.float32)
    logits[0, [300, 40, 77]] = 5.0
    logits[1, V - 1] = 1.0
    logits[2] = np.nan
    logits[3] = -np.inf
    assert np.asarray(run(jnp.asarray(logits))).tolist() == [40, V - 1, 0, 0]
    text = run.lower(jnp.asarray(logits)).as_text()
    collectives = re.findall(r"stablehlo\.(all_gather|all_reduce|collective\w*)", text)
    assert collectives == ["all_gather"]
    assert re.search(r"all_gather.*\(tensor<4x1x2xi32>\)", text, re.DOTALL)


# What a user may ask for.

REFUSED = {
    "max_new_tokens": [0, -1, 1.5, True, "5", math.nan],
    "temperature": [-0.1, math.nan, math.inf, 1e39, 10**400, True, "1", None],
    "top_k": [-2, 1.0, True, math.inf],
    "top_p": [0, -0.5, 1.01, math.nan, None, False],
    "min_p": [-0.1, 1.5, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan, True],
    "presence_penalty": [2.1, -2.1, math.nan, "0"],
    "frequency_penalty": [3, -3, math.inf],
    "logit_bias": [{-1: 1.0}, {"5": 1.0}, {True: 1.0}, {1: math.nan}, {1: math.inf}, [1], 5],
    "seed": [-1, 2**64, 1.0, True],
    "stop": ["", ("a", ""), 5, [b"a"], None],
    "stop_token_ids": [5, "5", [-1], [1.0], [True], None],
    "ignore_eos": [1, None],
    "stop_in_thinking": ["yes"],
    "logprobs": [-1, 21, True, 2.0],
    "skip_special_tokens": [0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_wrong_options_are_refused_by_name_and_value(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}, expected "):
        SamplingParams(**{name: value})


def test_refusals_cover_every_field_and_come_at_once():
    assert set(REFUSED) == {f.name for f in dataclasses.fields(SamplingParams)}
    with pytest.raises(ValueError, match="top_k is -5.*temperature is -1"):
        SamplingParams(temperature=-1, top_k=-5)


def test_accepted_spellings_are_settled():
    p = SamplingParams(
        temperature=np.float32(1),
        top_k=np.int64(3),
        stop="end",
        stop_token_ids=[np.int32(4), 5],
        logit_bias={np.int64(2): 1},
        max_new_tokens=None,
    )
    assert (p.temperature, type(p.temperature), type(p.top_k)) == (1.0, float, int)
    assert p.stop == ("end",) and p.stop_token_ids == (4, 5)
    assert p.logit_bias == {2: 1.0} and p.max_new_tokens is None
    assert p == dataclasses.replace(p) == copy.deepcopy(p) == pickle.loads(pickle.dumps(p))
    assert hash(p) == hash(dataclasses.replace(p))


def test_ids_outside_the_vocabulary_are_refused_by_id():
    p = SamplingParams(logit_bias={5: 1.0, 100: 1.0}, stop_token_ids=(99, 101))
    p.check(102)
    with pytest.raises(
        ValueError, match=r"logit_bias has token ids \[100\].*stop_token_ids .*\[101\]"
    ):
        p.check(100)
    with pytest.raises(ValueError, match="expected 0 to 99"):
        make_sampling_state([SamplingParams(), p], 100)
