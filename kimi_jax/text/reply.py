"""A reply's reasoning, content and tool calls, read from its token ids while they arrive.

Structure comes from control ids alone, so text that merely looks like a marker stays text. A call
is `<|tool_call_begin|>` id `<|tool_call_argument_begin|>` JSON `<|tool_call_end|>`; its id is
`functions.NAME:INDEX`. It does not check arguments against the tool's schema.
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from kimi_jax.text.stream import Channel, Marker, Segment, SegmentStream
from kimi_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is the JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """What the model wrote in a tool section that is no complete call, and why it is none."""

    id: str
    arguments: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """A parsed reply. `stop` is the stop string that ended it, if one did."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[MalformedCall, ...] = ()
    stop: str | None = None

    def to_message(self) -> dict[str, Any]:
        """The reply as an assistant message to append to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclasses.dataclass(frozen=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclasses.dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStarted:
    """The call's name is known; `index` counts the calls of this reply, malformed ones too."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True)
class ArgumentsDelta:
    """More of the arguments of the call last started."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True)
class CallFinished:
    """A call is complete."""

    index: int
    call: ToolCall


@dataclasses.dataclass(frozen=True)
class CallMalformed:
    """A call turned out not to be one; what was streamed of it is void."""

    index: int
    call: MalformedCall


Event = ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta | CallFinished | CallMalformed


@dataclasses.dataclass
class _OpenCall:
    index: int
    id_parts: list[str] = dataclasses.field(default_factory=list)
    argument_parts: list[str] | None = None
    name: str | None = None
    problem: str | None = None

    @property
    def id(self) -> str:
        return "".join(self.id_parts).strip()

    @property
    def arguments(self) -> str:
        return "".join(self.argument_parts or ())


class ReplyParser:
    """Feed ids as they arrive, then `finish`; any cutting into calls gives the same `Reply`.

    Text in the reasoning channel up to `</think>` or a tool section is reasoning, the rest
    content; no marker is in either. A reply cut inside the reasoning has no content. Stop strings
    follow the rules of `SegmentStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        starts_in_thinking: bool,
        *,
        stop: Iterable[str] = (),
        stop_in_thinking: bool = False,
    ):
        self._segments = SegmentStream(
            tokenizer,
            stop=stop,
            starts_in_thinking=starts_in_thinking,
            stop_in_thinking=stop_in_thinking,
        )
        self._call: _OpenCall | None = None
        self._stray: list[str] = []
        self._num_calls = 0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._malformed: list[MalformedCall] = []
        self._events: list[Event] = []
        self._is_closed = False

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """What the ids add, in order, neighbouring text joined."""
        if self._is_closed:
            raise RuntimeError("this reply is finished; a new reply needs a new ReplyParser")
        for segment in self._segments.feed(ids):
            self._take(segment)
        return self._take_events()

    def close(self) -> list[Event]:
        """The last events: text held back until now, and calls the reply left unfinished."""
        if not self._is_closed:
            self._is_closed = True
            for segment in self._segments.finish():
                self._take(segment)
            self._end_call("the reply ended inside the call")
        return self._take_events()

    def finish(self) -> Reply:
        """The whole reply. A streaming caller takes the events of `close` first."""
        self.close()
        return Reply(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(self._calls),
            malformed_calls=tuple(self._malformed),
            stop=self._segments.stopped_by,
        )

    @property
    def num_ids_at_stop(self) -> int | None:
        """Of all ids fed, how many up to and with the one that completed a stop string."""
        return None if self._segments.stopped_by is None else self._segments.num_ids

    def _take(self, segment: Segment) -> None:
        if segment.marker is not None:
            self._take_marker(segment.marker, segment.channel)
        elif segment.channel is Channel.REASONING:
            self._reasoning.append(segment.text)
            self._events.append(ReasoningDelta(segment.text))
        elif segment.channel is Channel.CONTENT:
            self._content.append(segment.text)
            self._events.append(ContentDelta(segment.text))
        elif self._call is None:
            self._stray.append(segment.text)
        elif self._call.argument_parts is None:
            self._call.id_parts.append(segment.text)
        else:
            self._add_arguments(self._call, segment.text)

    def _take_marker(self, marker: Marker, channel: Channel) -> None:
        if marker is Marker.CALL_BEGIN:
            self._end_call("the next call began before this one ended")
            self._call = self._open_call()
        elif marker is Marker.SECTION_END:
            self._end_call("the tool section ended inside the call")
        elif marker is Marker.CALL_END:
            self._end_call(None)
        elif channel is Channel.CALLS:
            self._take_inside(marker)

    def _take_inside(self, marker: Marker) -> None:
        is_arguments = marker is Marker.ARGUMENTS_BEGIN
        if self._call is None and is_arguments:
            self._end_call(None)
            self._call = self._open_call()
        if self._call is None:
            return
        if is_arguments and self._call.argument_parts is None:
            self._start_arguments(self._call)
        else:
            self._call.problem = f"a control token ({marker.value or 'other'}) is inside the call"

    def _open_call(self) -> _OpenCall:
        self._num_calls += 1
        return _OpenCall(index=self._num_calls - 1)

    def _start_arguments(self, call: _OpenCall) -> None:
        call.argument_parts = []
        call.name = _name_of(call.id)
        if call.name is not None:
            self._events.append(CallStarted(call.index, call.id, call.name))

    def _add_arguments(self, call: _OpenCall, text: str) -> None:
        assert call.argument_parts is not None
        call.argument_parts.append(text)
        if call.name is not None:
            self._events.append(ArgumentsDelta(call.index, text))

    def _end_call(self, unfinished: str | None) -> None:
        """Closes the open call, or reports text in the section that belongs to no call."""
        call, self._call = self._call, None
        stray, self._stray = "".join(self._stray), []
        if call is None:
            if stray.strip():
                reason = "text in the tool section is outside any call"
                self._report(self._open_call().index, MalformedCall("", stray, reason))
            return
        if call.argument_parts == [] and call.name is not None and unfinished is None:
            self._add_arguments(call, "{}")
        reason = unfinished or call.problem or _problem_of(call)
        if reason is not None or call.name is None:
            self._report(call.index, MalformedCall(call.id, call.arguments, str(reason)))
            return
        finished = ToolCall(call.id, call.name, call.arguments)
        self._calls.append(finished)
        self._events.append(CallFinished(call.index, finished))

    def _report(self, index: int, call: MalformedCall) -> None:
        self._malformed.append(call)
        self._events.append(CallMalformed(index, call))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return _joined(events)


def _name_of(call_id: str) -> str | None:
    """NAME of `functions.NAME:INDEX`; the prefix or the index may be left out, not both."""
    name = re.sub(r":\d+\Z", "", call_id.removeprefix("functions.")).strip()
    return name if name and name != call_id else None


def _problem_of(call: _OpenCall) -> str | None:
    if call.argument_parts is None:
        return "the call has no arguments marker"
    if call.name is None:
        return "the call's id names no function; expected functions.NAME:INDEX"
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return f"the arguments are not a JSON object but {type(arguments).__name__}"
    return None


def _joined(events: list[Event]) -> list[Event]:
    """The same events, neighbouring deltas of one kind and call made one."""
    runs: list[tuple[Event, list[str]]] = []
    for event in events:
        text = getattr(event, "text", None)
        if text is not None and runs and _same_run(runs[-1][0], event):
            runs[-1][1].append(text)
        else:
            runs.append((event, [text or ""]))
    return [
        dataclasses.replace(event, text="".join(texts)) if hasattr(event, "text") else event
        for event, texts in runs
    ]


def _same_run(first: Event, second: Event) -> bool:
    index = getattr(first, "index", None)
    return type(first) is type(second) and index == getattr(second, "index", None)
