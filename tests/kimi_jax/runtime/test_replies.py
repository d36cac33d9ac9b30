"""Collectors alone: channels of a chat reply, calls, and ends, for every cutting into blocks."""

import pytest
from make_random_checkpoint import write_tokenizer

from kimi_jax.runtime.decode import Finish
from kimi_jax.runtime.engine import Request
from kimi_jax.runtime.replies import ChatCollector, Collector, TextCollector
from kimi_jax.runtime.run import RowUpdate
from kimi_jax.runtime.sampling import SamplingParams
from kimi_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 256)
    return Tokenizer.from_folder(folder)


def ids_of(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Ids of parts; a part that is a control token's name is that token."""
    special = tokenizer.special_tokens
    return [i for p in parts for i in ([special[p]] if p in special else tokenizer.encode(p))]


def feed(collector: Collector, ids: list[int], size: int, finish: Finish) -> list:
    blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
    pieces = []
    for at, block in enumerate(blocks):
        is_last = at + 1 == len(blocks)
        update = RowUpdate(
            index=0,
            token_ids=tuple(block),
            finish=finish if is_last else Finish.RUNNING,
            cycles=at + 1,
        )
        pieces.append(collector.feed(update))
    return pieces


def request(tokenizer: Tokenizer, thinking: bool = True, **options) -> Request:
    prompt = ids_of(tokenizer, "<|im_assistant|>", "assistant", "<|im_middle|>", "<think>")
    prompt += [] if thinking else ids_of(tokenizer, "</think>")
    return Request(tuple(prompt), SamplingParams(**options), ())


CALL = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.f:0",
    "<|tool_call_argument_begin|>",
    '{"a": 1}',
)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_channels_of_a_reply_with_a_call(tokenizer, size):
    """TPL-3: call arguments are no part of the text, streamed or whole."""
    collector = ChatCollector(tokenizer, request(tokenizer))
    ids = ids_of(tokenizer, "hm", "</think>", "Let me look.", *CALL)
    ids += ids_of(tokenizer, "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>")
    pieces = feed(collector, ids, size, Finish.STOP)
    result = collector.result()
    assert (result.reasoning, result.text) == ("hm", "Let me look.")
    assert "".join(p.reasoning for p in pieces) == "hm"
    assert "".join(p.text for p in pieces) == "Let me look."
    assert [i for p in pieces for i in p.token_ids] == ids == list(result.token_ids)
    assert [(c.name, c.arguments) for c in result.tool_calls] == [("f", '{"a": 1}')]
    assert result.malformed_calls == () and result.finish_reason == "stop"


def test_a_call_cut_off_is_reported(tokenizer):
    collector = ChatCollector(tokenizer, request(tokenizer, thinking=False))
    feed(collector, ids_of(tokenizer, *CALL), 3, Finish.LENGTH)
    result = collector.result()
    assert result.tool_calls == () and result.finish_reason == "length"
    assert [c.arguments for c in result.malformed_calls] == ['{"a": 1}']


def test_nothing_is_taken_after_a_stop_string(tokenizer):
    for kind in (TextCollector, ChatCollector):
        collector = kind(tokenizer, request(tokenizer, thinking=False, stop="b"))
        feed(collector, ids_of(tokenizer, "aab", "cc"), 1000, Finish.RUNNING)
        assert collector.finish == Finish.STOP
        feed(collector, ids_of(tokenizer, "more"), 1, Finish.STOP)
        result = collector.result()
        assert result.text == "aa" and result.finish_reason == "stop"
        assert tokenizer.decode(result.token_ids) == "aab"


def test_a_stop_string_that_only_the_end_completes(tokenizer):
    """A dangling byte becomes a replacement character when the text ends, and may be the stop."""
    collector = TextCollector(tokenizer, request(tokenizer, thinking=False, stop="\ufffd"))
    dangling = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xe4")
    feed(collector, [*tokenizer.encode("a"), dangling], 1, Finish.LENGTH)
    result = collector.result()
    assert result.text == "a" and result.finish_reason == "stop"
