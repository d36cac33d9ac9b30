import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text.stream import Detokenizer, StopStrings, TextStream, starts_in_thinking
from kimi_jax.text.tokenizer import Tokenizer, TokenizerError


@st.composite
def chunked(draw, ids):
    """A list of ids and a way to cut it."""
    whole = draw(ids)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    return whole, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


any_ids = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0x20])))


def streamed(stream, chunks):
    """All text and the last delta of a stream fed with `chunks`."""
    deltas = [stream.feed(chunk) for chunk in chunks] + [stream.finish()]
    return "".join(delta.text for delta in deltas), deltas[-1]


@settings(deadline=None, max_examples=60)
@given(chunked(any_ids), st.booleans())
def test_joined_chunks_are_the_one_shot_decode(tokenizer, case, skip):
    """TOK-1 for any ids, control ids included, in any chunking."""
    ids, chunks = case
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    text = "".join(map(detokenizer.feed, chunks)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)
    if not skip:
        raw = b"".join(map(tokenizer.token_bytes, ids))
        assert text == raw.decode(errors="replace")


def test_no_half_characters_tok_1(tokenizer):
    """TOK-1: ids one at a time over characters of three and four tokens."""
    for text in ("a😀b", "𠮷", "你好"):
        detokenizer = Detokenizer(tokenizer)
        emitted = [detokenizer.feed([i]) for i in tokenizer.encode(text)]
        assert "".join(emitted) == text and "\ufffd" not in "".join(emitted)
        assert detokenizer.finish() == ""
    assert [Detokenizer(tokenizer).feed([b]) for b in "😀".encode()[:1]] == [""]


def test_dangling_tail_becomes_one_replacement_character_tok_1(tokenizer):
    """TOK-1: the reply ends inside a character."""
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed("x😀".encode()[:-1]) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_text_after_bad_bytes_is_intact_tok_1(tokenizer, ids_of):
    """TOK-1: a lone lead byte before a token that starts with a space."""
    (the,) = ids_of(" the")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed([0xE4]) == ""
    assert detokenizer.feed([the]) == "\ufffd the"


def test_incremental_decoder_agrees_with_python():
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    raw = b"\xf0\x9f\xf0\x9f\x98\x80\xe4 a\xc3"
    parts = [decoder.decode(raw[i : i + 1]) for i in range(len(raw))]
    assert "".join(parts) + decoder.decode(b"", True) == raw.decode(errors="replace")


def stop_by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """A character at a time: the first place where a stop ends, the longest one there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None, max_examples=120)
@given(
    chunked(st.text(alphabet="ab,c", max_size=20)),
    st.lists(st.text(alphabet="ab,c", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_equal_their_definition_in_any_chunking(case, stops):
    """STP-4."""
    text, chunks = case
    matcher = StopStrings(stops)
    emitted, matched = "", None
    for chunk in chunks:
        new, matched = matcher.feed(chunk)
        emitted += new
    assert (emitted + matcher.flush(), matched) == stop_by_definition(text, stops)


def test_stop_over_several_chunks_and_near_miss_stp_4():
    matcher = StopStrings(["b,c"])
    assert [matcher.feed(chunk) for chunk in ("a", "b", ",", "c", "zz")] == [
        ("a", None),
        ("", None),
        ("", None),
        ("", "b,c"),
        ("", "b,c"),
    ]
    matcher = StopStrings(["b,c"])
    assert [matcher.feed(chunk)[0] for chunk in ("a", "b", ",", "d")] == ["a", "", "", "b,d"]
    matcher = StopStrings(["b,c"])
    assert matcher.feed("ab,") == ("a", None)
    assert matcher.flush() == "b,"


def test_which_stop_wins_stp_4():
    assert StopStrings(["abc", "ab"]).feed("xabc") == ("x", "ab")
    assert StopStrings(["bcd", "c"]).feed("abcd") == ("ab", "c")
    assert StopStrings([",c", "b,c"]).feed("ab,c") == ("a", "b,c")
    assert StopStrings("end").feed("the end") == ("the ", "end")


def test_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="expected text of at least one character"):
        StopStrings(["a", ""])


@settings(deadline=None, max_examples=60)
@given(
    chunked(any_ids),
    st.sampled_from([(), ("a",), ("ab", "😀"), ("the", " t")]),
    st.sampled_from([None, False, True]),
    st.booleans(),
    st.booleans(),
)
def test_text_stream_is_the_same_in_any_chunking(tokenizer, case, stop, thinking, inside, skip):
    """STP-4: streamed equals not streamed, and so does the count of ids."""
    ids, chunks = case

    def stream():
        return TextStream(tokenizer, stop, thinking, inside, skip_special=skip)

    whole = streamed(stream(), [ids])
    assert streamed(stream(), chunks) == whole
    assert streamed(stream(), [[i] for i in ids]) == whole
    if not stop:
        assert whole[0] == tokenizer.decode(ids, skip_special=skip)


def test_text_stream_counts_ids_to_the_one_that_completes_the_stop(tokenizer, ids_of):
    ids = ids_of("x", "😀", "the", "zz")
    stream = TextStream(tokenizer, ["h"])
    assert stream.feed(ids[:2]).text == "x"
    delta = stream.feed(ids[2:])
    assert (delta.text, delta.stop, delta.num_ids) == ("😀t", "h", 6)
    assert stream.feed(ids_of("more")).text == ""
    assert stream.finish().num_ids == 6


def test_stop_inside_characters_of_several_tokens_stp_4(tokenizer, ids_of):
    ids = ids_of("ab好😀c")
    text, last = streamed(TextStream(tokenizer, ["好😀"]), [[i] for i in ids])
    assert (text, last.stop, last.num_ids) == ("ab", "好😀", len(ids) - 1)


@pytest.mark.parametrize(("stop_in_thinking", "text"), [(False, "a stop bA "), (True, "a ")])
def test_stops_in_thinking_w_3(tokenizer, ids_of, stop_in_thinking, text):
    """W-3: a stop word inside the reasoning fires only if asked to."""
    ids = ids_of("a stop b", "</think>", "A stop B")
    stream = TextStream(tokenizer, ["stop"], True, stop_in_thinking)
    got, last = streamed(stream, [ids])
    expected = next(
        n for n in range(len(ids)) if tokenizer.decode(ids[:n], skip_special=True) == text + "stop"
    )
    assert (got, last.stop, last.num_ids) == (text, "stop", expected)


def test_stop_does_not_reach_from_reasoning_into_content_w_3(tokenizer, ids_of):
    ids = ids_of("a st", "</think>", "op b")
    text, last = streamed(TextStream(tokenizer, ["stop"], True, True), [ids])
    assert (text, last.stop) == ("a stop b", None)


def test_stop_never_cuts_a_tool_call(tokenizer, ids_of):
    call = ("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", '{"a":1}')
    ids = ids_of("x", *call, "<|tool_call_end|>", "}y")
    text, last = streamed(TextStream(tokenizer, ["}"], False), [ids])
    assert (text, last.stop, last.num_ids) == ('xfunctions.f:0{"a":1}', "}", len(ids) - 1)


def test_plain_text_stops_everywhere(tokenizer, ids_of):
    text, last = streamed(TextStream(tokenizer, ["stop"]), [ids_of("<think>", "a stop b")])
    assert (text, last.stop) == ("a ", "stop")


def test_special_tokens_are_text_only_on_request(tokenizer, ids_of):
    ids = ids_of("a", "</think>", "b", "<|im_end|>")
    assert streamed(TextStream(tokenizer), [ids])[0] == "ab"
    assert streamed(TextStream(tokenizer, skip_special=False), [ids])[0] == "a</think>b<|im_end|>"


def test_starts_in_thinking_reads_the_prompt(tokenizer, template):
    messages = [{"role": "user", "content": "<think>"}]
    assert starts_in_thinking(tokenizer, template.render(messages))
    assert not starts_in_thinking(tokenizer, template.render(messages, thinking=False))
    assert not starts_in_thinking(tokenizer, template.render(messages, add_generation_prompt=False))
    assert not starts_in_thinking(tokenizer, [])


def test_thinking_needs_its_token(ranks):
    plain = Tokenizer(ranks, {"added_tokens_decoder": {}})
    with pytest.raises(TokenizerError, match="no control token '</think>'"):
        TextStream(plain, starts_in_thinking=True)
    assert TextStream(plain).feed([104, 105]).text == "hi"
