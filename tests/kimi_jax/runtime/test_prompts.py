"""A prompts file: what its rows may say, what is refused, and replies that resume."""

import dataclasses
import json

import pytest
from make_random_checkpoint import make_random_checkpoint

from kimi_jax.config import ModelConfig
from kimi_jax.runtime.prompts import ReplyFile, own_seed, read_prompts
from kimi_jax.runtime.replies import ChatCollector, Result, TextCollector, Timings, Usage
from kimi_jax.runtime.requests import INSTANT_SAMPLING, THINKING_SAMPLING, RequestMaker

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> RequestMaker:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(folder, "tiny", num_hidden_layers=2, max_position_embeddings=128)
    return RequestMaker.from_folder(folder, ModelConfig.from_folder(folder))


@pytest.fixture
def read(requests, tmp_path):
    """The rows of a file with these lines."""

    def read(*lines, options=None, **more):
        path = tmp_path / "in.jsonl"
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        return read_prompts(path, requests, options or {}, **{"seed": 0} | more)

    return read


def test_rows_have_the_defaults_of_their_kind_and_options_of_their_own(read):
    text, chat, instant = read(
        {"id": "a", "prompt": "x", "max_new_tokens": 3, "logit_bias": {"5": 1.5}},
        {"id": "b", "messages": HELLO},
        {"id": "c", "messages": HELLO, "thinking": False, "temperature": 0.3, "seed": 7},
        options={"stop": ("z",)},
    )
    assert text.params.temperature == 0 and text.params.max_new_tokens == 3
    assert text.params.logit_bias == {5: 1.5}
    assert chat.params.temperature == THINKING_SAMPLING.temperature
    assert (instant.params.temperature, instant.params.top_p) == (0.3, INSTANT_SAMPLING.top_p)
    assert {row.params.stop for row in (text, chat, instant)} == {("z",)}
    assert instant.params.seed == 7


def test_a_seed_follows_from_the_rows_id_alone(read):
    first, second = read({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    (alone,) = read({"id": "b", "prompt": "other", "seed": None})
    assert alone.params.seed == second.params.seed == own_seed(0, "b") != first.params.seed
    assert read({"id": "b", "prompt": "x"}, seed=1)[0].params.seed == own_seed(1, "b")


def test_replies_are_of_the_rows_kind(read, requests):
    text, chat = read({"id": "a", "prompt": "x"}, "", {"id": "b", "messages": HELLO})
    assert isinstance(text.reply(requests), TextCollector)
    reply = chat.reply(requests)
    assert isinstance(reply, ChatCollector)
    assert reply.request == requests.chat_request(HELLO, chat.params)


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not a JSON object"),
        ({"prompt": "x"}, "line 1: id is None, expected text"),
        ({"id": 3, "prompt": "x"}, "line 1: id is 3, expected text"),
        ({"id": "a"}, "expected either prompt or messages"),
        ({"id": "a", "prompt": "x", "messages": HELLO}, "expected either prompt or messages"),
        ({"id": "a", "prompt": 5}, "prompt is 5, expected text"),
        ({"id": "a", "prompt": "x", "max_tokens": 5}, "max_tokens: unknown; expected id, prompt"),
        ({"id": "a", "prompt": "x", "tools": []}, "only with messages: tools"),
        ({"id": "a", "messages": HELLO, "thinking": 1}, "thinking is 1, expected true or false"),
        ({"id": "a", "messages": []}, "messages is empty"),
        ({"id": "a", "messages": HELLO, "tools": [1]}, r"tools\[0\] is no tool declaration"),
        ({"id": "a", "prompt": "x", "top_p": 2}, "top_p is 2, expected a number over 0"),
        ({"id": "a", "prompt": "x", "top_p": 0.5}, "only with a temperature over 0.*top_p"),
        ({"id": "a", "prompt": "x", "logit_bias": {"b": 1}}, "logit_bias has the key 'b'"),
        ({"id": "a", "prompt": "x", "stop_token_ids": [512]}, r"stop_token_ids has .*\[512\]"),
        ({"id": "a", "prompt": "x" * 128}, "prompt has 128 tokens and leaves no room"),
        (
            {"id": "a", "messages": HELLO, "skip_special_tokens": False},
            "skip_special_tokens=False has no meaning in chat",
        ),
    ],
)
def test_rows_that_cannot_run_are_named(read, row, message):
    with pytest.raises(ValueError, match=message):
        read(row)


def test_all_lines_are_looked_at(read):
    good = {"id": "a", "prompt": "x"}
    with pytest.raises(ValueError) as error:
        read(good, {"id": "b"}, good, *[{"id": str(n)} for n in range(6)])
    assert "line 2: expected either" in str(error.value)
    assert "line 3: the id 'a' is used before" in str(error.value)
    assert str(error.value).endswith("; and 3 more")
    with pytest.raises(ValueError, match="no row; expected lines such as"):
        read("", "")


# Replies.


def result(text: str = "t") -> Result:
    return Result(
        text=text,
        token_ids=(1, 2),
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, new_tokens=2),
        timings=Timings(
            prefill_seconds=0.0, decode_seconds=0.0, tokens_per_second=0.0, cycles=2, compiles=0
        ),
    )


@pytest.fixture
def rows(read):
    return read(*({"id": id, "prompt": id} for id in "abc"))


def test_a_file_goes_on_where_it_was_cut(rows, tmp_path):
    path = tmp_path / "out.jsonl"
    whole = ReplyFile(path, rows, {"model": "m"})
    for row in rows:
        whole.write(row, result(row.id))
    whole.close()
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    for cut in (*range(0, len(text), 17), len(lines[0]), len(text)):
        path.write_bytes(text[:cut])
        replies = ReplyFile(path, rows, {"model": "m"})
        num_whole = text[:cut].count(b"\n")
        assert replies.num_resumed == num_whole
        assert path.read_bytes() == b"".join(lines[:num_whole])
        for row in rows:
            if row not in replies:
                replies.write(row, result(row.id))
        replies.close()
        assert path.read_bytes() == text
    reply = json.loads(lines[0])
    assert (reply["id"], reply["text"], reply["token_ids"]) == ("a", "a", [1, 2])
    assert reply["usage"] == {"prompt_tokens": 1, "new_tokens": 2}
    assert reply["speculation"] is None and "logprobs" not in reply


def test_what_belongs_to_something_else_is_refused(rows, read, tmp_path):
    path = tmp_path / "out.jsonl"
    replies = ReplyFile(path, rows, {"model": "m", "dtype": None})
    replies.write(rows[0], result())
    with pytest.raises(ValueError, match="the id 'a' is in it already"):
        replies.write(rows[0], result())
    replies.close()
    before = path.read_bytes()
    changed = read({"id": "a", "prompt": "another"}, {"id": "b", "prompt": "b"})
    warmer = [dataclasses.replace(r, params=THINKING_SAMPLING) for r in rows]
    for wanted, made_with, message in (
        (changed, {"model": "m", "dtype": None}, "line 1: 'a' was answered with another prompt;"),
        (warmer, {"model": "m", "dtype": None}, "'a' was answered with another sampling;"),
        (rows, {"model": "n", "dtype": "x"}, "another model and another dtype; take another file"),
        (rows[1:], {"model": "m", "dtype": None}, "'a' is not among the prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            ReplyFile(path, wanted, made_with)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text, message",
    [
        ("notes of mine", "not a file of JSON objects"),
        ("notes of mine\n", "line 1: not JSON"),
        ('{"id": "a"}\n', "no reply to a prompt: it lacks id or made_with"),
        ("[1]\n", "not a JSON object"),
    ],
)
def test_another_file_is_not_written_over(rows, tmp_path, text, message):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ReplyFile(path, rows, {})
    assert path.read_text() == text


def test_thinking_and_the_template_are_of_a_prompt_too(read, requests, tmp_path):
    row = {"id": "a", "messages": HELLO, "temperature": 1.0, "top_p": 1.0}
    path = tmp_path / "out.jsonl"
    rows = read(row)
    replies = ReplyFile(path, rows, {})
    replies.write(rows[0], result())
    replies.close()
    ReplyFile(path, read(row | {"thinking": True}), {}).close()
    with pytest.raises(ValueError, match="'a' was answered with another prompt;"):
        ReplyFile(path, read(row, thinking=False), {})


def test_two_processes_do_not_write_one_file(rows, tmp_path):
    path = tmp_path / "out.jsonl"
    first = ReplyFile(path, rows, {})
    first.write(rows[0], result())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="out.jsonl: another process is adding to it; wait for"):
        ReplyFile(path, rows, {})
    assert path.read_bytes() == before
    first.close()
    second = ReplyFile(path, rows, {})
    assert second.num_resumed == 1
    second.close()


def test_a_reply_twice_in_a_file_is_refused(rows, tmp_path):
    path = tmp_path / "out.jsonl"
    replies = ReplyFile(path, rows, {})
    replies.write(rows[0], result())
    replies.close()
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="line 2: the id 'a' is used before"):
        ReplyFile(path, rows, {})
