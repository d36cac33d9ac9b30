"""A file of prompts, every row checked before anything runs, and the rows that answer them.

A row is `{"id", "prompt"}` or `{"id", "messages", "tools", "thinking"}`, the last two optional, and
may hold any field of `SamplingParams` for itself. A reply says by digests what it was made from, so
that a run that goes on with a file does not mix what belongs to different questions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kimi_jax.runtime.jsonl import ResumableLines
from kimi_jax.runtime.replies import ChatCollector, Collector, Result, TextCollector
from kimi_jax.runtime.requests import INSTANT_SAMPLING, THINKING_SAMPLING, RequestMaker
from kimi_jax.runtime.sampling import MIN_TEMPERATURE, SamplingParams
from kimi_jax.text.messages import normalize_messages, normalize_tools

MAX_PROBLEMS = 5
"""Rows an error names."""

_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
_FIELDS = ("id", "prompt", "messages", "tools", "thinking")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One row, checked: a text to go on from, or a conversation to answer."""

    id: str
    params: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    digest: str = ""
    """Of the tokens the model is asked to go on from: of the row, its thinking and the template."""

    def reply(self, requests: RequestMaker) -> Collector:
        """What collects its reply.

        Raises:
            ValueError: the model cannot run it.
        """
        if self.messages is None:
            return TextCollector(
                requests.tokenizer, requests.request(self.prompt, self.params, "prompt")
            )
        request = requests.chat_request(
            self.messages, self.params, thinking=self.thinking, tools=self.tools, what="prompt"
        )
        return ChatCollector(requests.tokenizer, request)


def read_prompts(
    path: Path,
    requests: RequestMaker,
    options: Mapping[str, Any],
    *,
    seed: int,
    thinking: bool = True,
) -> list[PromptRow]:
    """The rows of a file, all of which can run.

    Args:
        path: JSON lines.
        requests: of the model that is to answer.
        options: sampling options of every row that does not name its own.
        seed: a row without one gets its own from this and its id, whatever rows are beside it.
        thinking: whether replies to conversations that do not say begin by reasoning.

    Raises:
        ValueError: names the first rows that cannot run, and why.
        OSError: the file cannot be read.
    """
    rows: dict[str, PromptRow] = {}
    problems = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = _row(line, options, seed, thinking)
                if row.id in rows:
                    raise ValueError(f"the id {row.id!r} is used before")
                asked = digest(row.reply(requests).request.prompt)
                rows[row.id] = dataclasses.replace(row, digest=asked)
            except (ValueError, TypeError) as error:
                problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise ValueError(f"{path}: {'; '.join(problems[:MAX_PROBLEMS])}{more}")
    if not rows:
        raise ValueError(f'{path}: no row; expected lines such as {{"id": "a", "prompt": "..."}}')
    return list(rows.values())


def merge_sampling(
    defaults: SamplingParams,
    given: Mapping[str, Any],
    spell: Callable[[str], str] = str,
) -> SamplingParams:
    """The defaults with the options given over them.

    Raises:
        ValueError: an option out of range, or a filter that greedy decoding would ignore; options
            are called as `spell` says.
    """
    params = dataclasses.replace(defaults, **given)
    if params.temperature < MIN_TEMPERATURE:
        is_on = {
            "top_p": given.get("top_p") not in (None, 1),
            "top_k": (given.get("top_k") or 0) > 0,
            "min_p": (given.get("min_p") or 0) > 0,
        }
        if names := [spell(name) for name, is_set in is_on.items() if is_set]:
            raise ValueError(
                f"only with a {spell('temperature')} over 0 ({params.temperature:g} here): "
                f"{', '.join(names)}"
            )
    return params


def digest(*parts: Any) -> str:
    """Of JSON values: equal ones have the same."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def own_seed(seed: int, id: str) -> int:
    """64 bits that depend on these two alone."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, id]).encode()).digest()[:8], "big")


def _row(line: bytes, options: Mapping[str, Any], seed: int, thinking: bool) -> PromptRow:
    row = _json_object(line)
    id = row.get("id")
    if not isinstance(id, str) or not id:
        raise ValueError(f"id is {id!r}, expected text that tells the row from the others")
    if unknown := sorted(row.keys() - {*_FIELDS, *_SAMPLING}):
        raise ValueError(
            f"{', '.join(unknown)}: unknown; expected {', '.join(_FIELDS)}, or sampling options"
        )
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("expected either prompt or messages")
    own = {name: row[name] for name in _SAMPLING if name in row}
    if isinstance(own.get("logit_bias"), dict):
        own["logit_bias"] = {_token_id(key): bias for key, bias in own["logit_bias"].items()}
    given = {**options, **own}
    if given.get("seed") is None:
        given["seed"] = own_seed(seed, id)
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise ValueError(f"prompt is {row['prompt']!r}, expected text")
        if names := [name for name in ("tools", "thinking") if name in row]:
            raise ValueError(f"only with messages: {', '.join(names)}")
        params = merge_sampling(SamplingParams(), given)
        return PromptRow(id=id, prompt=row["prompt"], params=params)
    thinks = row.get("thinking", thinking)
    if not isinstance(thinks, bool):
        raise ValueError(f"thinking is {thinks!r}, expected true or false")
    params = merge_sampling(THINKING_SAMPLING if thinks else INSTANT_SAMPLING, given)
    return PromptRow(
        id=id,
        messages=normalize_messages(row["messages"]),
        tools=normalize_tools(row.get("tools")),
        thinking=thinks,
        params=params,
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise ValueError(f"logit_bias has the key {key!r}, expected a token id")
    return int(key)


class ReplyFile:
    """The file of replies, new or left by an earlier run over the same prompts.

    Args:
        path: JSON lines.
        rows: all prompts.
        made_with: what else replies depend on, by name; each is compared as a digest.

    Raises:
        ValueError: the file holds something else, or replies made from other prompts or settings.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, rows: list[PromptRow], made_with: Mapping[str, Any]):
        self._common = {name: digest(value) for name, value in made_with.items()}
        wanted = {row.id: row for row in rows}

        def read(line: bytes) -> str:
            reply = _json_object(line)
            id, theirs = reply.get("id"), reply.get("made_with")
            if not isinstance(id, str) or not isinstance(theirs, dict):
                raise ValueError("no reply to a prompt: it lacks id or made_with")
            if id not in wanted:
                raise ValueError(f"{id!r} is not among the prompts; take another file")
            ours = self._made_with(wanted[id])
            if differing := [name for name in ours if theirs.get(name) != ours[name]]:
                raise ValueError(
                    f"{id!r} was answered with another {' and another '.join(differing)}; take "
                    "another file"
                )
            return id

        self._lines = ResumableLines(path, read)
        self.num_resumed = len(self._lines)

    def __contains__(self, row: PromptRow) -> bool:
        return row.id in self._lines

    def write(self, row: PromptRow, result: Result) -> None:
        """Adds the reply to this row."""
        told = result.speculation
        reply: dict[str, Any] = {
            "id": row.id,
            "text": result.text,
            "reasoning": result.reasoning,
            "tool_calls": [dataclasses.asdict(call) for call in result.tool_calls],
            "malformed_calls": [dataclasses.asdict(call) for call in result.malformed_calls],
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "usage": dataclasses.asdict(result.usage),
            "speculation": None
            if told is None
            else dataclasses.asdict(told) | {"tokens_per_cycle": told.tokens_per_cycle},
        }
        if result.logprobs is not None:
            reply["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
        self._lines.append(row.id, reply | {"made_with": self._made_with(row)})

    def close(self) -> None:
        """Ends the writing."""
        self._lines.close()

    def _made_with(self, row: PromptRow) -> dict[str, str]:
        sampling = digest(dataclasses.asdict(row.params))
        return {"prompt": row.digest, "sampling": sampling, **self._common}
