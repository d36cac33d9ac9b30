"""Conversations to prompt ids through the checkpoint's own chat template.

Control ids come from the template alone. Each control literal in the template's source is replaced
by one lone surrogate before the template is compiled, and lone surrogates are removed from all
that users supply. After rendering, every surrogate is therefore the template's, and everything
else, whatever it looks like and however its parts were joined, is encoded as ordinary text.
A template cannot recognise control literals in a user's text either.
"""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kimi_jax.text.messages import ChatError as ChatError
from kimi_jax.text.messages import normalize_messages, normalize_tools
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.text.tools_typescript import (
    UnsupportedSchemaError,
    sorted_keys,
    tools_to_typescript,
)

# One surrogate for each of the 256 control slots.
_FIRST_PLACEHOLDER = 0xD800
_PLACEHOLDERS = re.compile("([\ud800-\ud8ff])")


class ChatTemplate:
    """Renders conversations to token ids; `messages.py` states how they are normalised."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str = "chat template"):
        """Compiles the template's source.

        Raises:
            ChatError: not a Jinja template, or one that builds control literals out of pieces.
        """
        self._tokenizer = tokenizer
        self._name = name
        self._placeholders = {
            literal: chr(_FIRST_PLACEHOLDER + token_id - tokenizer.num_ranks)
            for literal, token_id in tokenizer.special_tokens.items()
        }
        longest_first = sorted(self._placeholders, key=len, reverse=True)
        self._literals = re.compile("|".join(map(re.escape, longest_first)))
        if _PLACEHOLDERS.search(source):
            raise ChatError(f"{name}: holds a lone surrogate, which is no valid text")
        try:
            self._template = _environment().from_string(
                self._literals.sub(lambda found: self._placeholders[found[0]], source)
            )
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"{name}, line {error.lineno}: {error.message}") from None
        self._check_literals()

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> "ChatTemplate":
        """Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.

        Raises:
            ChatError: the folder has neither, or the template cannot be used.
            TokenizerError: no tokenizer was given and the folder's cannot be read.
        """
        path = Path(folder) / "chat_template.jinja"
        config_path = Path(folder) / "tokenizer_config.json"
        try:
            if path.is_file():
                source: Any = path.read_text(encoding="utf-8")
            else:
                path = config_path
                config = json.loads(path.read_text(encoding="utf-8"))
                source = config.get("chat_template") if isinstance(config, dict) else None
        except FileNotFoundError:
            source = None
        except (OSError, ValueError) as error:
            raise ChatError(f"{path}: not readable ({error})") from None
        if isinstance(source, list):
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise ChatError(
                f"{folder}: no chat template; expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json"
            )
        tokenizer = Tokenizer.from_folder(folder) if tokenizer is None else tokenizer
        return cls(source, tokenizer, name=str(path))

    def render(
        self,
        messages: Any,
        *,
        thinking: bool = True,
        tools: Any = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the prompt.

        Args:
            messages: objects with `role` and `content`, the oldest first.
            thinking: whether the model is to reason before it answers.
            tools: declarations, `{"type": "function", "function": {...}}` each.
            add_generation_prompt: end with the header of the assistant's next turn.

        Raises:
            ChatError: names the message or tool that is wrong, and what would be right.
        """
        ids: list[int] = []
        for piece in self._pieces(messages, thinking, tools, add_generation_prompt):
            if _PLACEHOLDERS.fullmatch(piece):
                ids.append(self._tokenizer.num_ranks + ord(piece) - _FIRST_PLACEHOLDER)
            else:
                ids += self._tokenizer.encode(piece)
        return ids

    def render_text(
        self,
        messages: Any,
        *,
        thinking: bool = True,
        tools: Any = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text, to read; encoding it again would let users write control tokens."""
        pieces = self._pieces(messages, thinking, tools, add_generation_prompt)
        literals = {placeholder: text for text, placeholder in self._placeholders.items()}
        return "".join(literals.get(piece, piece) for piece in pieces)

    def _pieces(
        self, messages: Any, thinking: Any, tools: Any, add_generation_prompt: Any
    ) -> list[str]:
        """The rendered prompt cut at its control tokens, each a piece of its own."""
        flags = {"thinking": thinking, "add_generation_prompt": add_generation_prompt}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is {flag!r}, expected True or False")
        try:
            text = self._fill(normalize_messages(messages), normalize_tools(tools), flags)
        except RecursionError:
            raise ChatError("messages or tools are nested too deeply") from None
        return [piece for piece in _PLACEHOLDERS.split(text) if piece]

    def _fill(self, messages: list, tools: list | None, flags: dict[str, bool]) -> str:
        typescript = None
        if tools is not None:
            tools = declared = sorted_keys(tools)
            try:
                typescript = tools_to_typescript(declared)
            except UnsupportedSchemaError:
                pass  # The template shows compact JSON instead.
        names = {
            "bos_token": self._tokenizer.bos_token,
            "eos_token": self._tokenizer.eos_token,
            "pad_token": self._tokenizer.pad_token,
        }
        tokens = {key: self._placeholders[name] for key, name in names.items() if name}
        try:
            return self._template.render(
                messages=messages, tools=tools, tools_ts_str=typescript, **flags, **tokens
            )
        except ChatError as error:
            raise ChatError(f"{self._name}: {error}") from None
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatError(f"{self._name}: {type(error).__name__}: {error}") from error

    def _check_literals(self) -> None:
        """Refuses a template that joins control literals from pieces: it would lose them."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        probe = [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c", "tool_calls": [call]},
            {"role": "tool", "content": "d"},
            {"role": "assistant", "content": "e"},
            {"role": "user", "content": "f"},
        ]
        for messages in (probe, probe[1:2]):
            try:
                pieces = self._pieces(messages, True, None, True)
            except ChatError:
                continue  # Templates may refuse a conversation; this one proves nothing then.
            for piece in pieces:
                if found := self._literals.search(piece):
                    raise ChatError(
                        f"{self._name}: {found[0]!r} is put together from pieces; a control token "
                        "must stand in the template as one literal"
                    )


def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it: sandboxed, block lines trimmed, plain `tojson`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` without HTML or ASCII escapes (Jinja's own escapes for HTML)."""
    separators = tuple(separators) if separators is not None else None
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise ChatError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
