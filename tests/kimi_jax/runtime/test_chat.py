"""Conversations through `LLM`: the template's prompt, the parsed reply, the streamed reply."""

import pytest

from kimi_jax.runtime.requests import INSTANT_SAMPLING, THINKING_SAMPLING
from kimi_jax.text.messages import ChatError

pytestmark = pytest.mark.usefixtures("quick_compiles", "no_compiles")

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def params(llm, on, printable):
    """Printable text, with a </think> about every tenth token."""
    end = llm.tokenizer.special_id("</think>")

    def params(seed, new=60, chance=2.5, **options):
        bias = printable | {end: chance}
        return on(new, logit_bias=bias, temperature=1.0, seed=seed, **options)

    return params


@pytest.fixture(scope="module")
def split_seed(llm, params):
    """A seed whose reply closes the reasoning exactly once, somewhere inside."""
    end = llm.tokenizer.special_id("</think>")
    for seed in range(50):
        ids = llm.chat(HELLO, params(seed)).token_ids
        if ids.count(end) == 1 and 3 < ids.index(end) < 50:
            return seed
    raise AssertionError("no seed closes the reasoning once")


def test_reasoning_and_content_are_split_at_the_marker(llm, params, split_seed):
    result = llm.chat(HELLO, params(split_seed))
    at = result.token_ids.index(llm.tokenizer.special_id("</think>"))
    assert result.reasoning == llm.tokenizer.decode(result.token_ids[:at])
    assert result.text == llm.tokenizer.decode(result.token_ids[at + 1 :])
    assert result.reasoning and result.text and "think>" not in result.reasoning + result.text


def test_a_reply_cut_inside_the_reasoning_has_no_content(llm, params, split_seed):
    result = llm.chat(HELLO, params(split_seed, new=3))
    assert (result.text, result.finish_reason) == ("", "length")
    assert len(result.reasoning) == 3


def test_without_thinking_all_is_content(llm, params):
    result = llm.chat(HELLO, params(0, chance=-100.0), thinking=False)
    assert (result.reasoning, len(result.text)) == ("", 60)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_streamed_reply_is_the_reply(llm, params, split_seed, thinking):
    whole = llm.chat(HELLO, params(split_seed), thinking=thinking)
    pieces = list(llm.chat_stream(HELLO, params(split_seed), thinking=thinking))
    last = pieces[-1].result
    for name in ("text", "reasoning", "token_ids", "finish_reason", "usage", "tool_calls"):
        assert getattr(last, name) == getattr(whole, name)
    assert "".join(p.text for p in pieces) == whole.text
    assert "".join(p.reasoning for p in pieces) == whole.reasoning
    assert sum((p.token_ids for p in pieces), ()) == whole.token_ids
    assert len(pieces) > 2


@pytest.mark.parametrize("in_thinking", [False, True])
def test_stop_strings_in_chat(llm, params, split_seed, in_thinking):
    free = llm.chat(HELLO, params(split_seed))
    stop = free.reasoning[1:3]
    result = llm.chat(HELLO, params(split_seed, stop=stop, stop_in_thinking=in_thinking))
    if in_thinking:
        assert (result.reasoning, result.text) == (free.reasoning.partition(stop)[0], "")
    else:
        assert (result.reasoning, result.text) == (free.reasoning, free.text.partition(stop)[0])
    stop = free.text[-4:]
    result = llm.chat(HELLO, params(split_seed, stop=stop))
    streamed = list(llm.chat_stream(HELLO, params(split_seed, stop=stop)))[-1].result
    assert result.text == streamed.text == free.text.partition(stop)[0]
    assert result.token_ids == streamed.token_ids
    assert result.finish_reason == "stop"


def test_the_prompt_is_the_templates(llm):
    plain = llm.tokenizer.decode(llm.chat_request(HELLO).prompt)
    assert plain.endswith("<|im_middle|><think>")
    instant = llm.tokenizer.decode(llm.chat_request(HELLO, thinking=False).prompt)
    assert instant.startswith(plain) and instant.endswith("</think>")
    with_tool = llm.tokenizer.decode(llm.chat_request(HELLO, tools=[TOOL]).prompt)
    assert "weather" in with_tool and "weather" not in plain


def test_defaults_are_the_published_sampling(llm):
    assert llm.chat_request(HELLO).params == THINKING_SAMPLING
    assert llm.chat_request(HELLO, thinking=False).params == INSTANT_SAMPLING
    assert (THINKING_SAMPLING.temperature, INSTANT_SAMPLING.temperature) == (1.0, 0.6)


def test_a_cut_tool_section_is_no_text(llm, on):
    names = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    bias = {llm.tokenizer.special_id(name): 100.0 for name in names}
    result = llm.chat(HELLO, on(4, logit_bias=bias), thinking=False)
    assert (result.text, result.reasoning, result.tool_calls) == ("", "", ())


@pytest.mark.parametrize(
    "messages, options, error, message",
    [
        (HELLO, {"thinkin": False}, TypeError, "thinkin"),
        (HELLO, {"add_generation_prompt": False}, TypeError, "add_generation_prompt"),
        ([], {}, ChatError, "messages"),
        ([{"role": "someone", "content": "Hi"}], {}, ChatError, "someone"),
        (HELLO, {"tools": [{"type": "function"}]}, ChatError, "tool"),
        ([{"role": "user", "content": "x" * 400}], {}, ValueError, "max_length is 320"),
    ],
)
def test_what_cannot_be_rendered_is_refused(llm, messages, options, error, message):
    for method in (llm.chat, llm.chat_stream):
        with pytest.raises(error, match=message):
            method(messages, **options)
