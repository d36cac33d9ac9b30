"""Token ids to text while they arrive: whole characters, stop strings, reasoning kept apart.

Everything works id by id, so how the ids are cut into calls never changes what comes out. It knows
nothing of models or requests; `kimi_jax.text.reply` builds tool calls on top of it.
"""

import codecs
import dataclasses
import enum
from collections.abc import Iterable, Iterator

from kimi_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of ids as they arrive; joined, it is `Tokenizer.decode` of all the ids.

    A character is held back until its last byte is there. Bytes that can no longer become a
    character turn into a replacement character, and what follows them stays intact.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The characters completed by `ids`."""
        return "".join(map(self._one, ids))

    def finish(self) -> str:
        """A replacement character if a character was begun and not completed."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def _one(self, token_id: int) -> str:
        token = self._tokenizer.token_bytes(token_id)
        if not self._tokenizer.is_special(token_id):
            return self._decoder.decode(token)
        return self.finish() + ("" if self._skip_special else token.decode())


class StopStrings:
    """Passes text through until a stop string is complete; no part of that string gets out.

    The stop string completed first wins; of those completed by the same character, the longest.
    So "ab" beats "abc" and "c" beats "bcd" only where they end first, and ("b,c", ",c") emits
    nothing of "b,c". Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Iterable[str]):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"stop string is {stop!r}, expected text of at least one character"
                )
        self._first = frozenset(stop[0] for stop in self.stops)
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text now sure not to be part of a stop string, and the stop string if one matched.

        After a match nothing more is emitted.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops]
        found = [match for match in found if match[0] + match[1] >= 0]
        if found:
            end, minus_length, self._matched = min(found)
            self._held = ""
            return text[: end + minus_length], self._matched
        cut = next(self._possible_starts(text), len(text))
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back, which nothing will complete any more."""
        text, self._held = self._held, ""
        return text

    def _possible_starts(self, text: str) -> Iterator[int]:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self.stops):
                    yield start


class Channel(enum.Enum):
    """What a piece of generated text is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


class Marker(enum.Enum):
    """A control token that gives a reply its structure; OTHER is any other control token."""

    THINK_BEGIN = "<think>"
    THINK_END = "</think>"
    SECTION_BEGIN = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"
    OTHER = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A marker, if any, and the text after it; `channel` is the one both belong to."""

    channel: Channel
    marker: Marker | None = None
    text: str = ""


class SegmentStream:
    """Cuts a reply into channels at its control tokens, and applies the stop strings.

    Args:
        tokenizer: finds the markers by name.
        stop: stop strings. They fire in the content; in the reasoning only if asked to; in a tool
            call never, for half a call is of no use. They do not reach over a change of channel.
        starts_in_thinking: whether the prompt ended inside `<think>`. None: plain text without
            structure, where stop strings fire everywhere.
        stop_in_thinking: whether stop strings fire in the reasoning.
        skip_special: leave control tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        starts_in_thinking: bool | None = None,
        stop_in_thinking: bool = False,
        skip_special: bool = True,
    ):
        if starts_in_thinking:
            tokenizer.special_id(Marker.THINK_END.value)
        self.channel = Channel.REASONING if starts_in_thinking else Channel.CONTENT
        self.stopped_by: str | None = None
        self.num_ids = 0
        self._tokenizer = tokenizer
        self._is_plain = starts_in_thinking is None
        self._in_section = False
        self._stop_in_thinking = stop_in_thinking
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stops = StopStrings(stop)
        known = tokenizer.special_tokens
        self._markers = {known[m.value]: m for m in Marker if m.value in known}

    def feed(self, ids: Iterable[int]) -> Iterator[Segment]:
        """Segments of the ids up to the one that completes a stop string; later ids are ignored.

        `num_ids` counts the ids taken so far, over all calls, the completing one included.
        """
        for token_id in ids:
            if self.stopped_by is not None:
                return
            self.num_ids += 1
            if not self._tokenizer.is_special(token_id):
                yield from self._pass(self._detokenizer.feed([token_id]))
                continue
            yield from self._pass(self._detokenizer.finish())
            if self.stopped_by is not None:
                return
            marker = self._markers.get(token_id, Marker.OTHER)
            channel = self.channel if self._is_plain else self._after(marker)
            if channel is not self.channel:
                yield from self._flush()
                self.channel = channel
            yield Segment(channel=channel, marker=marker)
            yield from self._pass(self._detokenizer.feed([token_id]))

    def finish(self) -> Iterator[Segment]:
        """The text still held back, once no more ids will come."""
        if self.stopped_by is None:
            yield from self._pass(self._detokenizer.finish())
            yield from self._flush()

    def _after(self, marker: Marker) -> Channel:
        """The channel after a marker. A tool section may open inside the reasoning."""
        in_calls = self.channel is Channel.CALLS
        match marker:
            case Marker.THINK_BEGIN if not in_calls:
                return Channel.REASONING
            case Marker.THINK_END if not in_calls:
                return Channel.CONTENT
            case Marker.SECTION_BEGIN:
                self._in_section = True
                return Channel.CALLS
            case Marker.CALL_BEGIN:
                return Channel.CALLS
            case Marker.SECTION_END if in_calls:
                self._in_section = False
                return Channel.CONTENT
            case Marker.CALL_END if in_calls and not self._in_section:
                return Channel.CONTENT
        return self.channel

    def _pass(self, text: str) -> Iterator[Segment]:
        is_content = self.channel is Channel.CONTENT
        is_reasoning = self.channel is Channel.REASONING
        if is_content or (is_reasoning and self._stop_in_thinking):
            text, self.stopped_by = self._stops.feed(text)
        if text:
            yield Segment(channel=self.channel, text=text)

    def _flush(self) -> Iterator[Segment]:
        if text := self._stops.flush():
            yield Segment(channel=self.channel, text=text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDelta:
    """New text for the user, and the stop string if one has matched.

    `num_ids` is then the number of ids, of all fed so far, up to and with the one that completed
    the stop string.
    """

    text: str
    stop: str | None = None
    num_ids: int | None = None


class TextStream:
    """The text of one growing reply, as one string: `feed` new ids, then `finish`.

    The arguments are those of `SegmentStream`; control tokens are left out of the text unless
    `skip_special` is false. Reasoning, content and calls run together here: to tell them apart use
    `kimi_jax.text.reply.ReplyParser`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        starts_in_thinking: bool | None = None,
        stop_in_thinking: bool = False,
        *,
        skip_special: bool = True,
    ):
        self._segments = SegmentStream(
            tokenizer,
            stop=stop,
            starts_in_thinking=starts_in_thinking,
            stop_in_thinking=stop_in_thinking,
            skip_special=skip_special,
        )

    def feed(self, ids: Iterable[int]) -> TextDelta:
        """The text `ids` add; after a stop string matched, none."""
        return self._delta(self._segments.feed(ids))

    def finish(self) -> TextDelta:
        """The text held back so far."""
        return self._delta(self._segments.finish())

    def _delta(self, segments: Iterable[Segment]) -> TextDelta:
        text = "".join(segment.text for segment in segments)
        stop = self._segments.stopped_by
        return TextDelta(
            text=text, stop=stop, num_ids=None if stop is None else self._segments.num_ids
        )


def starts_in_thinking(tokenizer: Tokenizer, prompt_ids: Iterable[int]) -> bool:
    """Whether a reply to this prompt begins inside the reasoning: its last marker opens one."""
    last = next((i for i in reversed(list(prompt_ids)) if tokenizer.is_special(i)), None)
    return last is not None and last == tokenizer.special_tokens.get(Marker.THINK_BEGIN.value)
