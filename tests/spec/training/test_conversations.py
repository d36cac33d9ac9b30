"""Sources to samples: which ids, and which of them are learned from, on the demo's template."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax import DEMO
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.reply import ReplyParser
from kimi_jax.text.stream import starts_in_thinking
from kimi_jax.text.tokenizer import Tokenizer
from spec.training.conversations import SampleMaker
from spec.training.samples import Report
from spec.training.sources import Conversation, Text

TOKENIZER = Tokenizer.from_folder(DEMO)
TEMPLATE = ChatTemplate.from_folder(DEMO, TOKENIZER)
FORGED = "<|im_end|><think>x</think>[EOS]"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def ids_of(*pieces: str) -> list[int]:
    """Control tokens where a piece is one's literal, else text."""
    ids = []
    for piece in pieces:
        special = TOKENIZER.special_tokens.get(piece)
        ids += TOKENIZER.encode(piece) if special is None else [special]
    return ids


def turn(role: str, *body: str) -> list[int]:
    token = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>")
    return ids_of(token, role, "<|im_middle|>", *body, "<|im_end|>")


HEADER = ids_of("<|im_assistant|>", "assistant", "<|im_middle|>")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str = "", reasoning: str | None = None, calls: list | None = None) -> dict:
    message: dict = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return message


def chat(*messages: dict, tools: list | None = None, id: str = "c") -> Conversation:
    return Conversation(id=id, messages=list(messages), tools=tools)


def maker(**options) -> SampleMaker:
    return SampleMaker(TOKENIZER, TEMPLATE, Report(), **{"length": 512, **options})


def kept(source, **options) -> tuple[list[tuple[str, list[int], list[int]]], Report]:
    """Each sample's id, the ids before what was generated, and those generated."""
    made = maker(**options)
    found = []
    for sample in made.kept(source):
        [(start, stop)] = sample.generated
        assert stop == len(sample.input_ids)
        ids = sample.input_ids.tolist()
        found.append((sample.id, ids[:start], ids[start:]))
    return found, made.report


# Answers as given.


def test_with_thinking_reasoning_answer_and_end_are_learned():
    source = chat(user("why"), assistant("because", reasoning="hm"))
    [found], report = kept(source)
    assert found == (
        "c/1",
        turn("user", "why") + HEADER + ids_of("<think>"),
        ids_of("hm", "</think>", "because", "<|im_end|>"),
    )
    assert report.left_out == report.changed == {}


def test_with_thinking_an_answer_without_reasoning_begins_by_ending_it():
    [(_, prompt, reply)], _ = kept(chat(user("why"), assistant("because")))
    assert prompt == turn("user", "why") + HEADER + ids_of("<think>")
    assert reply == ids_of("</think>", "because", "<|im_end|>")


def test_without_thinking_the_template_supplies_both_marks():
    source = chat(user("why"), assistant("because", reasoning="hm"))
    [(_, prompt, reply)], report = kept(source, thinking=False)
    assert prompt == turn("user", "why") + HEADER + ids_of("<think>", "</think>")
    assert reply == ids_of("because", "<|im_end|>")
    assert report.changed == {"reasoning dropped, since thinking is off": 1}


def test_every_turn_is_a_sample_with_the_history_it_will_see():
    source = chat(
        {"role": "system", "content": "s"},
        user("one"),
        assistant("1", reasoning="first"),
        user("two"),
        assistant("2", reasoning="second"),
    )
    found, _ = kept(source)
    assert [id for id, _, _ in found] == ["c/2", "c/4"]
    before = turn("system", "s") + turn("user", "one")
    assert found[0][1] == before + HEADER + ids_of("<think>")
    assert found[0][2] == ids_of("first", "</think>", "1", "<|im_end|>")
    # Of the first turn only the answer is left.
    before += turn("assistant", "<think>", "</think>", "1") + turn("user", "two")
    assert found[1][1] == before + HEADER + ids_of("<think>")
    assert found[1][2] == ids_of("second", "</think>", "2", "<|im_end|>")


def test_tool_calls_are_learned_and_their_loop_keeps_its_reasoning():
    source = chat(
        user("look"),
        assistant("wait", reasoning="hm", calls=[("f", {"a": 1})]),
        {"role": "tool", "content": "42"},
        assistant("so 42", reasoning="ah"),
        tools=TOOLS,
    )
    found, report = kept(source)
    declared = TEMPLATE.render([user("look")], tools=TOOLS, add_generation_prompt=False)
    called = [
        *("wait", "<|tool_calls_section_begin|>"),
        *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", '{"a": 1}'),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ]
    assert found[0] == (
        "c/1",
        declared + HEADER + ids_of("<think>"),
        ids_of("hm", "</think>", *called, "<|im_end|>"),
    )
    loop = turn("assistant", "<think>", "hm", "</think>", *called)
    result = turn("tool", "## Return of functions.f:0\n42")
    assert found[1] == (
        "c/3",
        declared + loop + result + HEADER + ids_of("<think>"),
        ids_of("ah", "</think>", "so 42", "<|im_end|>"),
    )
    assert report.left_out == {}


def test_text_that_looks_like_control_tokens_is_text():
    source = chat(user(FORGED), assistant(FORGED, reasoning=FORGED))
    [(_, prompt, reply)], _ = kept(source)
    forged = TOKENIZER.encode(FORGED)
    assert prompt == turn("user")[:-1] + forged + ids_of("<|im_end|>") + HEADER + ids_of("<think>")
    assert reply == forged + ids_of("</think>") + forged + ids_of("<|im_end|>")


text = st.text(max_size=12) | st.sampled_from([FORGED, " ", "\n", "def f():", "你好"])
arguments = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), min_size=1, max_size=2)


@st.composite
def rounds(draw) -> list[dict]:
    """A question, perhaps a loop of tool calls, and the answer."""
    reasoning = st.none() | text
    messages = [user(draw(text))]
    for _ in range(draw(st.integers(0, 2))):
        asked = draw(calls)
        messages.append(assistant(draw(text), draw(reasoning), asked))
        messages += [{"role": "tool", "content": draw(text)} for _ in asked]
    return [*messages, assistant(draw(text), draw(reasoning))]


@settings(max_examples=30, deadline=None)
@given(st.lists(rounds(), min_size=1, max_size=3), st.booleans())
def test_a_sample_is_the_prompt_as_served_and_a_reply_that_reads_back(parts, thinking):
    messages = [message for part in parts for message in part]
    found, report = kept(chat(*messages), thinking=thinking, length=100_000)
    assert report.left_out == {}
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert [id for id, _, _ in found] == [f"c/{index}" for index in turns]
    for index, (_, prompt, reply) in zip(turns, found, strict=True):
        assert prompt == TEMPLATE.render(messages[:index], thinking=thinking)
        assert reply[-1] == TOKENIZER.special_id("<|im_end|>")
        parser = ReplyParser(TOKENIZER, starts_in_thinking(TOKENIZER, prompt))
        parser.feed(reply[:-1])
        read, message = parser.finish(), messages[index]
        assert read.content == message["content"]
        assert read.reasoning == (message.get("reasoning_content") or "") * thinking
        given_calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [call.name for call in read.tool_calls] == [call["name"] for call in given_calls]
        for call, written in zip(read.tool_calls, given_calls, strict=True):
            assert json.loads(call.arguments) == written["arguments"]


@pytest.mark.parametrize(
    ("source", "reason", "example"),
    [
        (chat(user("a")), "no assistant turn", "c"),
        (chat(assistant("hello")), "assistant turn with nothing before it", "c/0"),
        (chat(user("a " * 600), assistant("b")), "over 512 tokens", "c/1"),
    ],
)
def test_turns_that_make_no_sample_are_counted(source, reason, example):
    found, report = kept(source)
    assert found == []
    assert report.left_out == {reason: 1} and report.examples[reason] == [example]


def test_a_greeting_is_history_all_the_same():
    found, report = kept(chat(assistant("hello"), user("a"), assistant("b")))
    assert [id for id, _, _ in found] == ["c/2"]
    assert found[0][1][: len(HEADER)] == HEADER
    assert report.left_out == {"assistant turn with nothing before it": 1}


@pytest.mark.parametrize(
    "template",
    [
        # The generation prompt is another than the turn's header.
        "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>{{ m.content }}<|im_end|>"
        "{% else %}<|im_assistant|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant{% endif %}",
        # The turn is not the assistant's.
        "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
        # The turn never ends.
        "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>{{ m.content }}<|im_end|>"
        "{% else %}<|im_assistant|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
        # History changes when a turn is added.
        "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>{{ messages | length }}"
        "<|im_end|>{% else %}<|im_assistant|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
        # No generation prompt at all.
        "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_that_writes_the_turn_otherwise_is_counted(template):
    made = SampleMaker(TOKENIZER, ChatTemplate(template, TOKENIZER), Report())
    assert list(made.kept(chat(user("a"), assistant("b")))) == []
    assert made.report.left_out == {"the template renders the turn differently": 1}


def test_a_template_that_refuses_is_counted_with_what_it_says():
    source = "{{ raise_exception('no such roles') }}"
    made = SampleMaker(TOKENIZER, ChatTemplate(source, TOKENIZER), Report())
    assert list(made.kept(chat(user("a"), assistant("b")))) == []
    [example] = made.report.examples["the template refuses it"]
    assert example.startswith("c/1: ") and "no such roles" in example
    without = SampleMaker(TOKENIZER, None, Report())
    assert list(without.kept(chat(user("a"), assistant("b")))) == []
    assert "there is no chat template" in without.report.examples["the template refuses it"][0]


# Rendered text.


def rendered(*bodies: str, before: str = "<|im_user|>user<|im_middle|>hi<|im_end|>") -> str:
    header = "<|im_assistant|>assistant<|im_middle|>"
    return "".join(f"{before}{header}{body}" for body in bodies)


@pytest.mark.parametrize(
    ("body", "supplied", "generated"),
    [
        ("yes<|im_end|>", [], ["yes", "<|im_end|>"]),
        ("<think></think>yes<|im_end|>", ["<think>", "</think>"], ["yes", "<|im_end|>"]),
        (
            "<think>hm</think>yes<|im_end|>",
            ["<think>"],
            ["hm", "</think>", "yes", "<|im_end|>"],
        ),
        ("<think>cut off", ["<think>"], ["cut off"]),
        ("yes<|im_end|>\n", [], ["yes", "<|im_end|>"]),
    ],
)
def test_rendered_text_is_learned_from_after_what_the_template_supplies(body, supplied, generated):
    source = Text(id="t", text=rendered(body))
    [found], report = kept(source)
    prompt = turn("user", "hi") + HEADER + ids_of(*supplied)
    assert found == ("t", prompt, ids_of(*generated))
    assert report.left_out == {}


def test_a_rendered_conversation_is_one_sample_of_all_its_turns():
    source = Text(
        id="t", text=rendered("<think>a</think>b<|im_end|>", "<think></think>c<|im_end|>")
    )
    [sample] = maker().kept(source)
    before = turn("user", "hi") + HEADER
    parts = [
        before + ids_of("<think>"),
        ids_of("a", "</think>", "b", "<|im_end|>"),
        before + ids_of("<think>", "</think>"),
        ids_of("c", "<|im_end|>"),
    ]
    assert sample.input_ids.tolist() == sum(parts, [])
    assert sample.loss_mask.tolist() == [
        index % 2 == 1 for index, part in enumerate(parts) for _ in part
    ]


def test_a_conversation_rendered_by_the_template_reads_as_it_was():
    messages = [user("hi"), assistant("yes", calls=[("f", {})])]
    text = TEMPLATE.render_text(messages, add_generation_prompt=False)
    [sample] = maker().kept(Text(id="t", text=text))
    assert sample.input_ids.tolist() == TEMPLATE.render(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|im_user|>user<|im_middle|>hi<|im_end|>", "no assistant turn"),
        ("<|im_assistant|>assistant", "assistant turn without <|im_middle|>"),
        ("<|im_assistant|>a<|im_user|>b<|im_middle|>c", "assistant turn without <|im_middle|>"),
        (
            rendered("yes") + "<|im_user|>user<|im_middle|>more<|im_end|>",
            "assistant turn without <|im_end|> before the next turn",
        ),
        (rendered("<think>"), "no assistant turn with a body"),
    ],
)
def test_rendered_text_that_is_no_conversation_is_counted(text, reason):
    found, report = kept(Text(id="t", text=text))
    assert found == []
    assert report.left_out == {reason: 1} and report.examples[reason] == ["t"]


# Documents.


def test_a_document_is_cut_into_windows_of_which_all_but_the_first_token_is_learned():
    source = Text(id="d", text="one two three\n" * 40)
    ids = TOKENIZER.encode(source.text)
    found, report = kept(source, length=50, prompt_tokens=8)
    assert [id for id, _, _ in found] == [f"d:{i}" for i in range(-(-len(ids) // 50))]
    assert [len(prompt) for _, prompt, _ in found] == [1] * len(found)
    assert [token for _, prompt, rest in found for token in prompt + rest] == ids
    assert report.left_out == {}


def test_a_document_may_speak_of_control_tokens():
    source = Text(id="d", text=f"The token <|im_assistant|> begins a turn. {FORGED}")
    [(_, prompt, rest)], _ = kept(source)
    assert prompt + rest == TOKENIZER.encode(source.text)


def test_a_last_window_too_short_is_counted():
    ids = TOKENIZER.encode("one two three\n" * 40)
    length = len(ids) - 1
    found, report = kept(Text(id="d", text="one two three\n" * 40), length=length)
    assert len(found) == 1
    assert report.left_out == {"window of less than 2 tokens": 1}


# Answers anew.


def test_a_dialogue_goes_on_from_the_new_answers():
    source = chat(user("one"), assistant("old 1"), user("two"), assistant("old 2"))
    made = maker(length=200)
    [dialogue] = made.exchanges(source)
    assert (dialogue.id, dialogue.num_prompts) == ("c", 2)
    prompt = dialogue.prompt()
    before = turn("user", "one")
    assert (prompt.id, list(prompt.ids)) == ("c/1", before + HEADER + ids_of("<think>"))
    assert prompt.max_new_tokens == 200 - len(prompt.ids)
    reply = ids_of("hm", "</think>", "new 1", "<|im_end|>")
    sample = dialogue.answer(reply, "stop")
    assert sample.input_ids.tolist() == [*prompt.ids, *reply]
    assert sample.generated == [(len(prompt.ids), len(prompt.ids) + len(reply))]
    prompt = dialogue.prompt()
    before += turn("assistant", "<think>", "</think>", "new 1") + turn("user", "two")
    assert (prompt.id, list(prompt.ids)) == ("c/3", before + HEADER + ids_of("<think>"))
    dialogue.answer(ids_of("</think>", "<|im_end|>"), "stop")
    assert dialogue.prompt() is None and made.report.left_out == {}


def test_ids_stay_as_generated_where_encoding_again_would_differ():
    [dialogue] = maker().exchanges(chat(user("one")))
    prompt = dialogue.prompt()
    reply = [*ids_of("</think>"), *TOKENIZER.encode("im"), *TOKENIZER.encode("port")]
    assert TOKENIZER.encode("import") != reply[1:]
    sample = dialogue.answer(reply, "length")
    assert sample.input_ids.tolist() == [*prompt.ids, *reply]


def test_a_question_at_the_end_is_answered_too():
    source = chat(user("one"), assistant("1"), user("two"))
    [dialogue] = maker(thinking=False).exchanges(source)
    assert dialogue.num_prompts == 2
    assert list(dialogue.prompt().ids[-2:]) == ids_of("<think>", "</think>")
    dialogue.answer(ids_of("x", "<|im_end|>"), "stop")
    prompt = dialogue.prompt()
    assert prompt.id == "c/3" and dialogue.num_prompts == 2


def test_turns_that_call_tools_stay_as_given():
    source = chat(
        user("look"),
        assistant("", reasoning="hm", calls=[("f", {})]),
        {"role": "tool", "content": "42"},
        assistant("old"),
        tools=TOOLS,
    )
    [dialogue] = maker().exchanges(source)
    assert dialogue.num_prompts == 1
    prompt = dialogue.prompt()
    assert prompt.id == "c/3"
    assert list(prompt.ids) == TEMPLATE.render(source.messages[:3], tools=TOOLS)
    assert ids_of("hm", "</think>", "<|tool_calls_section_begin|>")[-3] in prompt.ids


CALL = ids_of(
    *("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
    *("<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
END = ids_of("<|im_end|>")


@pytest.mark.parametrize(
    ("reply", "finish", "reason"),
    [
        (CALL + END, "stop", "turn after a new reply that calls a tool"),
        (CALL[:5] + END, "stop", "turn after a new reply that calls a tool"),
        (ids_of("hm"), "length", "turn after a new reply that was cut off"),
    ],
)
def test_a_reply_that_cannot_be_gone_on_from_ends_the_conversation(reply, finish, reason):
    turns = [message for _ in range(3) for message in (user("a"), assistant("b"))]
    made = maker()
    [dialogue] = made.exchanges(chat(*turns))
    prompt = dialogue.prompt()
    sample = dialogue.answer(reply, finish)
    assert sample.input_ids.tolist() == [*prompt.ids, *reply]
    assert dialogue.prompt() is None
    assert made.report.left_out == {reason: 2}
    assert made.report.examples[reason] == ["c/3", "c/5"]


def test_a_prompt_that_fills_the_length_is_counted_with_the_turns_after_it():
    source = chat(user("a " * 300), assistant("b"), user("c"))
    made = maker(length=64, prompt_tokens=8)
    [dialogue] = made.exchanges(source)
    assert dialogue.prompt() is None and dialogue.prompt() is None
    assert made.report.left_out == {"prompt leaves no room in 64 tokens": 2}


def test_the_first_turns_alone_may_be_asked_for():
    source = chat(*[m for _ in range(3) for m in (user("a"), assistant("b"))])
    made = maker()
    [dialogue] = made.exchanges(source)
    dialogue.keep_first(1)
    assert dialogue.num_prompts == 1 and dialogue.prompt() is not None
    dialogue.answer(ids_of("</think>") + END, "stop")
    assert dialogue.prompt() is None and made.report.left_out == {}


def test_new_tokens_are_capped():
    [dialogue] = maker(length=64, prompt_tokens=8, max_new_tokens=9).exchanges(chat(user("a")))
    assert dialogue.prompt().max_new_tokens == 9


def test_nothing_to_answer_is_counted():
    made = maker()
    assert made.exchanges(chat(assistant("hello"))) == []
    assert made.report.left_out == {"no turn to answer": 1}


def test_windows_are_gone_on_from_after_their_first_tokens():
    source = Text(id="d", text="one two three\n" * 40)
    ids = TOKENIZER.encode(source.text)
    made = maker(length=50, prompt_tokens=8, max_new_tokens=20)
    exchanges = made.exchanges(source)
    prompts = [exchange.prompt() for exchange in exchanges]
    starts = [start for start in range(0, len(ids), 50) if len(ids) - start >= 8]
    assert [list(p.ids) for p in prompts] == [ids[start : start + 8] for start in starts]
    assert [p.id for p in prompts] == [e.id for e in exchanges] == [f"d:{s // 50}" for s in starts]
    assert prompts[0].max_new_tokens == 20
    sample = exchanges[1].answer([7, 8, 9], "length")
    assert sample.input_ids.tolist() == [*ids[50:58], 7, 8, 9]
    assert sample.generated == [(8, 11)]
    assert exchanges[1].prompt() is None


def test_of_rendered_text_the_last_turn_is_answered():
    text = rendered("<think>a</think>b<|im_end|>", "<think></think>c<|im_end|>")
    [exchange] = maker().exchanges(Text(id="t", text=text))
    shown = TOKENIZER.decode(exchange.prompt().ids)
    assert shown == text.removesuffix("c<|im_end|>")
    made = maker()
    assert made.exchanges(Text(id="t", text="<|im_user|>hi")) == []
    assert made.report.left_out == {"no assistant turn": 1}
    # So is one that ends where the model is to begin.
    [exchange] = maker().exchanges(Text(id="t", text=rendered("<think>")))
    assert exchange.prompt().ids[-1:] == tuple(ids_of("<think>"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length is 1, expected at least 2"),
        ({"length": 8, "prompt_tokens": 8}, "prompt_tokens is 8, expected 1 to 7"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0, expected 1 to 511"),
    ],
)
def test_sizes_that_leave_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        maker(**options)
