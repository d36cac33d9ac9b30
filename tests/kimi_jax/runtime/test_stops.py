"""What ends a reply, and how it streams.

Where only printable tokens can come, a character is a token: positions in the text are positions
in the ids.
"""

import itertools
import json
import shutil

import pytest

from kimi_jax.runtime.llm import LLM

pytestmark = pytest.mark.usefixtures("quick_compiles")

NEW = 100


@pytest.fixture
def free(llm, ids, on, printable):
    """A reply of 100 printable tokens, each a character."""
    [result] = llm.generate([ids(9, 2)], on(NEW, logit_bias=printable, temperature=1.0, seed=1))
    assert len(result.text) == NEW
    return result


@pytest.fixture
def run(llm, ids, on, printable):
    """The same request with stops: whole, and streamed to the same result."""

    def run(prompt=None, **options):
        fixed = {"logit_bias": printable, "temperature": 1.0, "seed": 1}
        prompt = ids(9, 2) if prompt is None else prompt
        params = on(NEW, **(fixed | options))
        [whole] = llm.generate([prompt], params)
        pieces = list(llm.stream(prompt, params))
        *_, last = pieces
        for name in ("text", "token_ids", "finish_reason", "usage", "logprobs"):
            assert getattr(last.result, name) == getattr(whole, name)
        assert [p.result for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert all(p.text for p in pieces[:-1])
        assert "".join(p.text for p in pieces) == whole.text
        assert sum((p.token_ids for p in pieces), ()) == whole.token_ids
        return whole

    return run


# Stop strings.


@pytest.mark.parametrize("start", [0, 1, 5, 30, 61, 63, 64, 97])
@pytest.mark.parametrize("length", [1, 3, 10])
def test_a_stop_string_over_several_tokens(run, free, start, length):
    """Also over the end of a block of 64, and as the last tokens before the limit."""
    stop = free.text[start : start + length]
    at = free.text.index(stop)
    result = run(stop=stop, logprobs=1)
    assert (result.text, result.finish_reason) == (free.text[:at], "stop")
    assert result.token_ids == free.token_ids[: at + len(stop)]
    assert result.usage.new_tokens == len(result.logprobs) == at + len(stop)


def test_a_near_miss_is_given_out_whole(run, free):
    near = (free.text[10:14] + "~~", free.text[-2:] + "~")
    result = run(stop=tuple(s for s in near if s not in free.text))
    assert (result.text, result.finish_reason) == (free.text, "length")


def test_the_first_stop_string_completed_wins(run, free):
    stops = (free.text[20:26], free.text[20:22], free.text[40:43])
    result = run(stop=stops)
    assert result.text == free.text[: min(free.text.index(s) for s in stops)]


def test_a_stop_string_of_one_row_ends_that_row(llm, ids, on, printable):
    prompts = [ids(n, n) for n in (4, 9, 30)]
    base = {"logit_bias": printable, "temperature": 1.0, "seed": 1}
    free = llm.generate(prompts, on(NEW, **base))
    stops = [free[0].text[3:6], (), free[2].text[80:84]]
    results = llm.generate(prompts, [on(NEW, stop=s, **base) for s in stops])
    for stop, result, whole in zip(stops, results, free, strict=True):
        text = whole.text.partition(stop)[0] if stop else whole.text
        assert result.text == text
        assert result.finish_reason == ("stop" if stop else "length")


def test_stop_strings_in_the_reasoning_count_only_if_asked_for(llm, run, ids):
    think = llm.tokenizer.special_id("<think>")
    prompt = [*ids(5), think]
    free = run(prompt)
    stop = free.text[10:12]
    assert run(prompt, stop=stop).text == free.text
    at = free.text.index(stop)
    assert run(prompt, stop=stop, stop_in_thinking=True).text == free.text[:at]


# Stop ids.


@pytest.mark.parametrize("name", ["[EOS]", "<|im_end|>"])
def test_every_end_the_checkpoint_names_ends_a_reply(llm, run, printable, name):
    """[EOS] is in config.json, <|im_end|> in generation_config.json."""
    end = llm.tokenizer.special_id(name)
    certain = {"temperature": 0.0, "logit_bias": {end: 100.0}}
    result = run(ignore_eos=False, **certain)
    assert (result.token_ids, result.finish_reason, result.text) == ((end,), "stop", "")
    result = run(ignore_eos=True, **certain)
    assert (result.token_ids, result.finish_reason) == ((end,) * NEW, "length")
    result = run(ignore_eos=True, stop_token_ids=(end,), **certain)
    assert (result.token_ids, result.finish_reason) == ((end,), "stop")


def test_the_ends_are_the_union_of_all_three_files(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "generation_config.json"
    hello = [{"role": "user", "content": "hello"}]

    def stop_ids(generation):
        path.write_text(generation if isinstance(generation, str) else json.dumps(generation))
        return LLM(copy, max_length=256, progress=False).chat_request(hello).stop_ids

    assert stop_ids({"eos_token_id": [40, 41]}) == (40, 41, 257, 258)
    assert stop_ids({"eos_token_id": 7}) == (7, 257, 258)
    assert stop_ids({}) == (257, 258)
    with pytest.raises(ValueError, match=r"generation_config.json: not a JSON object"):
        stop_ids("[1]")
    with pytest.raises(ValueError, match=r"end-of-text ids \[512\] lie outside"):
        stop_ids({"eos_token_id": 512})
    path.unlink()
    assert LLM(copy, max_length=256).chat_request(hello).stop_ids == (257, 258)


def test_stop_token_ids_end_a_reply_and_stay_out_of_its_text(run, free):
    end = free.token_ids[50]
    at = free.token_ids.index(end)
    result = run(stop_token_ids=(end,))
    assert result.token_ids == free.token_ids[: at + 1]
    assert (result.text, result.finish_reason) == (free.text[:at], "stop")


def test_a_stop_id_before_a_stop_string_wins_and_the_other_way_round(run, free):
    stop = free.text[30:33]
    at = free.text.index(stop)
    before = free.token_ids[at - 1]
    first = free.token_ids.index(before)
    assert run(stop=stop, stop_token_ids=(before,)).text == free.text[:first]
    within = free.token_ids[at + 1]
    first = free.token_ids.index(within)
    assert run(stop=stop, stop_token_ids=(within,)).text == free.text[:first]


def test_control_tokens_are_text_only_if_asked_for(llm, run):
    user = llm.tokenizer.special_id("<|im_user|>")
    certain = {"temperature": 0.0, "logit_bias": {user: 100.0}}
    assert run(**certain).text == ""
    assert run(skip_special_tokens=False, **certain).text == "<|im_user|>" * NEW


def test_text_ends_inside_a_character(llm, ids, on):
    """A lead byte at the limit becomes one replacement character, once."""
    lead = llm.tokenizer.encode("é")[0]
    params = on(3, logit_bias={lead: 100.0})
    [whole] = llm.generate([ids(3)], params)
    pieces = list(llm.stream(ids(3), params))
    assert whole.text == "".join(p.text for p in pieces) == "\ufffd" * 3


# Streams.


def test_a_stream_flows(llm, ids, on, printable):
    pieces = list(llm.stream(ids(9), on(NEW, logit_bias=printable)))
    assert len(pieces) > 2 and len(pieces[0].text) == 1


def test_an_abandoned_stream_leaves_the_model_usable(llm, ids, on, free, run):
    for _ in range(3):
        stream = llm.stream(ids(9), on(NEW))
        next(stream)
        stream.close()
    unread = llm.stream(ids(9), on(NEW))
    assert run().text == free.text
    assert [p.result for p in unread][-1].usage.new_tokens == NEW


def test_an_exception_in_the_consumer_leaves_the_model_usable(llm, ids, on, free, run):
    with pytest.raises(KeyError):
        for _ in llm.stream(ids(9), on(NEW)):
            raise KeyError("the consumer's own")
    assert run().text == free.text


def test_streams_interleave(llm, ids, on, printable):
    prompts = [ids(4, 1), ids(9, 2), ids(40, 3)]
    params = [on(n, logit_bias=printable) for n in (20, 100, 64)]
    whole = [r.text for r in map(lambda a, b: llm.generate([a], b)[0], prompts, params)]
    texts = ["", "", ""]
    streams = [llm.stream(p, own) for p, own in zip(prompts, params, strict=True)]
    for pieces in itertools.zip_longest(*streams):
        texts = [t + (p.text if p else "") for t, p in zip(texts, pieces, strict=True)]
    assert texts == whole
