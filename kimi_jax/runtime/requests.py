"""Prompts and conversations made into requests, and refused where they cannot run.

All of it needs a checkpoint's small files alone, so that what is wrong with a prompt is found
before any weights are read.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.runtime.engine import MAX_STOP_IDS, Request
from kimi_jax.runtime.sampling import SamplingParams
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 4096

THINKING_SAMPLING = SamplingParams(max_new_tokens=None, temperature=1.0, top_p=0.95)
"""The published recommendation for replies with thinking; `chat`'s default."""
INSTANT_SAMPLING = SamplingParams(max_new_tokens=None, temperature=0.6, top_p=0.95)
"""The published recommendation for replies without thinking."""

Prompt = str | Sequence[int]


@dataclasses.dataclass(kw_only=True)
class RequestMaker:
    """Makes a checkpoint's requests."""

    folder: Path
    cfg: ModelConfig
    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a prompt and its reply."""
    stop_ids: tuple[int, ...]
    """The ids that end a reply unless it asks for `ignore_eos`."""
    template: ChatTemplate | None
    """None until a conversation needs the one in `tokenizer_config.json`."""

    @classmethod
    def from_folder(
        cls, folder: Path, cfg: ModelConfig, max_length: int | None = None
    ) -> "RequestMaker":
        """For the checkpoint in this folder; None takes its own limit, but not more than 4096.

        Raises:
            ValueError: what is wrong with the tokenizer, the template or the limit.
        """
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer.vocab_size != cfg.vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model's "
                f"vocabulary {cfg.vocab_size}"
            )
        has_template = (folder / "chat_template.jinja").exists()
        return cls(
            folder=folder,
            cfg=cfg,
            tokenizer=tokenizer,
            stop_ids=_stop_ids(cfg, folder, tokenizer),
            template=ChatTemplate.from_folder(folder, tokenizer) if has_template else None,
            max_length=_max_length(max_length, cfg),
        )

    def requests(self, prompts: Any, params: Any) -> list[Request]:
        """A request for each prompt; `params` are one for all, one for each, or None.

        Raises:
            ValueError, TypeError: a prompt or option that cannot run, named by its index.
        """
        listed = as_list(prompts)
        each = [SamplingParams() if params is None else params] * len(listed)
        if isinstance(params, Sequence) and not isinstance(params, str):
            each = list(params)
            if len(each) != len(listed):
                raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling params")
        pairs = enumerate(zip(listed, each, strict=True))
        return [self.request(prompt, own, f"prompt {index}") for index, (prompt, own) in pairs]

    def request(self, prompt: Any, params: Any, what: str) -> Request:
        """One request; errors call its prompt `what`."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params of {what} are {params!r}; expected SamplingParams")
        ids = self.check_prompt(prompt, what)
        if len(ids) >= self.max_length:
            raise ValueError(
                f"{what} has {len(ids)} tokens and leaves no room for a reply: "
                f"max_length is {self.max_length}"
            )
        try:
            params.check(self.cfg.vocab_size)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.stop_ids))
        if len(stops) > MAX_STOP_IDS:
            raise ValueError(
                f"{what} has {len(stops)} stop ids, the model's own included; at most "
                f"{MAX_STOP_IDS}"
            )
        return Request(ids, params, tuple(sorted(stops)))

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        what: str = "prompt 0",
    ) -> Request:
        """The request of a conversation: the rendered prompt and the options in force."""
        if self.template is None:
            self.template = ChatTemplate.from_folder(self.folder, self.tokenizer)
        ids = self.template.render(list(messages), thinking=thinking, tools=tools)
        chosen = params or (THINKING_SAMPLING if thinking else INSTANT_SAMPLING)
        if not chosen.skip_special_tokens:
            raise ValueError(
                "skip_special_tokens=False has no meaning in chat, which parses the control tokens;"
                " use generate with chat_request(...).prompt"
            )
        return self.request(ids, chosen, what)

    def check_prompt(self, prompt: Any, what: str) -> tuple[int, ...]:
        """The token ids of a text or a list of ids, the BOS token if it is empty.

        Raises:
            ValueError: calls the prompt `what`.
        """
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise ValueError(f"{what} is {prompt!r}; expected text or token ids")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            bos = self.cfg.bos_token_id
            if bos is None:
                raise ValueError(f"{what} is empty, and the model has no BOS token to begin with")
            ids = [bos]
        for token in ids:
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
                raise ValueError(f"{what} holds {token!r}; expected text or token ids")
            if not 0 <= token < self.cfg.vocab_size:
                raise ValueError(
                    f"{what} holds token id {token}, outside the vocabulary "
                    f"0..{self.cfg.vocab_size - 1}"
                )
        if len(ids) > self.max_length:
            raise ValueError(
                f"{what} has {len(ids)} tokens, max_length is {self.max_length} (the model's own "
                f"limit is {self.cfg.max_position_embeddings})"
            )
        return tuple(int(token) for token in ids)


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list; a flat list of ids is one prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(x, (int, np.integer)) for x in listed):
        return [listed]
    return listed


def _max_length(max_length: int | None, cfg: ModelConfig) -> int:
    limit = cfg.max_position_embeddings
    if max_length is None:
        return min(limit, DEFAULT_MAX_LENGTH)
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length is {max_length}, expected 2..{limit} for this model")
    return max_length


def _stop_ids(cfg: ModelConfig, folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The union of every end id the checkpoint names: config, generation config, tokenizer."""
    ids = {*cfg.eos_token_id, *tokenizer.eos_ids}
    path = folder / "generation_config.json"
    if path.exists():
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a JSON object ({error})") from None
        ids |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    outside = sorted(i for i in ids if not 0 <= i < cfg.vocab_size)
    if outside:
        raise ValueError(f"{folder}: end-of-text ids {outside} lie outside the vocabulary")
    return tuple(sorted(ids))
