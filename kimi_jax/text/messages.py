"""Conversations brought to the one layout chat templates expect.

The rules, in full:

- A message is an object with a `role` of system, user, assistant or tool. Keys whose value is null
  are dropped; keys with no rule here are passed to the template as they are.
- `content` is text, or a list of text parts, which are joined. Null is empty text. Only an
  assistant message may leave it out.
- `reasoning` is another name for `reasoning_content`.
- Tool calls get the ids the model knows: `functions.NAME:INDEX`, INDEX counting from 0 over the
  whole conversation, whatever their ids were. A tool result gets the new id of its call: the
  latest call with the result's `tool_call_id`, one without a result first. A result without an id
  belongs to the first call of the latest turn with calls that has no result (and has the result's
  `name`, if it gives one).
- `arguments` is an object or its JSON text, kept as it is; empty text or null is `{}`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.text.tokenizer import replace_surrogates

ROLES = ("system", "user", "assistant", "tool")


class ChatError(ValueError):
    """A conversation, tool list or template that cannot be rendered; names the place."""


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages that follow the rules of this module.

    Raises:
        ChatError: names the message by its index, and what would be right.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ChatError(f"messages is a {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise ChatError("messages is empty, expected at least one message")
    calls = _Calls()
    return [_message(m, f"messages[{i}]", i, calls) for i, m in enumerate(messages)]


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Copies of the tool declarations; None if there are none.

    Raises:
        ChatError: names the tool by its index, and what would be right.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ChatError(f"tools is a {type(tools).__name__}, expected a list of declarations")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        right = "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise ChatError(f"{where} is no tool declaration; {right}")
        function = tool.get("function")
        if tool["type"] == "function" and not (
            isinstance(function, Mapping) and _is_text(function.get("name"))
        ):
            raise ChatError(f"{where} names no function; {right}")
    return [plain_json(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def plain_json(value: Any, where: str) -> Any:
    """A copy made of plain JSON types, its text valid Unicode: no lone surrogate is left in it."""
    if isinstance(value, str):
        return replace_surrogates(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise ChatError(f"{where} has the key {wrong!r}, expected text")
        return {
            replace_surrogates(str(key)): plain_json(item, f"{where}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ChatError(f"{where} is a {type(value).__name__}, expected JSON types")


@dataclasses.dataclass
class _Call:
    turn: int
    old_id: str
    new_id: str
    name: str
    is_answered: bool = False


class _Calls:
    """All tool calls of a conversation so far."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def add(self, turn: int, old_id: str | None, name: str) -> str:
        new_id = f"functions.{name}:{len(self.calls)}"
        self.calls.append(_Call(turn, new_id if old_id is None else old_id, new_id, name))
        return new_id

    def answer(self, where: str, call_id: str | None, name: str | None) -> str:
        if call_id is None:
            turn = self.calls[-1].turn if self.calls else None
            found = [
                call
                for call in self.calls
                if call.turn == turn and not call.is_answered and name in (None, call.name)
            ]
            if not found:
                raise ChatError(f"{where} has no tool_call_id and no earlier call waits for it")
            call = found[0]
        else:
            found = [call for call in self.calls if call.old_id == call_id]
            found = found or [call for call in self.calls if call.new_id == call_id]
            if not found:
                known = ", ".join(repr(call.old_id) for call in self.calls) or "none"
                raise ChatError(
                    f"{where}: tool_call_id is {call_id!r}, but no earlier call has that id "
                    f"(calls so far: {known})"
                )
            latest = [call for call in found if call.turn == found[-1].turn]
            call = next((call for call in latest if not call.is_answered), latest[-1])
        call.is_answered = True
        return call.new_id


def _message(message: Any, where: str, turn: int, calls: _Calls) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} is a {type(message).__name__}, expected an object with a role")
    given = {k: v for k, v in plain_json(message, where).items() if v is not None}
    role = given.get("role")
    if role not in ROLES:
        found = "has no role" if role is None else f"has the role {role!r}"
        raise ChatError(f"{where} {found}, expected one of {', '.join(ROLES)}")
    if "content" not in message and role != "assistant":
        raise ChatError(f"{where} has no content, expected text")
    content = _content(given.pop("content", ""), f"{where}.content")
    tool_calls = given.pop("tool_calls", [])
    reasoning = given.pop("reasoning", None)
    if reasoning is not None:
        given.setdefault("reasoning_content", reasoning)
    for key in ("name", "reasoning_content", "tool_call_id"):
        if not isinstance(given.get(key, ""), str):
            raise ChatError(f"{where}.{key} is {given[key]!r}, expected text")
    given["content"] = content
    if tool_calls:
        if role != "assistant":
            raise ChatError(f"{where} has tool_calls, but its role is {role}, not assistant")
        given["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls", turn, calls)
    if role == "tool":
        call_id = given.get("tool_call_id")
        given["tool_call_id"] = calls.answer(where, call_id, given.get("name"))
    return given


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where} is a {type(content).__name__}, expected text or a list of parts")
    texts = []
    right = "expected {'type': 'text', 'text': ...}"
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            found = "no type" if kind is None else f"the type {kind!r}"
            raise ChatError(f"{where}[{index}] has {found}, but only text is read; {right}")
        if not isinstance(text, str):
            raise ChatError(f"{where}[{index}] has no text; {right}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(tool_calls: Any, where: str, turn: int, calls: _Calls) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise ChatError(f"{where} is a {type(tool_calls).__name__}, expected a list")
    out = []
    for index, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_text(function.get("name")):
            raise ChatError(
                f"{where}[{index}] names no function; expected "
                "{'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
            )
        old_id, name, arguments = call.get("id"), function["name"], function.get("arguments")
        if not isinstance(old_id, (str, type(None))):
            raise ChatError(f"{where}[{index}].id is {old_id!r}, expected text")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if not isinstance(arguments, (str, dict)):
            raise ChatError(
                f"{where}[{index}].function.arguments is a {type(arguments).__name__}, "
                "expected an object or its JSON text"
            )
        function = {"name": name, "arguments": arguments}
        new_id = calls.add(turn, old_id, name)
        out.append({"id": new_id, "type": "function", "function": function})
    return out


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
