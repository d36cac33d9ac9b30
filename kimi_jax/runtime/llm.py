"""`LLM`: a checkpoint, its text and an engine behind the calls users make.

It loads, checks what callers give, and hands requests to the engine and ids to the collectors; the
README shows it in use.
"""

import dataclasses
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
from kimi_jax.runtime.decode import Finish
from kimi_jax.runtime.engine import PREFILL_SIZES, Drafter, Engine, Request
from kimi_jax.runtime.mesh import (
    MESH_AXES,
    MeshError,
    check_cache,
    check_sizes,
    make_mesh,
    parse_mesh,
)
from kimi_jax.runtime.placement import abstract_model, kept_dtypes
from kimi_jax.runtime.replies import ChatCollector, Collector, Piece, Result, TextCollector
from kimi_jax.runtime.requests import Prompt, RequestMaker, as_list
from kimi_jax.runtime.run import Run
from kimi_jax.runtime.sampling import SamplingParams

_log = logging.getLogger(__name__)

DEMO = Path(__file__).resolve().parents[1] / "demo"
"""The bundled demo checkpoint's folder."""

DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16")}
SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model")


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
        cache: "replicated" holds the latent cache whole on every device; "sequence" shares its
            slots out over the mesh, for long contexts: a share of the memory, two more exchanges
            a layer.
        few_programs: compiles for one and `max_batch` rows only, and for caches of 4096 slots or
            more: for large models, of which a program takes a minute to compile and a few slots
            or rows more cost little beside the weights.
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
        cache: str = "replicated",
        few_programs: bool = False,
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
        self.requests = RequestMaker.from_folder(folder, cfg, max_length)
        self.tokenizer, self.max_length = self.requests.tokenizer, self.requests.max_length
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {sorted(DTYPES)}")
        self.mesh = _mesh(mesh, platform)
        check_sizes(cfg, self.mesh)
        check_cache(cache, self.mesh)
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
            dtypes=kept_dtypes(plan, DTYPES[self.dtype], platform=kind),
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
            cache=cache,
            few_programs=few_programs,
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
        """A result for each prompt, in order.

        As many as `max_batch` run together, and where one ends the next begins.

        Args:
            prompts: texts or token-id lists, one or many. Text is encoded as it is, without a
                template. An empty prompt begins with the BOS token.
            params: for all prompts, or one for each; None is greedy.

        Raises:
            ValueError: a prompt or option that cannot run, named by its index, before any runs.
        """
        requests = self._requests(prompts, params)
        replies = (TextCollector(self.tokenizer, request) for request in requests)
        results = dict(self.as_finished(replies))
        return [results[index] for index in range(len(requests))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields the reply piece by piece, never half a character or part of a stop string.

        The last piece carries the `Result`. Leaving the loop early ends the request.
        """
        return self._stream(self.text_reply(prompt, params))

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
        reply = self.chat_reply(messages, params, thinking=thinking, tools=tools)
        [(_, result)] = self.as_finished([reply])
        return result

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[Piece]:
        """`chat`, piece by piece: reasoning and content as they come, the result at the end."""
        return self._stream(self.chat_reply(messages, params, thinking=thinking, tools=tools))

    def text_reply(self, prompt: Prompt, params: SamplingParams | None = None) -> TextCollector:
        """What `stream` would give, not begun: for `as_finished`."""
        (request,) = self._requests([prompt], params)
        return TextCollector(self.tokenizer, request)

    def chat_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatCollector:
        """What `chat` would give, not begun: for `as_finished`."""
        request = self.chat_request(messages, params, thinking=thinking, tools=tools)
        return ChatCollector(self.tokenizer, request)

    def as_finished(self, replies: Iterable[Collector]) -> Iterator[tuple[int, Result]]:
        """Each reply's place and result, in the order in which they end.

        Replies are asked for as rows are free, and one ahead, so there may be any number of them.

        Raises:
            Exception: what asking for a reply raised; those on their way then end with the loop.
        """
        for index, reply, _ in self._drive(replies, is_streaming=False):
            if reply.finish != Finish.RUNNING:
                yield index, reply.result()

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Request:
        """The request `chat` runs: the rendered prompt and the options in force."""
        return self.requests.chat_request(messages, params, thinking=thinking, tools=tools)

    # Evaluating.

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 [T, V]: the model's logits after each token."""
        ids = self.requests.check_prompt(token_ids, "token_ids")
        parts = [np.asarray(part) for part in self.engine.logits(ids)]
        return np.concatenate(parts)[: len(ids)]

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Per prompt, float32 [T - 1]: the log-probability of each token given those before it."""
        scores = []
        for index, prompt in enumerate(as_list(prompts)):
            ids = self.requests.check_prompt(prompt, f"prompt {index}")
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
        ids = None if text is None else self.requests.check_prompt(text, "text")
        current = drafter.controller(1).current
        seconds = self.engine.cycle_seconds([current, None], text=ids, params=params)
        return seconds[current], seconds[None]

    def warm_up(self) -> int:
        """Compiles every program a request can reach, so that none compiles later."""
        num_programs = self.engine.warm_up(with_logits=True)
        self.score([[0] * min(size, self.max_length) for size in PREFILL_SIZES])
        return num_programs

    # Inside.

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        return self.requests.requests(prompts, params)

    def _stream(self, reply: Collector) -> Iterator[Piece]:
        silent: tuple[int, ...] = ()
        for _, _, piece in self._drive([reply], is_streaming=True):
            piece = dataclasses.replace(piece, token_ids=silent + piece.token_ids)
            silent = ()
            if reply.finish != Finish.RUNNING:
                yield dataclasses.replace(piece, result=reply.result())
            elif piece.text or piece.reasoning:
                yield piece
            else:
                silent = piece.token_ids

    def _drive(
        self, replies: Iterable[Collector], *, is_streaming: bool
    ) -> Iterator[tuple[int, Collector, Piece]]:
        """Runs replies, feeding each what comes for it: its place, itself, and its new piece."""
        proposals = [] if self.engine.drafter is None else self.engine.drafter.proposals
        draft_depth = max((p.depth for p in proposals if p is not None), default=None)
        running: dict[int, Collector] = {}

        def requests() -> Iterator[Request]:
            for index, reply in enumerate(replies):
                reply.draft_depth = draft_depth
                running[index] = reply
                yield reply.request

        run = Run(self.engine, requests(), is_streaming=is_streaming)
        for updates in run:
            for update in updates:
                reply = running[update.index]
                piece = reply.feed(update)
                if reply.finish != Finish.RUNNING:
                    del running[update.index]
                    if update.finish == Finish.RUNNING:
                        run.cancel(update.index)
                yield update.index, reply, piece


@jax.jit
def _log_probability(logits_f32: jax.Array, token: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits_f32, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits_f32, axis=-1)


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
