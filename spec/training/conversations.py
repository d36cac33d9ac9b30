"""Conversations and texts to prompts and samples, token for token as they are served.

Every assistant turn is a sample of its own: templates drop the reasoning of earlier turns, so each
trains with the history it will see. Learned from are the reply's tokens alone: reasoning, answer,
tool calls and the token that ends the turn, never what the template supplies. Answers are kept as
given (`SampleMaker.kept`), or a model gives them anew (`SampleMaker.exchanges`); which model, and
how it is run, is the caller's.
"""

import abc
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.messages import ChatError
from kimi_jax.text.reply import ReplyParser
from kimi_jax.text.stream import starts_in_thinking
from kimi_jax.text.tokenizer import Tokenizer
from spec.training.samples import Report, Sample
from spec.training.sources import Conversation, Source, Text

_TURN, _BODY, _END = "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"
_THINK, _THINK_END = "<think>", "</think>"
_OTHER_TURNS = ("<|im_user|>", "<|im_system|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the model is to go on from, and for how many tokens at most."""

    id: str
    ids: tuple[int, ...]
    max_new_tokens: int


class Exchange(abc.ABC):
    """Prompts of which each may depend on the replies before it: `prompt`, `answer`, and again."""

    id: str
    num_prompts: int
    """How many there will be at most."""

    def keep_first(self, num_prompts: int) -> None:
        """Leaves out the later prompts; called before the first is asked for."""
        self.num_prompts = min(self.num_prompts, num_prompts)

    @abc.abstractmethod
    def prompt(self) -> Prompt | None:
        """The next prompt; None when there is none left."""

    @abc.abstractmethod
    def answer(self, token_ids: Sequence[int], finish_reason: str) -> Sample:
        """The sample that the last prompt and its reply make, ids as the model gave them."""


class SampleMaker:
    """Makes samples of sources; what it leaves out, and why, is in `report`.

    Args:
        tokenizer: the target's.
        template: the target's; None if no source is a conversation.
        report: counts what is left out. It does not count the samples.
        thinking: whether replies begin by reasoning.
        length: most tokens of a sample; the window that documents are cut into.
        prompt_tokens: what of a window is the prompt, where the rest is written anew.
        max_new_tokens: most tokens of a new reply; None leaves it to `length`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        report: Report,
        *,
        thinking: bool = True,
        length: int = 512,
        prompt_tokens: int = 64,
        max_new_tokens: int | None = None,
    ):
        if length < 2:
            raise ValueError(f"length is {length}, expected at least 2")
        if not 1 <= prompt_tokens < length:
            raise ValueError(f"prompt_tokens is {prompt_tokens}, expected 1 to {length - 1}")
        self.tokenizer = tokenizer
        self.report = report
        self.length = length
        self.prompt_tokens = prompt_tokens
        self._template = template
        self._thinking = thinking
        self._max_new_tokens = max_new_tokens
        self._special = tokenizer.special_tokens
        longest_first = sorted(self._special, key=len, reverse=True)
        self._literals = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    # Answers as given.

    def kept(self, source: Source) -> Iterator[Sample]:
        """A sample of every assistant turn, of the whole rendered text, or of every window."""
        if isinstance(source, Conversation):
            made = self._kept_turns(source)
        elif self._is_rendered(source.text):
            made = self._kept_rendered(source)
        else:
            made = (
                Sample.of(id, window, [(1, len(window))])
                for id, window in self._windows(source, shortest=2)
            )
        for sample in made:
            if len(sample.input_ids) > self.length:
                self.report.leave_out(f"over {self.length} tokens", sample.id)
            else:
                yield sample

    def _kept_turns(self, source: Conversation) -> Iterator[Sample]:
        turns = [i for i, m in enumerate(source.messages) if m["role"] == "assistant"]
        if not turns:
            self.report.leave_out("no assistant turn", source.id)
        for index in turns:
            id = f"{source.id}/{index}"
            history, turn = source.messages[:index], source.messages[index]
            if not history:
                self.report.leave_out("assistant turn with nothing before it", id)
                continue
            try:
                prompt = self._render(history, source.tools)
                reply = self._reply_ids(history, turn, source.tools)
            except ChatError as error:
                self.report.leave_out("the template refuses it", f"{id}: {error}")
                continue
            if reply is None:
                self.report.leave_out("the template renders the turn differently", id)
                continue
            if turn.get("reasoning_content") and not self._thinking:
                self.report.change("reasoning dropped, since thinking is off", id)
            yield Sample.of(id, prompt + reply, [(len(prompt), len(prompt) + len(reply))])

    def _reply_ids(self, history: list, turn: dict[str, Any], tools: Any) -> list[int] | None:
        """The ids that would have been generated; None if the template does not write them so."""
        before = self._render(history, tools, add_generation_prompt=False)
        prompt = self._render(history, tools)
        whole = self._render([*history, turn], tools, add_generation_prompt=False)
        header = prompt[len(before) :]
        if prompt[: len(before)] != before or not header or header[0] not in whole:
            return None
        # The last turn's, for no text becomes a control id. What stands before it may differ: the
        # turn that ends a tool loop makes the template drop the loop's reasoning.
        start = len(whole) - 1 - whole[::-1].index(header[0])
        has_reasoning = any(message.get("reasoning_content") for message in history)
        if whole[:start] != before and not has_reasoning:
            return None
        reply = whole[start + len(header) :]
        ends = [at for at, token in enumerate(reply) if token in self.tokenizer.eos_ids]
        if whole[start : start + len(header)] != header or not ends:
            return None
        reply = reply[: ends[-1] + 1]
        reasoning = turn.get("reasoning_content")
        if not self._thinking or not reasoning:
            return reply
        # Of a turn that calls no tool the template leaves the reasoning out, as history.
        wanted, end = self.tokenizer.encode(reasoning), self._special.get(_THINK_END)
        if end is None or end not in reply:
            return None
        found = reply[: reply.index(end)]
        if found and found != wanted:
            return None
        return wanted + reply[len(found) :]

    def _kept_rendered(self, source: Text) -> Iterator[Sample]:
        ids = self._rendered_ids(source.text)
        try:
            spans = [span for span in self._bodies(ids) if span[0] < span[1]]
        except _NotRendered as error:
            self.report.leave_out(str(error), source.id)
            return
        if not spans:
            self.report.leave_out("no assistant turn with a body", source.id)
            return
        # What follows the last body teaches nothing.
        yield Sample.of(source.id, ids[: spans[-1][1]], spans)

    # Answers anew.

    def exchanges(self, source: Source) -> list[Exchange]:
        """What to ask a model so as to get the source's samples."""
        if isinstance(source, Conversation):
            dialogue = Dialogue(self, source)
            if dialogue.num_prompts:
                return [dialogue]
            self.report.leave_out("no turn to answer", source.id)
            return []
        if not self._is_rendered(source.text):
            return [
                Completion(self, id, window[: self.prompt_tokens])
                for id, window in self._windows(source, shortest=self.prompt_tokens)
            ]
        ids = self._rendered_ids(source.text)
        try:
            spans = self._bodies(ids)
        except _NotRendered as error:
            self.report.leave_out(str(error), source.id)
            return []
        return [Completion(self, source.id, ids[: spans[-1][0]])]

    def room(self, id: str, prompt: Sequence[int]) -> Prompt | None:
        """The prompt, with as many new tokens as there may be; None if there may be none."""
        most = self.length - len(prompt)
        if most < 1:
            return None
        if self._max_new_tokens is not None:
            most = min(most, self._max_new_tokens)
        return Prompt(id=id, ids=tuple(prompt), max_new_tokens=most)

    def render(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """The prompt for the turn after these messages.

        Raises:
            ChatError: the template refuses the conversation.
        """
        return self._render(messages, tools)

    # Inside.

    def _render(self, messages: list, tools: Any, add_generation_prompt: bool = True) -> list[int]:
        if self._template is None:
            raise ChatError("there is no chat template, which conversations need")
        return self._template.render(
            messages,
            thinking=self._thinking,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )

    def _windows(self, source: Text, *, shortest: int) -> Iterator[tuple[str, list[int]]]:
        ids = self.tokenizer.encode(source.text)
        for index, start in enumerate(range(0, len(ids), self.length)):
            window, id = ids[start : start + self.length], f"{source.id}:{index}"
            if len(window) < shortest:
                self.report.leave_out(f"window of less than {shortest} tokens", id)
            else:
                yield id, window

    def _is_rendered(self, text: str) -> bool:
        """Whether a template has written the text: it begins with a control token."""
        return self._literals.match(text) is not None

    def _rendered_ids(self, text: str) -> list[int]:
        """Ids of a text whose control literals are meant: its author's own, not a user's."""
        ids: list[int] = []
        for piece in self._literals.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
            else:
                ids += self.tokenizer.encode(piece)
        return ids

    def _bodies(self, ids: list[int]) -> list[tuple[int, int]]:
        """What was generated of each assistant turn, its end token included."""
        names = (_TURN, _BODY, _END, _THINK, _THINK_END)
        named = {name: self._special.get(name, -1) for name in names}
        others = {self._special.get(name, -1) for name in (_TURN, *_OTHER_TURNS)}
        turns = [at for at, token in enumerate(ids) if token == named[_TURN]]
        if not turns:
            raise _NotRendered("no assistant turn")
        spans = []
        for turn in turns:
            limit = next((at for at in range(turn + 1, len(ids)) if ids[at] in others), len(ids))
            if named[_BODY] not in ids[turn:limit]:
                raise _NotRendered(f"assistant turn without {_BODY}")
            start = ids.index(named[_BODY], turn) + 1
            if ids[start : start + 2] == [named[_THINK], named[_THINK_END]]:
                start += 2
            elif ids[start : start + 1] == [named[_THINK]]:
                start += 1
            if named[_END] in ids[start:limit]:
                limit = ids.index(named[_END], start) + 1
            elif limit < len(ids):
                raise _NotRendered(f"assistant turn without {_END} before the next turn")
            spans.append((start, limit))
        return spans


class Dialogue(Exchange):
    """A conversation whose plain assistant turns are given anew, the history holding the new ones.

    Turns that call tools stay as given, for the results that follow are theirs. A new reply that
    calls a tool, or is cut off, ends the conversation.
    """

    def __init__(self, maker: SampleMaker, source: Conversation):
        self.id = source.id
        self._maker = maker
        self._source = source
        messages = source.messages
        self._turns = [
            index
            for index, message in enumerate(messages)
            if index and message["role"] == "assistant" and not message.get("tool_calls")
        ]
        if messages[-1]["role"] != "assistant":
            self._turns.append(len(messages))
        self.num_prompts = len(self._turns)
        self._history: list[dict[str, Any]] = []
        self._given = 0
        self._prompt: Prompt | None = None

    def keep_first(self, num_prompts: int) -> None:
        """Leaves out the later turns."""
        super().keep_first(num_prompts)
        del self._turns[num_prompts:]

    def prompt(self) -> Prompt | None:
        """The history up to the next turn, rendered."""
        if not self._turns:
            return None
        turn = self._turns[0]
        self._history += self._source.messages[self._given : turn]
        self._given = turn + 1
        id = f"{self._source.id}/{turn}"
        try:
            ids = self._maker.render(self._history, self._source.tools)
        except ChatError as error:
            self._end("the template refuses it", f": {error}")
            return None
        self._prompt = self._maker.room(id, ids)
        if self._prompt is None:
            self._end(f"prompt leaves no room in {self._maker.length} tokens")
            return None
        del self._turns[0]
        return self._prompt

    def answer(self, token_ids: Sequence[int], finish_reason: str) -> Sample:
        """The sample; the reply becomes history."""
        prompt = self._prompt
        assert prompt is not None, "answer without a prompt"
        tokenizer = self._maker.tokenizer
        parser = ReplyParser(tokenizer, starts_in_thinking(tokenizer, prompt.ids))
        parser.feed(token_ids[:-1] if finish_reason == "stop" else token_ids)
        reply = parser.finish()
        self._history.append(reply.to_message())
        if reply.tool_calls or reply.malformed_calls:
            self._end("turn after a new reply that calls a tool")
        elif finish_reason != "stop":
            self._end("turn after a new reply that was cut off")
        return _sample(prompt, token_ids)

    def _end(self, reason: str, detail: str = "") -> None:
        for turn in self._turns:
            self._maker.report.leave_out(reason, f"{self._source.id}/{turn}{detail}")
        self._turns = []


class Completion(Exchange):
    """A single prompt, the model's to go on from."""

    num_prompts = 1

    def __init__(self, maker: SampleMaker, id: str, ids: Sequence[int]):
        self.id = id
        self._maker = maker
        self.ids = ids
        self._prompt: Prompt | None = None
        self._is_given = False

    def prompt(self) -> Prompt | None:
        """The prompt, once."""
        if self._is_given:
            return None
        self._is_given = True
        self._prompt = self._maker.room(self.id, self.ids)
        if self._prompt is None:
            reason = f"prompt leaves no room in {self._maker.length} tokens"
            self._maker.report.leave_out(reason, self.id)
        return self._prompt

    def answer(self, token_ids: Sequence[int], finish_reason: str) -> Sample:
        """The prompt and its reply."""
        assert self._prompt is not None, "answer without a prompt"
        return _sample(self._prompt, token_ids)


class _NotRendered(Exception):
    """Why a text that begins with a control token is no rendered conversation."""


def _sample(prompt: Prompt, token_ids: Sequence[int]) -> Sample:
    ids = [*prompt.ids, *token_ids]
    return Sample.of(prompt.id, ids, [(len(prompt.ids), len(ids))])
