"""Sampling options through `LLM`: each has its effect, nothing depends on the neighbours."""

import dataclasses

import numpy as np
import pytest

from kimi_jax.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compiles", "no_compiles")

TOLERANCE = 1e-4
SAMPLED = {"temperature": 1.0, "seed": 11}


@pytest.fixture
def run(llm, ids, on):
    """New tokens of one prompt."""

    def run(max_new_tokens=24, prompt=None, **options):
        prompt = ids(9, 2) if prompt is None else prompt
        return llm.generate([prompt], on(max_new_tokens, **options))[0].token_ids

    return run


@pytest.fixture
def probabilities(llm, ids):
    """The model's own distribution at each of the new tokens."""

    def probabilities(new_tokens, temperature=1.0):
        prompt = ids(9, 2)
        x = llm.logits([*prompt, *new_tokens])[len(prompt) - 1 : -1].astype(np.float64)
        x = np.exp((x - x.max(axis=-1, keepdims=True)) / temperature)
        return x / x.sum(axis=-1, keepdims=True)

    return probabilities


TESTED = {
    "max_new_tokens": "test_generate.py",
    "temperature": "test_temperature",
    "top_k": "test_top_k",
    "top_p": "test_top_p_and_min_p",
    "min_p": "test_top_p_and_min_p",
    "repetition_penalty": "test_penalties",
    "presence_penalty": "test_penalties",
    "frequency_penalty": "test_penalties",
    "logit_bias": "test_logit_bias",
    "seed": "test_seed",
    "stop": "test_stops.py",
    "stop_token_ids": "test_stops.py",
    "ignore_eos": "test_stops.py",
    "stop_in_thinking": "test_stops.py",
    "logprobs": "test_logprobs",
    "skip_special_tokens": "test_stops.py",
}


def test_every_option_has_a_test():
    assert {f.name for f in dataclasses.fields(SamplingParams)} == set(TESTED)


# Effects.


def test_temperature(run, probabilities):
    greedy = run()
    assert run(temperature=0.0, seed=3) == greedy
    warm, hot = (run(temperature=t, seed=3) for t in (1.0, 50.0))
    assert len({greedy, warm, hot}) == 3
    likelihoods = [
        np.mean([p[t] for p, t in zip(probabilities(x), x, strict=True)])
        for x in (greedy, warm, hot)
    ]
    assert likelihoods == sorted(likelihoods, reverse=True)


def test_seed(run):
    draws = [run(temperature=1.0, seed=seed) for seed in (0, 1, 2**32, 2**64 - 1, None, None)]
    assert len(set(draws)) == len(draws)
    assert run(temperature=1.0, seed=2**32) == draws[2]
    assert run(temperature=1.0, seed=2**64 - 1) == draws[3]


def test_top_k(run, probabilities):
    assert run(top_k=1, **SAMPLED) == run()
    new = run(top_k=3, **SAMPLED)
    ranks = [(p > p[t]).sum() for p, t in zip(probabilities(new), new, strict=True)]
    assert set(ranks) == {0, 1, 2}


def test_top_k_is_off_at_every_value_that_means_off(run):
    draws = {run(top_k=k, **SAMPLED) for k in (None, 0, -1, 512, 513)}
    assert len(draws) == 1
    assert len(set(*draws)) > 12


def test_top_p_and_min_p(run, probabilities):
    for p in (1e-6, 0.3):
        new = run(top_p=p, **SAMPLED)
        for probs, token in zip(probabilities(new), new, strict=True):
            assert probs[probs > probs[token]].sum() < p + TOLERANCE
    assert run(top_p=1e-6, **SAMPLED) == run()
    for p in (0.5, 1.0):
        new = run(min_p=p, **SAMPLED)
        for probs, token in zip(probabilities(new), new, strict=True):
            assert probs[token] >= p * probs.max() * (1 - TOLERANCE)
    assert run(min_p=1.0, **SAMPLED) == run()
    assert len({run(**SAMPLED), run(top_p=0.3, **SAMPLED), run(min_p=0.5, **SAMPLED)}) == 3


def test_logit_bias(run):
    greedy = run()
    assert greedy[0] not in run(logit_bias={greedy[0]: -100.0})
    assert run(4, logit_bias={7: 100.0}) == (7,) * 4
    assert run(4, logit_bias={511: 100.0}, **SAMPLED) == (511,) * 4


@pytest.mark.parametrize("sampled", [{}, SAMPLED])
def test_penalties(run, sampled):
    # Two tokens far ahead of the rest: without a penalty one follows the other at most by chance.
    bias = {5: 30.0, 6: 29.0, 7: 28.0}
    free = run(logit_bias=bias, **sampled)
    assert set(free) <= {5, 6, 7}
    presence = run(logit_bias=bias, presence_penalty=2.0, **sampled)
    frequency = run(logit_bias=bias, frequency_penalty=2.0, **sampled)
    repetition = run(3, logit_bias=bias, repetition_penalty=1000.0, **sampled)
    assert sorted(repetition) == [5, 6, 7]
    assert len({free, presence, frequency}) == 3
    # The frequency penalty grows until all three come up equally often.
    counts = [frequency.count(t) for t in (5, 6, 7)]
    assert min(counts) >= 6
    # Rewards keep what came first.
    rewarded = run(logit_bias=bias, frequency_penalty=-2.0, **sampled)
    assert len(set(rewarded[4:])) == 1


def test_penalties_count_the_prompt_only_where_they_say_so(run):
    prompt, bias = [5] * 9, {5: 30.0, 6: 25.0}
    assert run(1, prompt, logit_bias=bias) == (5,)
    assert run(1, prompt, logit_bias=bias, frequency_penalty=2.0) == (5,)
    assert run(1, prompt, logit_bias=bias, presence_penalty=2.0) == (5,)
    assert run(1, prompt, logit_bias=bias, repetition_penalty=2.0) == (6,)


# Log-probabilities.


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "options", [{}, SAMPLED | {"top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": {3: 2.0}}]
)
def test_logprobs(llm, ids, on, probabilities, count, options):
    """Of the model's own distribution, whatever edits and filters the choice went through."""
    [result] = llm.generate([ids(9, 2)], on(70, logprobs=count, **options))
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    expected = np.log(probabilities(result.token_ids))
    for entry, row in zip(result.logprobs, expected, strict=True):
        assert abs(entry.logprob - row[entry.token_id]) < TOLERANCE
        assert len(entry.top) == count
        top_ids, top = [i for i, _ in entry.top], [x for _, x in entry.top]
        np.testing.assert_allclose(top, row[top_ids], atol=TOLERANCE)
        np.testing.assert_allclose(top, np.sort(row)[::-1][:count], atol=TOLERANCE)
        assert top == sorted(top, reverse=True) and len(set(top_ids)) == count
        if count and not options:
            assert entry.top[0] == (entry.token_id, entry.logprob)


def test_logprobs_change_no_token_and_come_only_where_asked(llm, ids, on, run):
    prompts = [ids(n, n) for n in (4, 9, 30)]
    plain = llm.generate(prompts, on(20, **SAMPLED))
    mixed = llm.generate(prompts, [on(20, logprobs=n, **SAMPLED) for n in (None, 2, 0)])
    assert [r.token_ids for r in mixed] == [r.token_ids for r in plain]
    assert [r.logprobs is None for r in mixed] == [True, False, False]
    assert [len(r.logprobs) for r in mixed[1:]] == [20, 20]


# Seeds.


def test_a_seeded_request_gives_the_same_tokens_everywhere(llm, ids, on, run):
    prompt, params = ids(9, 2), on(24, temperature=0.8, seed=5)
    [alone] = llm.generate([prompt], params)
    others = [ids(3 + 7 * n, n) for n in range(8)]
    unseeded = on(40, temperature=0.8)
    for size, slot in ((2, 1), (3, 0), (5, 3), (8, 0), (8, 3), (8, 7)):
        prompts, options = others[:size], [unseeded] * size
        prompts[slot], options[slot] = prompt, params
        assert llm.generate(prompts, options)[slot].token_ids == alone.token_ids
    for _ in range(5):
        llm.generate(others[:2], unseeded)
    assert llm.generate([prompt], params)[0].token_ids == alone.token_ids
    assert list(llm.stream(prompt, params))[-1].result.token_ids == alone.token_ids
    # More tokens are the same tokens and more.
    longer = on(50, temperature=0.8, seed=5)
    assert llm.generate([prompt], longer)[0].token_ids[:24] == alone.token_ids


def test_equal_requests_in_a_batch_are_equal_with_a_seed_and_differ_without(llm, ids, on):
    seeded = llm.generate([ids(9)] * 4, on(24, **SAMPLED))
    assert len({r.token_ids for r in seeded}) == 1
    free = llm.generate([ids(9)] * 4, on(24, temperature=1.0))
    assert len({r.token_ids for r in free}) == 4
