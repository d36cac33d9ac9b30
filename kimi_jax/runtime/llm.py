"""`LLM`: a checkpoint, its text and an engine behind the calls users make.

It loads, checks what callers give, and hands requests to the engine and ids to the collectors; the
README shows it in use.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kimi_jax.checkpoint.load import load_params, open_checkpoint
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.decode import Finish
from kimi_jax.runtime.engine import (
    MAX_STOP_IDS,
    PREFILL_SIZES,
    Drafter,
    Engine,
    Request,
)
from kimi_jax.runtime.mesh import (
    MESH_AXES,
    MeshError,
    check_sizes,
    make_mesh,
    parse_mesh,
)
from kimi_jax.runtime.placement import abstract_model, stored_dtype
from kimi_jax.runtime.replies import ChatCollector, Collector, Piece, Result, TextCollector
from kimi_jax.runtime.sampling import SamplingParams
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

DEMO = Path(__file__).resolve().parents[1] / "demo"
"""The bundled demo checkpoint's folder."""

DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16")}
DEFAULT_MAX_LENGTH = 4096
SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model")

THINKING_SAMPLING = SamplingParams(max_new_tokens=None, temperature=1.0, top_p=0.95)
"""The published recommendation for replies with thinking; `chat`'s default."""
INSTANT_SAMPLING = SamplingParams(max_new_tokens=None, temperature=0.6, top_p=0.95)
"""The published recommendation for replies without thinking."""

Prompt = str | Sequence[int]


class LLM:
    """A loaded model, ready to generate.

    Args:
        path_or_id: checkpoint folder in the published layout, or one that
            scripts/convert_checkpoint.py has made of it, or a hub id "owner/name".
        drafter: what makes decoding speculative; None decodes one token a cycle.
        mesh: devices to cut the model over: {"tensor": 8}, "expert=4,tensor=2", or a `jax` mesh
            with these axes; None takes one device.
        max_length: most tokens of a prompt and its reply; None takes the model's own limit, but
            not more than 4096 (the cache's memory grows with it).
        max_batch: most prompts that run together; `generate` takes any number.
        dtype: "bfloat16" or "float32", of weights and activations; None takes bfloat16 on
            accelerators and float32 on a CPU. Packed INT4 stays packed with either.
        platform: "cpu" or "gpu"; an error where there is none. None takes JAX's default.
        latent_norm_eps: overrides the epsilon of the latent norms (see `ModelConfig`).
        revision: of a hub id: branch, tag or commit.
        progress: shows a bar while loading, when stderr is a terminal.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the folder cannot be used, and everything
            that is wrong with it; nothing has been built or compiled yet.
        MeshError: a mesh the machine or the model does not fit, and those that would work.
    """

    def __init__(
        self,
        path_or_id: str | Path,
        drafter: Drafter | None = None,
        mesh: Mapping[str, int] | str | Mesh | None = None,
        *,
        max_length: int | None = None,
        max_batch: int = 8,
        dtype: str | None = None,
        platform: str | None = None,
        latent_norm_eps: float | None = None,
        revision: str | None = None,
        progress: bool = True,
    ):
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}, expected at least 1")
        if drafter is not None and (isinstance(drafter, type) or not isinstance(drafter, Drafter)):
            raise ValueError(
                f"drafter is {drafter!r}, expected what spec.load_drafter(path_or_id) returns"
            )
        # Everything the small files can tell comes first: from the hub, weights take hours.
        folder = resolve(path_or_id, revision=revision, patterns=SMALL_FILES)
        cfg = ModelConfig.from_folder(folder)
        if latent_norm_eps is not None:
            cfg = dataclasses.replace(cfg, latent_norm_eps=latent_norm_eps)
        self.tokenizer = Tokenizer.from_folder(folder)
        if self.tokenizer.vocab_size != cfg.vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has {self.tokenizer.vocab_size} ids, the model's "
                f"vocabulary {cfg.vocab_size}"
            )
        self._stop_ids = _stop_ids(cfg, folder, self.tokenizer)
        self._folder = folder
        self._template: ChatTemplate | None = None
        if (folder / "chat_template.jinja").exists():
            self._template = ChatTemplate.from_folder(folder, self.tokenizer)
        self.max_length = _max_length(max_length, cfg)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {sorted(DTYPES)}")
        self.mesh = _mesh(mesh, platform)
        check_sizes(cfg, self.mesh)
        if drafter is not None:
            drafter.check(cfg, self.mesh)
        kind = self.mesh.devices.flat[0].platform
        self.dtype = dtype or ("float32" if kind == "cpu" else "bfloat16")
        _log.info("%d %s device(s), %s", self.mesh.size, kind, self.dtype)

        folder = resolve(path_or_id, revision=revision)
        plan = open_checkpoint(cfg, folder)
        self.cfg = cfg = plan.cfg
        # Again, since only the files tell whether the experts are INT4.
        check_sizes(cfg, self.mesh)
        # Before the target's weights: a drafter whose files do not fit is found out first.
        bound = None if drafter is None else drafter.bind(cfg, self.mesh, DTYPES[self.dtype])
        abstract = abstract_model(
            cfg,
            self.mesh,
            DTYPES[self.dtype],
            embedding_dtype=stored_dtype(plan, "embed_tokens"),
        )
        began = time.perf_counter()
        params = load_params(plan, abstract.wanted, progress=progress)
        self.load_seconds = time.perf_counter() - began
        self.engine = Engine(
            cfg,
            abstract.graph,
            abstract.fill(params),
            self.mesh,
            max_length=self.max_length,
            max_batch=max_batch,
            drafter=bound,
        )

    @property
    def model(self) -> Kimi:
        """The model's module, its weights shared: for `kimi_jax.model.transformer.forward`."""
        return nnx.merge(self.engine.graph, self.engine.target_weights)

    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """A result for each prompt, in order; a batch is as many as `max_batch`.

        Args:
            prompts: texts or token-id lists, one or many. Text is encoded as it is, without a
                template. An empty prompt begins with the BOS token.
            params: for all prompts, or one for each; None is greedy.

        Raises:
            ValueError: a prompt or option that cannot run, named by its index, before any runs.
        """
        requests = self._requests(prompts, params)
        results: list[Result] = []
        size = self.engine.max_batch
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            replies = [TextCollector(self.tokenizer, r) for r in batch]
            for _ in self._drive(replies, is_streaming=False):
                pass
            results += [reply.result() for reply in replies]
        return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields the reply piece by piece, never half a character or part of a stop string.

        The last piece carries the `Result`. Leaving the loop early ends the request.
        """
        (request,) = self._requests([prompt], params)
        return self._stream(TextCollector(self.tokenizer, request))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Result:
        """The assistant's reply to a conversation, its reasoning and tool calls parsed.

        Args:
            messages: in the common chat format; rendered with the checkpoint's own template.
            params: None takes the published sampling for thinking or instant replies.
            thinking: whether the reply begins by reasoning.
            tools: functions the model may call, as JSON-schema declarations.
        """
        request = self.chat_request(messages, params, thinking=thinking, tools=tools)
        reply = ChatCollector(self.tokenizer, request)
        for _ in self._drive([reply], is_streaming=False):
            pass
        return reply.result()

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[Piece]:
        """`chat`, piece by piece: reasoning and content as they come, the result at the end."""
        request = self.chat_request(messages, params, thinking=thinking, tools=tools)
        return self._stream(ChatCollector(self.tokenizer, request))

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Request:
        """The request `chat` runs: the rendered prompt and the options in force."""
        if self._template is None:
            self._template = ChatTemplate.from_folder(self._folder, self.tokenizer)
        ids = self._template.render(list(messages), thinking=thinking, tools=tools)
        chosen = params or (THINKING_SAMPLING if thinking else INSTANT_SAMPLING)
        if not chosen.skip_special_tokens:
            raise ValueError(
                "skip_special_tokens=False has no meaning in chat, which parses the control tokens;"
                " use generate with chat_request(...).prompt"
            )
        return self._requests([ids], chosen)[0]

    # Evaluating.

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 [T, V]: the model's logits after each token."""
        ids = self._check_prompt(token_ids, "token_ids")
        parts = [np.asarray(part) for part in self.engine.logits(ids)]
        return np.concatenate(parts)[: len(ids)]

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Per prompt, float32 [T - 1]: the log-probability of each token given those before it."""
        scores = []
        for index, prompt in enumerate(_as_list(prompts)):
            ids = self._check_prompt(prompt, f"prompt {index}")
            following = np.asarray([*ids[1:], 0], np.int32)
            parts, start = [], 0
            for part in self.engine.logits(ids):
                wanted = np.zeros((part.shape[0],), np.int32)
                real = following[start : start + part.shape[0]]
                wanted[: len(real)] = real
                parts.append(np.asarray(_log_probability(part, wanted)))
                start += part.shape[0]
            scores.append(np.concatenate(parts)[: len(ids) - 1])
        return scores

    def cycle_cost(
        self, text: Prompt | None = None, params: SamplingParams | None = None
    ) -> tuple[float, float]:
        """Seconds of a cycle of what the drafter's controller has settled on, and of a plain step.

        Of one row, measured now, in turns, after this text and with these options; their quotient
        is the break-even in tokens a cycle. Compiles what is not compiled yet.

        Raises:
            ValueError: there is no drafter.
        """
        drafter = self.engine.drafter
        if drafter is None:
            raise ValueError("without a drafter a cycle is a plain step")
        ids = None if text is None else self._check_prompt(text, "text")
        current = drafter.controller(1).current
        seconds = self.engine.cycle_seconds([current, None], text=ids, params=params)
        return seconds[current], seconds[None]

    def warm_up(self) -> int:
        """Compiles every program a request can reach, so that none compiles later."""
        num_programs = self.engine.warm_up(with_logits=True)
        self.score([[0] * min(size, self.max_length) for size in PREFILL_SIZES])
        return num_programs

    # Inside.

    def _check_prompt(self, prompt: Any, what: str) -> tuple[int, ...]:
        """The token ids of a text or a list of ids, the BOS token if it is empty."""
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

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        listed = _as_list(prompts)
        each = [SamplingParams() if params is None else params] * len(listed)
        if isinstance(params, Sequence) and not isinstance(params, str):
            each = list(params)
            if len(each) != len(listed):
                raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling params")
        requests = []
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            if not isinstance(own, SamplingParams):
                raise TypeError(f"params of prompt {index} are {own!r}; expected SamplingParams")
            ids = self._check_prompt(prompt, f"prompt {index}")
            if len(ids) >= self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens and leaves no room for a reply: "
                    f"max_length is {self.max_length}"
                )
            try:
                own.check(self.cfg.vocab_size)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None
            stops = set(own.stop_token_ids) | (set() if own.ignore_eos else set(self._stop_ids))
            if len(stops) > MAX_STOP_IDS:
                raise ValueError(
                    f"prompt {index} has {len(stops)} stop ids, the model's own included; at most "
                    f"{MAX_STOP_IDS}"
                )
            requests.append(Request(ids, own, tuple(sorted(stops))))
        return requests

    def _stream(self, reply: Collector) -> Iterator[Piece]:
        silent: tuple[int, ...] = ()
        for [piece] in self._drive([reply], is_streaming=True):
            piece = dataclasses.replace(piece, token_ids=silent + piece.token_ids)
            silent = ()
            if reply.finish != Finish.RUNNING:
                yield dataclasses.replace(piece, result=reply.result())
            elif piece.text or piece.reasoning:
                yield piece
            else:
                silent = piece.token_ids

    def _drive(self, replies: Sequence[Collector], *, is_streaming: bool) -> Iterator[list[Piece]]:
        """Runs a batch, feeding every row's collector; yields each row's new piece."""
        compiles = num_compiles()
        proposals = [] if self.engine.drafter is None else self.engine.drafter.proposals
        draft_depth = max((p.depth for p in proposals if p is not None), default=None)
        run = self.engine.run([reply.request for reply in replies], is_streaming=is_streaming)
        for reply in replies:
            reply.draft_depth = draft_depth
        for updates in run:
            pieces = [Piece()] * len(replies)
            for update in updates:
                reply = replies[update.row]
                pieces[update.row] = reply.feed(update)
                if reply.finish != Finish.RUNNING and update.finish == Finish.RUNNING:
                    run.cancel(update.row)
                reply.prefill_seconds = run.prefill_seconds
                reply.decode_seconds = run.decode_seconds
                reply.compiles = num_compiles() - compiles
            yield pieces


@jax.jit
def _log_probability(logits_f32: jax.Array, token: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits_f32, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits_f32, axis=-1)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list; a flat list of ids is one prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(x, (int, np.integer)) for x in listed):
        return [listed]
    return listed


def _mesh(mesh: Mapping[str, int] | str | Mesh | None, platform: str | None) -> Mesh:
    if not isinstance(mesh, Mesh):
        return make_mesh(parse_mesh(mesh) if isinstance(mesh, str) else mesh, platform)
    if set(mesh.axis_names) != set(MESH_AXES):
        raise MeshError(f"mesh axes {mesh.axis_names}; expected {MESH_AXES}")
    kind = mesh.devices.flat[0].platform
    if platform is not None and platform != kind:
        raise MeshError(f"platform is {platform!r}, but the mesh is of {kind} devices")
    # `jax.make_mesh` makes explicit axes, whose arrays refuse what is placed automatically here.
    return Mesh(mesh.devices, mesh.axis_names)


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
