from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text.reply import (
    ArgumentsDelta,
    CallFinished,
    CallMalformed,
    CallStarted,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    Reply,
    ReplyParser,
    ToolCall,
)

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
LONG_TOKEN, NUM_LONG = "0123456789abcdef" * 4, 640
LONG = '{"text": "漢字 😀 ' + LONG_TOKEN * NUM_LONG + ' 😀"}'


def parse(tokenizer, chunks, thinking=True, **kwargs):
    """The reply and its events, for ids in chunks."""
    parser = ReplyParser(tokenizer, thinking, **kwargs)
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()
    return parser.finish(), events


def replayed(events) -> Reply:
    """The reply a streaming caller puts together from events."""

    def joined(kind):
        return "".join(event.text for event in events if isinstance(event, kind))

    calls = [event.call for event in events if isinstance(event, CallFinished)]
    malformed = [event.call for event in events if isinstance(event, CallMalformed)]
    started = {e.index: (e.id, e.name) for e in events if isinstance(e, CallStarted)}
    for event in events:
        if isinstance(event, CallFinished):
            parts = [
                e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == event.index
            ]
            assert started[event.index] == (event.call.id, event.call.name)
            assert "".join(parts) == event.call.arguments
    return Reply(
        reasoning=joined(ReasoningDelta),
        content=joined(ContentDelta),
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )


def test_reasoning_and_content_are_split_at_close_think_tpl_2(tokenizer, ids_of):
    """TPL-2."""
    ids = ids_of("why", "</think>", "answer", "<|im_end|>")
    assert parse(tokenizer, [ids])[0] == Reply(reasoning="why", content="answer")


def test_thinking_off_is_all_content_tpl_2(tokenizer, ids_of):
    """TPL-2."""
    reply, events = parse(tokenizer, [ids_of("answer", "<|im_end|>", "[EOS]")], thinking=False)
    assert reply == Reply(content="answer")
    assert events == [ContentDelta("answer")]


def test_cut_inside_thinking_has_no_content_tpl_2(tokenizer, ids_of):
    """TPL-2: max_tokens ends the reply in the reasoning, even inside a character."""
    ids = ids_of("why 😀")[:-1]
    assert parse(tokenizer, [ids])[0] == Reply(reasoning="why \ufffd")
    assert parse(tokenizer, [])[0] == Reply()


def test_text_that_looks_like_a_marker_is_text(tokenizer):
    ids = tokenizer.encode("</think>" + BEGIN)
    assert parse(tokenizer, [ids])[0] == Reply(reasoning="</think>" + BEGIN)


def test_model_may_begin_thinking_by_itself(tokenizer, ids_of):
    ids = ids_of("<think>", "r", "</think>", "c")
    for thinking in (True, False):
        assert parse(tokenizer, [ids], thinking)[0] == Reply(reasoning="r", content="c")


@pytest.fixture(scope="module")
def two_calls(tokenizer):
    """TPL-3's reply, as ids and as it should be read."""

    def special(name):
        return [tokenizer.special_id(name)]

    text = tokenizer.encode
    long_token_id = 256
    assert tokenizer.token_bytes(long_token_id) == LONG_TOKEN.encode()
    ids = text("why 你") + special("</think>") + text("I look. ") + special(BEGIN)
    ids += special(CALL) + text("functions.read_file:0\n") + special(ARGS)
    before, after = LONG.split(LONG_TOKEN * NUM_LONG)
    ids += text(before) + [long_token_id] * NUM_LONG + text(after)
    ids += special(CALL_END) + special(CALL) + text("functions.g:1") + special(ARGS)
    ids += (
        text('{"a": 1}') + special(CALL_END) + special(END) + text("after") + special("<|im_end|>")
    )
    reply = Reply(
        reasoning="why 你",
        content="I look. after",
        tool_calls=(
            ToolCall("functions.read_file:0", "read_file", LONG),
            ToolCall("functions.g:1", "g", '{"a": 1}'),
        ),
    )
    return ids, reply


def test_calls_in_any_chunking_tpl_3(tokenizer, two_calls):
    """TPL-3: whole, one id at a time, a few fixed sizes."""
    ids, expected = two_calls
    assert len(LONG.encode()) > 40_000
    for size in (len(ids), 1, 2, 7, 1000):
        chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
        reply, events = parse(tokenizer, chunks)
        assert reply == expected
        assert replayed(events) == expected


@settings(deadline=None, max_examples=5)
@given(st.data())
def test_calls_in_random_chunks_tpl_3(tokenizer, two_calls, data):
    """TPL-3."""
    ids, expected = two_calls
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    reply, events = parse(tokenizer, chunks)
    assert reply == expected and replayed(events) == expected


MARKERS = [BEGIN, END, CALL, ARGS, CALL_END, "<think>", "</think>", "<|im_end|>"]
TEXTS = ["a", "é", " the", "functions.f:0", "{}", '{"a":"b"}', "stop", "st", "op"]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(MARKERS + TEXTS), max_size=14),
    st.lists(st.integers(0, 40), max_size=5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("stop",)]),
)
def test_any_ids_parse_the_same_in_any_chunking(tokenizer, ids_of, pieces, cuts, on, inside, stop):
    ids = ids_of(*pieces)
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    options = {"stop": stop, "stop_in_thinking": inside}
    whole, _ = parse(tokenizer, [ids], on, **options)
    reply, events = parse(tokenizer, chunks, on, **options)
    assert reply == whole
    assert replayed(events) == Reply(**{**vars(reply), "stop": None})
    # Nothing is lost: all text is in the reply, but the stop string and what follows it, spaces
    # around ids, and the `{}` that stands for no arguments.
    if not stop:
        calls = [*reply.tool_calls, *reply.malformed_calls]
        parts = [reply.reasoning, reply.content]
        parts += [call.id + call.arguments for call in calls]
        text = tokenizer.decode(ids, skip_special=True)
        assert not letters(text) - letters("".join(parts))
    for marker in MARKERS:
        assert marker not in reply.reasoning + reply.content


def letters(text: str) -> Counter[str]:
    return Counter(char for char in text if char.isalpha())


def test_tool_section_may_open_inside_the_reasoning(tokenizer, ids_of):
    ids = ids_of("why", BEGIN, CALL, "functions.f:0", ARGS, "{}", CALL_END, END, "<|im_end|>")
    call = ToolCall("functions.f:0", "f", "{}")
    reply, events = parse(tokenizer, [ids])
    assert reply == Reply(reasoning="why", tool_calls=(call,))
    assert events == [
        ReasoningDelta("why"),
        CallStarted(0, "functions.f:0", "f"),
        ArgumentsDelta(0, "{}"),
        CallFinished(0, call),
    ]


def test_call_without_a_section_is_a_call(tokenizer, ids_of):
    ids = ids_of("a", CALL, "functions.f:0", ARGS, "{}", CALL_END, "b")
    reply, _ = parse(tokenizer, [ids], thinking=False)
    assert reply == Reply(content="ab", tool_calls=(ToolCall("functions.f:0", "f", "{}"),))


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:12", "get_weather"),
        ("get_weather:0", "get_weather"),
        ("functions.get_weather", "get_weather"),
        (" functions.a.b:1 ", "a.b"),
        ("functions.a\nb:1", "a\nb"),
    ],
)
def test_names_of_ids(tokenizer, ids_of, call_id, name):
    ids = ids_of(BEGIN, CALL, call_id, ARGS, "{}", CALL_END, END)
    assert parse(tokenizer, [ids])[0].tool_calls == (ToolCall(call_id.strip(), name, "{}"),)


def test_call_without_arguments_has_an_empty_object(tokenizer, ids_of):
    reply, events = parse(tokenizer, [ids_of(CALL, "functions.f:0", ARGS, CALL_END)])
    assert reply.tool_calls == (ToolCall("functions.f:0", "f", "{}"),)
    assert replayed(events) == reply


@pytest.mark.parametrize(
    ("pieces", "call_id", "arguments", "reason"),
    [
        (
            (CALL, "functions.f:0", ARGS, '{"a'),
            "functions.f:0",
            '{"a',
            "reply ended inside the call",
        ),
        ((CALL, "functions.f:0"), "functions.f:0", "", "reply ended inside the call"),
        ((CALL, "functions.f:0", ARGS, "{}", END), "functions.f:0", "{}", "tool section ended"),
        ((CALL, "functions.f:0", ARGS, "{", CALL_END), "functions.f:0", "{", "not JSON"),
        ((CALL, "functions.f:0", ARGS, "[1]", CALL_END), "functions.f:0", "[1]", "but list"),
        ((CALL, "functions.f:0", CALL_END), "functions.f:0", "", "no arguments marker"),
        ((CALL, "call_ab", ARGS, "{}", CALL_END), "call_ab", "{}", "names no function"),
        ((CALL, "functions.:0", ARGS, "{}", CALL_END), "functions.:0", "{}", "names no function"),
        ((ARGS, "{}", CALL_END), "", "{}", "names no function"),
        (("lost",), "", "lost", "outside any call"),
        (
            (CALL, "functions.f:0", ARGS, "{", "</think>", "}", CALL_END),
            "functions.f:0",
            "{}",
            "control token (</think>) is inside",
        ),
        (
            (CALL, "functions.f:0", ARGS, "{}", ARGS, CALL_END),
            "functions.f:0",
            "{}",
            "control token (<|tool_call_argument_begin|>) is inside",
        ),
    ],
)
def test_malformed_calls_are_reported(tokenizer, ids_of, pieces, call_id, arguments, reason):
    reply, events = parse(tokenizer, [ids_of("r", "</think>", "c", BEGIN, *pieces)])
    (call,) = reply.malformed_calls
    assert (call.id, call.arguments) == (call_id, arguments)
    assert reason in call.reason
    assert (reply.reasoning, reply.content, reply.tool_calls) == ("r", "c", ())
    assert events[-1] == CallMalformed(0, call)


def test_calls_after_a_malformed_one_are_read(tokenizer, ids_of):
    good = (CALL, "functions.g:1", ARGS, "{}", CALL_END)
    reply, _ = parse(tokenizer, [ids_of(BEGIN, "x", CALL, "functions.f:0", ARGS, "{", *good, END)])
    assert reply.tool_calls == (ToolCall("functions.g:1", "g", "{}"),)
    assert reply.malformed_calls == (
        MalformedCall("", "x", "text in the tool section is outside any call"),
        MalformedCall("functions.f:0", "{", "the next call began before this one ended"),
    )


@pytest.mark.parametrize("inside", [False, True])
def test_stops_in_thinking_w_3(tokenizer, ids_of, inside):
    """W-3: events never hold a part of the stop string that ended the reply."""
    ids = ids_of("a stop b", "</think>", "A stop B")
    reply, events = parse(tokenizer, [[i] for i in ids], stop=["stop"], stop_in_thinking=inside)
    expected = Reply(reasoning="a ") if inside else Reply(reasoning="a stop b", content="A ")
    assert reply == Reply(**{**vars(expected), "stop": "stop"})
    assert replayed(events) == expected


def test_a_finished_parser_takes_no_more(tokenizer):
    parser = ReplyParser(tokenizer, False)
    parser.feed([104])
    assert parser.finish() == parser.finish() == Reply(content="h")
    with pytest.raises(RuntimeError, match="needs a new ReplyParser"):
        parser.feed([105])
