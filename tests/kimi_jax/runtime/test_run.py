"""Rows that take the next request as they end: each request is as if it had run alone."""

import gc

import jax
import numpy as np
import pytest

from kimi_jax.runtime import engine as engines
from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.decode import Finish
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.run import Run

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Float32 sums in another order, a few roundings deep, over log-probabilities of about five.
TOLERANCE = 1e-4

OPTIONS = (
    {},
    {"temperature": 1.0, "seed": 3, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3},
    {"logit_bias": {5: 30.0, 6: 29.0}, "presence_penalty": 2.0, "logprobs": 0},
    {"temperature": 1.0, "seed": 5, "min_p": 0.1, "frequency_penalty": 1.0},
)
"""Neighbours of every kind, so that what one leaves in its row another would show."""


@pytest.fixture
def requests_of(ids, on):
    """Ragged requests, some of one token, each with its options in turn."""

    def requests_of(llm, num: int, longest: int = 80):
        prompts = [ids(1 + (37 * n) % longest, seed=n) for n in range(num)]
        params = [on(1 + (11 * n) % 40, **OPTIONS[n % len(OPTIONS)]) for n in range(num)]
        return llm._requests(prompts, params)

    return requests_of


def replies_of(run: Run) -> dict[int, tuple]:
    """Of each request its tokens, why it ended, and its log-probabilities."""
    replies: dict[int, tuple] = {}
    for updates in run:
        for update in updates:
            ids, finish, logprobs = replies.get(update.index, ((), Finish.RUNNING, ()))
            assert finish == Finish.RUNNING
            logprobs += tuple(e.logprob for e in update.logprobs or ())
            replies[update.index] = (ids + update.token_ids, update.finish, logprobs)
    return replies


def check_same(found: dict[int, tuple], expected: dict[int, tuple]) -> None:
    assert sorted(found) == sorted(expected)
    for index, (ids, finish, logprobs) in expected.items():
        assert found[index][:2] == (ids, finish)
        np.testing.assert_allclose(found[index][2], logprobs, atol=TOLERANCE)


def alone(engine, requests) -> dict[int, tuple]:
    return {n: replies_of(Run(engine, [r]))[0] for n, r in enumerate(requests)}


@pytest.mark.parametrize("is_streaming", [False, True])
def test_more_requests_than_rows(llm, requests_of, no_compiles, is_streaming):
    requests = requests_of(llm, 30)
    found = replies_of(Run(llm.engine, iter(requests), is_streaming=is_streaming))
    check_same(found, alone(llm.engine, requests))


def test_eight_devices(make_llm, llm, requests_of):
    # No chunk over 16, so that another test finds that program cold.
    requests = requests_of(llm, 11, longest=17)
    found = replies_of(Run(make_llm("tensor=8").engine, requests))
    check_same(found, alone(llm.engine, requests))


@pytest.mark.slow
def test_longer_requests_than_those_that_run(folder, llm, ids, on, monkeypatch):
    """The running rows' capacity grows for them, and warm-up knew that it might."""
    # Fewer programs to compile.
    monkeypatch.setattr(engines, "PREFILL_SIZES", (128,))
    two = LLM(folder, max_length=320, max_batch=2, progress=False)
    assert two.engine.capacities == (256, 512)
    two.warm_up()
    before = num_compiles()
    prompts = [ids(n, n) for n in (9, 3, 270, 40, 300)]
    params = [on(60, seed=1, temperature=1.0), on(5), on(20), on(30), on(None)]
    found = [result.token_ids for result in two.generate(prompts, params)]
    assert num_compiles() == before
    for prompt, own, token_ids in zip(prompts, params, found, strict=True):
        assert llm.generate([prompt], own)[0].token_ids == token_ids


def test_requests_are_asked_for_one_ahead(llm, ids, on):
    lengths = [1, 5, 70, 70, 1, 1, 5, 70, 5, 5, 1]
    asked = []

    def requests():
        for n, new in enumerate(lengths):
            asked.append(n)
            yield from llm._requests([ids(3, n)], on(new))

    blocks = iter(Run(llm.engine, requests(), is_streaming=True))
    # One cycle: three of the eight rows end in it, and are taken when the next block begins.
    first = next(blocks)
    assert [u.index for u in first if u.finish != Finish.RUNNING] == [0, 4, 5]
    assert asked == list(range(9))
    second = next(blocks)
    assert asked == list(range(11))
    assert [u.index for u in second] == [8, 1, 2, 3, 9, 10, 6, 7]
    for _ in blocks:
        pass
    assert asked == list(range(11))


def test_where_nothing_runs_the_next_start_together(llm, ids, on, monkeypatch, no_compiles):
    monkeypatch.setattr(llm.engine, "insert", None)
    results = llm.generate([ids(1 + n, n) for n in range(19)], on(3))
    assert [len(result.token_ids) for result in results] == [3] * 19


def test_a_stop_string_frees_its_row(llm, ids, on, printable):
    """What follows a stop string in its block is cut, and the row's next request is whole."""
    options = {"logit_bias": printable, "temperature": 1.0}
    prompts = [ids(5, n) for n in range(20)]
    params = [on(70, seed=n, **options) for n in range(20)]
    whole = llm.generate(prompts, params)
    params = [
        on(70, seed=n, stop=(r.text[9:12],) if n % 2 else (), **options)
        for n, r in enumerate(whole)
    ]
    for n, result in enumerate(llm.generate(prompts, params)):
        text = whole[n].text
        assert result.text == (text.partition(text[9:12])[0] if n % 2 else text)


def test_results_come_as_they_end(llm, ids, on):
    lengths = [200, 3, 3, 100, 3, 3, 3, 3, 3, 3]
    replies = (llm.text_reply(ids(4, n), on(new)) for n, new in enumerate(lengths))
    found = list(llm.as_finished(replies))
    assert [len(result.token_ids) for _, result in found] == [lengths[n] for n, _ in found]
    assert [n for n, _ in found][-2:] == [3, 0]
    assert list(llm.as_finished([])) == []


def test_times_are_those_of_the_rows_own_blocks(llm, ids, on):
    lengths = [130, 1, 1, 1, 1, 1, 1, 1, 64]
    run = Run(llm.engine, llm._requests([ids(3)] * 9, [on(n) for n in lengths]))
    last = {update.index: update for updates in run for update in updates}
    assert last[0].prefill_seconds + last[8].prefill_seconds == pytest.approx(run.prefill_seconds)
    assert last[1].prefill_seconds == last[0].prefill_seconds != last[8].prefill_seconds
    assert last[0].decode_seconds == pytest.approx(run.decode_seconds)
    assert last[8].decode_seconds < last[0].decode_seconds
    assert {update.compiles for update in last.values()} == {0}


def test_a_run_left_half_way_leaves_nothing_behind(llm, ids, on):
    expected = llm.generate([ids(4)], on(9))[0].token_ids
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        for index, _ in llm.as_finished(llm.text_reply(ids(3, n), on(n)) for n in range(1, 100)):
            if index > 20:
                break
    gc.collect()
    assert len(jax.live_arrays()) <= before
    assert llm.generate([ids(4)], on(9))[0].token_ids == expected


def test_a_request_that_cannot_be_made_ends_the_run(llm, ids, on):
    def requests():
        yield from llm._requests([ids(3)] * 8, on(2))
        raise ValueError("line 9 is no prompt")

    with pytest.raises(ValueError, match="line 9 is no prompt"):
        list(Run(llm.engine, requests()))
    assert len(llm.generate([ids(3)], on(2))) == 1
