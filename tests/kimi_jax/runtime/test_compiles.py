"""After `warm_up` nothing compiles, whatever the requests are."""

import logging

import pytest

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def everything(llm, ids, on):
    def everything() -> None:
        for length in range(1, 65):
            llm.generate([ids(length, length)], on(1))
        for count in range(1, 21):
            llm.generate([ids(5)], on(count))
        for batch in range(1, 9):
            llm.generate([ids(3 * n + 1, n) for n in range(batch)], on(3))
        llm.generate([ids(300), ids(1)], on(None))
        for options in (
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 0.5, "top_p": 0.9, "seed": 1},
            {"temperature": 0.5, "min_p": 0.1},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 1.0, "frequency_penalty": 1.0},
            {"logit_bias": {1: 1.0}},
            {"stop": ("ab", "c")},
            {"stop_token_ids": (1, 2)},
            {"ignore_eos": False},
            {"stop_in_thinking": True, "stop": "x"},
            {"logprobs": 20},
            {"skip_special_tokens": False},
        ):
            params = on(5, **options)
            llm.generate([ids(4)], params)
            llm.generate([ids(4), ids(9), ids(2)], [params, on(5), params])
            list(llm.stream(ids(20), params))
        list(llm.stream(ids(9), on(150)))
        llm.chat([{"role": "user", "content": "Hi"}], on(5))
        for length in (1, 15, 16, 17, 32, 33, 64, 65, 200, 320):
            llm.logits(ids(length))
            llm.score([ids(length)])

    return everything


def test_a_warm_model_compiles_nothing(everything, caplog):
    before = num_compiles()
    with caplog.at_level(logging.INFO, logger="kimi_jax.runtime.engine"):
        everything()
    assert num_compiles() == before
    assert not caplog.records


def test_a_warm_model_says_so_in_its_timings(llm, ids, on):
    [result] = llm.generate([ids(5)], on())
    timings = result.timings
    assert timings.compiles == 0 and timings.cycles == 8
    assert timings.prefill_seconds > 0 and timings.decode_seconds > 0
    assert timings.tokens_per_second == pytest.approx(8 / timings.decode_seconds)


def test_warming_up_again_compiles_nothing(llm):
    before = num_compiles()
    num_programs = llm.warm_up()
    # Of one capacity and four batch sizes: allocation, three prefills, decode; of all batches but
    # the first, insertion; three of logits.
    assert num_programs == 4 * 5 + 3 + 3
    assert num_compiles() == before


def test_a_cold_program_is_named_once(make_llm, caplog, monkeypatch, ids, on):
    llm = make_llm("tensor=8")
    llm.generate([ids(2)] * 3, on(1))
    # As if warm-up had ended here.
    monkeypatch.setattr(llm.engine, "_is_warm", True)
    # Of the cold programs before, if another test has let information be logged.
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kimi_jax.runtime.engine"):
        first = llm.generate([ids(60)] * 3, on(1))
        again = llm.generate([ids(61)] * 3, on(1))
    assert (first[0].timings.compiles, again[0].timings.compiles) == (1, 0)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "compiling" in record.message and "prefill" in record.message
    assert "128" in record.message


def test_params_are_no_part_of_a_program(llm, ids):
    """One program serves greedy and sampled rows; equal requests are equal afterwards."""
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    before = num_compiles()
    first = [r.token_ids for r in llm.generate([ids(4), ids(4)], [greedy, sampled])]
    again = [r.token_ids for r in llm.generate([ids(4), ids(4)], [sampled, greedy])]
    assert first == again[::-1]
    assert num_compiles() == before
