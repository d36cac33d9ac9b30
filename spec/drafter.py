"""The EAGLE-3 drafter a user hands to `LLM(path, drafter=...)`."""

import dataclasses
import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kimi_jax.axes import Rules, replace
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import grow_rows
from kimi_jax.runtime.decode import MAX_DRAFT_TOKENS, Chunk, Step
from kimi_jax.runtime.engine import Controller, weight_pspecs
from kimi_jax.runtime.mesh import MeshError, rules_for
from spec import draft
from spec.controller import FastestLength, FixedLength
from spec.cycle import speculative_step
from spec.draft import DraftState
from spec.eagle3 import model as eagle3
from spec.eagle3.checkpoint import DrafterFiles, check_target, open_drafter
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3

DEFAULT_DRAFT_TOKENS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """A published EAGLE-3 drafter, as `LLM(path, drafter=Eagle3Drafter(drafter_path))` takes it.

    Args:
        path_or_id: a folder in a published format, or a hub id.
        num_draft_tokens: tokens drafted a cycle, 0 to 8. Several, such as (0, 1, 3): each has its
            program, and blocks use the one that has been fastest.
        sample_drafts: draws drafts from the drafter's distribution where a request samples, and
            accepts by rejection (more drafts stand; the distribution, not the tokens, is that of
            plain decoding; at temperature 0, its tokens). By default drafts are the most likely
            tokens, and replies the very tokens of plain decoding.
        taps: the target's streams the drafter reads, as the ids of the layers they enter; None
            takes what its configuration says.
        revision: of a hub id.

    Raises:
        ValueError: an option out of range.
    """

    path_or_id: str | os.PathLike[str]
    num_draft_tokens: int | Sequence[int] = DEFAULT_DRAFT_TOKENS
    sample_drafts: bool = False
    taps: Sequence[int] | None = None
    revision: str | None = None

    def __post_init__(self):
        choices = self._choices()
        if not choices or not all(_is_id(k) and k <= MAX_DRAFT_TOKENS for k in choices):
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens!r}, expected an integer from 0 to "
                f"{MAX_DRAFT_TOKENS}, or a sequence of such"
            )
        if self.taps is not None and not all(map(_is_id, self.taps)):
            raise ValueError(f"taps is {self.taps!r}, expected layer ids (integers from 0)")
        if not isinstance(self.sample_drafts, bool):
            raise ValueError(f"sample_drafts is {self.sample_drafts!r}, expected True or False")

    def _choices(self) -> tuple[int, ...]:
        given = self.num_draft_tokens
        return tuple(sorted(set(given))) if isinstance(given, Sequence) else (given,)

    def check(self, cfg: ModelConfig, mesh: Mesh) -> None:
        """Refuses a target or mesh the drafter's configuration does not fit; reads that alone.

        Raises:
            DrafterError: it is no drafter, or one of another target.
            CheckpointError: no such folder.
            MeshError: the mesh does not divide the drafter.
        """
        folder = resolve(self.path_or_id, revision=self.revision, patterns=("config.json",))
        self._config(folder, cfg, mesh)

    def _config(self, folder: Path, cfg: ModelConfig, mesh: Mesh) -> DrafterConfig:
        taps = None if self.taps is None else tuple(self.taps)
        own = DrafterConfig.from_folder(folder, num_target_layers=cfg.num_hidden_layers, taps=taps)
        check_target(own, cfg)
        _check_mesh(own, mesh)
        return own

    def bind(self, cfg: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> "BoundEagle3":
        """The drafter for this target, its weights loaded and placed on the mesh.

        Raises:
            DrafterError: the files are no drafter, or one of another target.
            CheckpointError: no such folder, or files that cannot be read.
            MeshError: the mesh does not divide the drafter.
        """
        folder = resolve(self.path_or_id, revision=self.revision)
        own = self._config(folder, cfg, mesh)
        files = open_drafter(folder, own)
        graph, weights = _load(files, own, mesh, dtype)
        choices = self._choices()
        limit = own.max_position_embeddings
        is_fixed = len(choices) == 1
        return BoundEagle3(
            cfg=own,
            graph=graph,
            weights=weights,
            taps=eagle3.target_taps(own, cfg),
            # 0 serves rows past the drafter's own positions.
            num_draft_tokens=tuple(sorted({0, *choices})),
            asked=choices,
            own_controller=FixedLength(*choices, limit)
            if is_fixed
            else FastestLength(choices, limit),
            sample_drafts=self.sample_drafts,
            dtype=dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundEagle3:
    """A drafter ready for one target on one mesh (`engine.BoundDrafter`)."""

    cfg: DrafterConfig
    graph: nnx.GraphDef
    weights: Any
    taps: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    asked: tuple[int, ...]
    own_controller: Controller
    sample_drafts: bool
    dtype: Any

    def pspecs(self, rules: Rules) -> Any:
        """Placement of the weights, in their structure."""
        return weight_pspecs(self.weights, rules)

    def make_step(self, graph: nnx.GraphDef, rules: Rules, num_draft_tokens: int) -> Step:
        """The cycle that drafts so many tokens."""
        return speculative_step(
            graph,
            self.graph,
            self.cfg,
            taps=self.taps,
            num_draft_tokens=num_draft_tokens,
            is_sampled=self.sample_drafts and num_draft_tokens > 0,
            rules=rules,
        )

    def init_state(self, batch: int, capacity: int) -> DraftState:
        """No rows, and nothing carried: the first draft of a one-token prompt is a guess."""
        return DraftState(
            cache=eagle3.empty_cache(self.cfg, batch, capacity, self.dtype),
            carried=jnp.zeros((batch, self.cfg.hidden_size), self.dtype),
        )

    def state_pspecs(self, rules: Rules) -> DraftState:
        """Key-value heads are cut like their weights, latent rows are whole on every device."""
        cache = tuple(rules.pspec(axes) for axes in eagle3.cache_axes(self.cfg))
        like = jax.eval_shape(lambda: self.init_state(1, 1))
        return replace(like, cache=cache, carried=rules.pspec("B D"))

    def grow(self, drafter_state: DraftState, batch: int, capacity: int) -> DraftState:
        """The same rows with room for `capacity` slots each."""
        cache = tuple(grow_rows(x, batch, capacity) for x in drafter_state.cache)
        return DraftState(cache=cache, carried=drafter_state.carried)

    def prefill(
        self,
        weights: Any,
        drafter_state: DraftState,
        chunk: Chunk,
        graph: nnx.GraphDef,
        rules: Rules,
    ) -> DraftState:
        """The state with one prompt chunk taken in."""
        target, model = nnx.merge(graph, weights[0]), nnx.merge(self.graph, weights[1])
        return draft.prefill(model, self.cfg, target, drafter_state, chunk, rules)

    def controller(self) -> Controller:
        """K as asked, or the fastest of those asked for so far."""
        return self.own_controller


def _load(
    files: DrafterFiles, cfg: DrafterConfig, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, Any]:
    owned = {
        "has_own_embedding": files.has_own_embedding,
        "has_own_head": files.has_own_head,
        "has_map": files.has_map,
    }
    abstract = nnx.eval_shape(lambda: Eagle3(cfg, **owned, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    rules = rules_for(mesh)
    flat = []
    for path, param in nnx.to_flat_state(state):
        value = files.read(".".join(map(str, path))).astype(param.dtype)
        placement = NamedSharding(mesh, rules.pspec(param.axes))
        flat.append((path, param.replace(jax.device_put(value, placement))))
    return graph, nnx.from_flat_state(flat)


def _check_mesh(cfg: DrafterConfig, mesh: Mesh) -> None:
    """Refuses a mesh that does not divide the drafter."""
    sizes = {
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "intermediate_size": cfg.intermediate_size,
        "draft_vocab_size": cfg.draft_vocab_size,
    }
    if bad := [f"{name} {size}" for name, size in sizes.items() if size % mesh.size]:
        raise MeshError(
            f"a mesh of {mesh.size} devices does not divide the drafter: {', '.join(bad)}"
        )


def _is_id(value: Any) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= 0
