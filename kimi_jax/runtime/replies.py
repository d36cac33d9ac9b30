"""What a request gives back: results, streamed pieces, and the collectors that build them.

A collector takes one row's updates as the engine reports them and turns ids into text: plain text,
or a chat reply taken apart into reasoning, content and tool calls. It is where stop strings end a
row, since only text can tell.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kimi_jax.runtime.decode import Finish
from kimi_jax.runtime.engine import Request
from kimi_jax.runtime.run import RowUpdate, TokenLogprobs
from kimi_jax.text.reply import (
    ContentDelta,
    Event,
    MalformedCall,
    ReasoningDelta,
    ReplyParser,
    ToolCall,
)
from kimi_jax.text.stream import TextStream, starts_in_thinking
from kimi_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request; the ending token counts as new."""

    prompt_tokens: int
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """What a request took, beside the neighbours it ran with.

    `prefill_seconds` are those of its prompt and of those taken in together with it,
    `decode_seconds` those of the blocks it was in: the time in which other prompts take the rows of
    requests that have ended is in neither. Both include compiles, if `compiles` is not zero.
    `tokens_per_second` is this request's new tokens over the decode seconds. `cycles` are the steps
    its row was live in; a stop string ends a row at its block's end, so steps past the cut may be
    among them.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    cycles: int
    compiles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """What drafting did for one request, or for a run of them (`total`).

    `drafted` counts proposed tokens; `accepted_by_depth[k]` those kept of the ones proposed k + 1
    places after the newest token, as many as the deepest proposal has. Tokens proposed past the end
    of the reply are drafted and not accepted. A stop string ends a row at its block's end, so
    tokens past the cut may be among them.
    """

    cycles: int
    drafted: int
    accepted_by_depth: tuple[int, ...]
    emitted: int

    @classmethod
    def total(cls, parts: Iterable["Speculation"]) -> "Speculation":
        """Of a run: the sums over its requests."""
        given = list(parts)
        by_depth = itertools.zip_longest(*(p.accepted_by_depth for p in given), fillvalue=0)
        return cls(
            cycles=sum(p.cycles for p in given),
            drafted=sum(p.drafted for p in given),
            accepted_by_depth=tuple(map(sum, by_depth)),
            emitted=sum(p.emitted for p in given),
        )

    @property
    def accepted(self) -> int:
        """Proposed tokens that were kept."""
        return sum(self.accepted_by_depth)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Mean emitted tokens of a cycle, the target's own included (the "accept length")."""
        return self.emitted / self.cycles if self.cycles else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One finished request.

    `text` is everything emitted, without control tokens and without a matched stop string.
    `token_ids` are the tokens emitted, the ending one included. `reasoning`, `tool_calls` and
    `malformed_calls` (cut off, or not a JSON object) are filled by `chat`, whose `text` is the
    reply's content alone. `finish_reason` is "stop" (a stop token or string) or "length"
    (`max_new_tokens`, or the context is full). `speculation` is None without a drafter.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[MalformedCall, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    speculation: Speculation | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What streaming yields: new text or reasoning, and with the last piece the finished result.

    Tool calls are not streamed as text; they are in the result.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    result: Result | None = None


class Collector(abc.ABC):
    """One row's reply as it grows, until the device or a stop string ends it."""

    def __init__(self, request: Request):
        self.request = request
        self.draft_depth: int | None = None
        self.finish = Finish.RUNNING
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._emitted = 0
        self._last = RowUpdate(index=0)

    def feed(self, update: RowUpdate) -> Piece:
        """Takes a block's update; after the end, nothing."""
        if self.finish != Finish.RUNNING:
            return Piece()
        before = len(self._ids)
        self._ids += update.token_ids
        self._logprobs += update.logprobs or ()
        self._last = update
        self._emitted += len(update.token_ids)
        self.finish = update.finish
        # A token that ended the row is not part of its text.
        ended = update.finish == Finish.STOP and bool(update.token_ids)
        text_ids = update.token_ids[:-1] if ended else update.token_ids
        piece, kept = self._read(text_ids, is_last=update.finish != Finish.RUNNING)
        if kept is not None:
            del self._ids[kept:], self._logprobs[kept:]
            self.finish = Finish.STOP
        return dataclasses.replace(piece, token_ids=tuple(self._ids[before:]))

    def result(self) -> Result:
        """The finished request."""
        seconds = self._last.decode_seconds
        return Result(
            token_ids=tuple(self._ids),
            finish_reason="stop" if self.finish == Finish.STOP else "length",
            usage=Usage(prompt_tokens=len(self.request.prompt), new_tokens=len(self._ids)),
            timings=Timings(
                prefill_seconds=self._last.prefill_seconds,
                decode_seconds=seconds,
                tokens_per_second=len(self._ids) / seconds if seconds else 0.0,
                cycles=self._last.cycles,
                compiles=self._last.compiles,
            ),
            speculation=self._speculation(),
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
            **self._content(),
        )

    def _speculation(self) -> Speculation | None:
        if self.draft_depth is None:
            return None
        return Speculation(
            cycles=self._last.cycles,
            drafted=self._last.drafted,
            accepted_by_depth=self._last.accepted[: self.draft_depth],
            emitted=self._emitted,
        )

    @abc.abstractmethod
    def _read(self, ids: Sequence[int], *, is_last: bool) -> tuple[Piece, int | None]:
        """What the ids add; if a stop string matched, how many of all ids to keep."""

    @abc.abstractmethod
    def _content(self) -> dict[str, Any]:
        """The result's text, and what a chat reply has besides."""


class TextCollector(Collector):
    """Plain text."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        super().__init__(request)
        params = request.params
        self._stream = TextStream(
            tokenizer,
            params.stop,
            starts_in_thinking(tokenizer, request.prompt),
            params.stop_in_thinking,
            skip_special=params.skip_special_tokens,
        )
        self._parts: list[str] = []

    def _read(self, ids: Sequence[int], *, is_last: bool) -> tuple[Piece, int | None]:
        delta = self._stream.feed(ids)
        text, kept = delta.text, delta.num_ids
        if is_last or kept is not None:
            last = self._stream.finish()
            text, kept = text + last.text, last.num_ids
        self._parts.append(text)
        return Piece(text=text), kept

    def _content(self) -> dict[str, Any]:
        return {"text": "".join(self._parts)}


class ChatCollector(Collector):
    """Reasoning, content and tool calls."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        super().__init__(request)
        self._parser = ReplyParser(
            tokenizer,
            starts_in_thinking(tokenizer, request.prompt),
            stop=request.params.stop,
            stop_in_thinking=request.params.stop_in_thinking,
        )

    def _read(self, ids: Sequence[int], *, is_last: bool) -> tuple[Piece, int | None]:
        events: list[Event] = self._parser.feed(ids)
        if is_last or self._parser.num_ids_at_stop is not None:
            events += self._parser.close()
        piece = Piece(
            text="".join(e.text for e in events if isinstance(e, ContentDelta)),
            reasoning="".join(e.text for e in events if isinstance(e, ReasoningDelta)),
        )
        return piece, self._parser.num_ids_at_stop

    def _content(self) -> dict[str, Any]:
        reply = self._parser.finish()
        return {
            "text": reply.content,
            "reasoning": reply.reasoning,
            "tool_calls": reply.tool_calls,
            "malformed_calls": reply.malformed_calls,
        }
