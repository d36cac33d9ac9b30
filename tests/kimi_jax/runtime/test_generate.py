"""Decoding through `LLM`: against an oracle, itself, and its own limits.

Token ids compare exactly. Numbers compare to 1e-4: float32 sums in another order, over logits of
about one, a few roundings deep; the oracle is float64.
"""

import gc
import inspect

import jax
import numpy as np
import oracles
import pytest

from kimi_jax.runtime import engine as engines
from kimi_jax.runtime.llm import LLM

pytestmark = pytest.mark.usefixtures("quick_compiles")

TOLERANCE = 1e-4
# Free of the type checks tests run under, which users do without.
generate = inspect.unwrap(LLM.generate)
LENGTHS = [*range(1, 21), 32, 33, 63, 64, 65, 128, 129, 255, 256, 257]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture
def ids_of(llm):
    """The new tokens of each prompt."""

    def ids_of(prompts, params):
        return [result.token_ids for result in llm.generate(prompts, params)]

    return ids_of


# Against something else.


def test_logits_and_greedy_tokens_are_the_oracles(llm, folder, ids, on):
    """Across original_max_position_embeddings (32), where YaRN begins to matter."""
    config, tensors = oracles.read_checkpoint(folder)
    assert config["rope_scaling"]["original_max_position_embeddings"] == 32
    for length in (1, 28):
        prompt = ids(length, seed=length)
        [result] = llm.generate([prompt], on(10))
        sequence = [*prompt, *result.token_ids]
        expected = oracles.forward(tensors, config, sequence).logits
        np.testing.assert_allclose(llm.logits(sequence), expected, atol=TOLERANCE)
        assert result.token_ids == tuple(expected[length - 1 : -1].argmax(axis=-1))


@pytest.mark.parametrize("length", [1, 5, 40])
def test_greedy_is_the_argmax_of_the_logits(llm, ids, on, length):
    sequence = ids(length, seed=3)
    [result] = llm.generate([sequence], on(12))
    for token in result.token_ids:
        assert token == llm.logits(sequence)[-1].argmax()
        sequence = [*sequence, token]


def test_score_is_the_log_softmax_of_the_logits(llm, ids):
    prompts = [ids(n, seed=n) for n in (2, 16, 17, 70, 300)]
    for prompt, score in zip(prompts, llm.score(prompts), strict=True):
        expected = log_softmax(llm.logits(prompt))[np.arange(len(prompt) - 1), prompt[1:]]
        assert score.dtype == np.float32 and score.shape == (len(prompt) - 1,)
        np.testing.assert_allclose(score, expected, atol=TOLERANCE)
    [text] = llm.score("hi there")
    np.testing.assert_array_equal(text, llm.score([llm.tokenizer.encode("hi there")])[0])
    assert [s.shape for s in llm.score(["", "x"])] == [(0,), (0,)]


# Chunks.


@pytest.mark.parametrize("length", LENGTHS)
def test_every_cutting_of_the_prompt_gives_the_same_reply(
    llm, ids, on, monkeypatch, no_compiles, length
):
    prompt = ids(length, seed=5)
    [first] = llm.generate([prompt], on(4, logprobs=2))
    logprobs = log_softmax(llm.logits([*prompt, *first.token_ids]))[length - 1 : -1]
    assert first.token_ids == tuple(logprobs.argmax(axis=-1))
    for sizes in ((16,), (128,), (512,)) if length <= 257 else ():
        if -(-(length - 1) // sizes[0]) * sizes[0] > 320:
            continue
        monkeypatch.setattr(engines, "PREFILL_SIZES", sizes)
        [result] = llm.generate([prompt], on(4, logprobs=2))
        assert result.token_ids == first.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in result.logprobs],
            [entry.logprob for entry in first.logprobs],
            atol=TOLERANCE,
        )


def test_logits_do_not_depend_on_the_chunks(llm, ids, monkeypatch, no_compiles):
    prompt = ids(300, seed=1)
    whole = llm.logits(prompt)
    assert whole.shape == (300, 512) and whole.dtype == np.float32
    monkeypatch.setattr(engines, "PREFILL_SIZES", (16,))
    np.testing.assert_allclose(llm.logits(prompt), whole, atol=TOLERANCE)
    for length in (1, 15, 16, 17):
        np.testing.assert_allclose(llm.logits(prompt[:length]), whole[:length], atol=TOLERANCE)


# Limits.


def test_max_new_tokens_is_exact(llm, ids, on):
    prompt = ids(7)
    [longest] = llm.generate([prompt], on(130))
    for count in (1, 2, 63, 64, 65, 129, 130):
        [result] = llm.generate([prompt], on(count))
        assert result.token_ids == longest.token_ids[:count]
        assert result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.new_tokens) == (7, count)
        assert result.timings.cycles == count


@pytest.mark.parametrize("new", [None, 11, 50])
@pytest.mark.parametrize("length", [310, 319])
def test_the_context_is_filled_to_its_last_slot(llm, ids, on, length, new):
    [result] = llm.generate([ids(length)], on(new))
    assert len(result.token_ids) == 320 - length
    assert result.finish_reason == "length"
    [shorter] = llm.generate([ids(length)], on(320 - length))
    assert result.token_ids == shorter.token_ids


def test_ending_rows_leave_the_others_alone(llm, ids, on):
    prompts = [ids(n, seed=n) for n in (310, 2, 100, 9)]
    params = [on(None), on(1), on(70), on(130)]
    together = llm.generate(prompts, params)
    assert [len(r.token_ids) for r in together] == [10, 1, 70, 130]
    for prompt, own, result in zip(prompts, params, together, strict=True):
        assert llm.generate([prompt], own)[0].token_ids == result.token_ids


# Batches.


@pytest.fixture
def ragged(llm, ids):
    """Prompts whose parts look like padding or like ends: id 0, [EOS], [PAD]."""
    special = llm.tokenizer.special_tokens
    with_ends = [*ids(6), special["[EOS]"], special["<|im_end|>"], special["[PAD]"], 0, 0, 5]
    return [ids(1), ids(3, 1), ids(17, 2), ids(64, 3), with_ends, [0], [0, 0, 0], ids(65, 4)]


@pytest.mark.parametrize("stops", [(), (0,)])
def test_a_row_is_the_same_alone_and_in_any_batch(llm, ragged, on, stops, no_compiles):
    """With 0 as a stop id, the engine's filler is an end-of-text id."""
    params = on(20, logprobs=0, stop_token_ids=stops)
    alone = [llm.generate([prompt], params)[0] for prompt in ragged]
    orders = [np.random.default_rng(s).permutation(len(ragged)).tolist() for s in range(3)]
    for order in [list(range(8)), list(range(7, -1, -1)), *orders, [1, 3], [6, 2, 0]]:
        together = llm.generate([ragged[i] for i in order], params)
        for i, result in zip(order, together, strict=True):
            assert result.token_ids == alone[i].token_ids
            assert result.finish_reason == alone[i].finish_reason
            np.testing.assert_allclose(
                [entry.logprob for entry in result.logprobs],
                [entry.logprob for entry in alone[i].logprobs],
                atol=TOLERANCE,
            )


def test_more_prompts_than_a_batch_holds(llm, ids, on, ids_of, no_compiles):
    prompts = [ids(1 + n % 5, seed=n) for n in range(19)]
    params = [on(1 + n % 4, seed=n, temperature=n % 2) for n in range(19)]
    together = ids_of(prompts, params)
    assert together == [ids_of([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    assert [len(r) for r in together] == [1 + n % 4 for n in range(19)]


def test_a_text_is_its_ids(llm, on, ids_of):
    text = "hello, world"
    encoded = llm.tokenizer.encode(text)
    expected = ids_of(text, on())
    assert ids_of([text], on()) == ids_of(encoded, on()) == ids_of([encoded], on()) == expected
    assert [r.token_ids for r in generate(llm, np.array(encoded), on())] == expected
    [result] = llm.generate(text, on())
    assert result.text == llm.tokenizer.decode(result.token_ids, skip_special=True)


# Odd inputs.


def test_an_empty_prompt_begins_with_bos(llm, on, ids_of):
    bos = llm.cfg.bos_token_id
    expected = ids_of([[bos]], on())[0]
    hi = ids_of("hi", on())[0]
    assert ids_of("", on()) == [expected]
    assert ids_of([[]], on()) == [expected]
    assert ids_of(["", "hi"], on()) == [expected, hi]
    assert ids_of([], on()) == []
    assert [p.result for p in llm.stream("", on())][-1].token_ids == expected
    assert llm.logits([]).shape == (1, 512)
    assert ids_of("hi", on()) == [hi]


@pytest.mark.parametrize(
    "prompts, params, message",
    [
        ([[1, 512]], None, r"prompt 0 holds token id 512, outside the vocabulary 0\.\.511"),
        (["a", [-1]], None, "prompt 1 holds token id -1"),
        ([[1], [2, 1.5]], None, "prompt 1 holds 1.5"),
        ([[1, "a"]], None, "prompt 0 holds 'a'"),
        (b"ab", None, "prompt 0 is b'ab'"),
        ([True, False], None, "prompt 0 holds True"),
        ([1.5, 2.5], None, "prompt 0 is 1.5"),
        ([None], None, "prompt 0 is None"),
        (["a", 3], None, "prompt 1 is 3"),
        (["a", [1] * 321], None, "prompt 1 has 321 tokens, max_length is 320"),
        ([[1] * 320], None, "prompt 0 has 320 tokens and leaves no room.* max_length is 320"),
        (["a", "b"], [{}], "2 prompts, but 1 sampling params"),
        (["a"], [{}, {}], "1 prompts, but 2 sampling params"),
        (["a", "b"], [{}, {"stop_token_ids": (512,)}], r"prompt 1: .*stop_token_ids .*\[512\]"),
        (["a"], {"logit_bias": {600: 1.0}}, r"prompt 0: .*logit_bias .*\[600\]"),
        (["a"], {"stop_token_ids": tuple(range(20))}, "prompt 0 has 22 stop ids.* at most 16"),
    ],
)
def test_what_cannot_run_is_named_before_anything_does(
    llm, on, ids_of, no_compiles, monkeypatch, prompts, params, message
):
    make = lambda options: on(**({"ignore_eos": False} | options))  # noqa: E731
    if params is not None:
        params = [make(p) for p in params] if isinstance(params, list) else make(params)
    with monkeypatch.context() as patch:
        patch.setattr("kimi_jax.runtime.llm.Run", None)
        with pytest.raises(ValueError, match=message):
            generate(llm, prompts, params)
    ids_of("still works", on())


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 1.0}, [None], ["greedy"]])
def test_params_of_another_type_are_refused(llm, params):
    with pytest.raises(TypeError, match="SamplingParams"):
        generate(llm, ["a"], params)


def test_a_stream_is_checked_when_it_is_asked_for(llm):
    with pytest.raises(ValueError, match="token id 512"):
        llm.stream([512])
    with pytest.raises(ValueError, match="token id 512"):
        llm.score([[512]])
    with pytest.raises(ValueError, match="token_ids has 321 tokens"):
        llm.logits([1] * 321)


# Memory.


def test_many_short_requests_leave_nothing_behind(llm, on):
    llm.generate("a", on(1))
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(40):
        llm.generate("a", on(1))
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_a_block_of_cycles_never_leaves_the_device(llm, ids, on):
    """One program with the loop inside, no host in it, and the state donated to it."""
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(100))
    state = engine.prefill(engine.new_state([request]), 4)
    call = (engine._weights, state, np.int32(64), np.zeros((1,), np.bool_))
    program = engine._decode.lower(*call, proposal=None).as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program
    _, block = engine.decode(state, 64, np.zeros((1,), np.bool_))
    assert block.counts.tolist() == [64]
    assert state.cache.layers[0].is_deleted() and state.tokens.is_deleted()


def test_the_model_has_the_weights_the_engine_runs(llm):
    assert llm.model.cfg == llm.cfg
    assert llm.model.norm[...] is llm.model.norm[...]
