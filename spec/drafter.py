"""EAGLE-3 drafters as users hand them to `LLM(path, drafter=...)`."""

import dataclasses
import numbers
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from kimi_jax.axes import Rules, replace
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import grow_rows, insert_row
from kimi_jax.runtime.decode import (
    MAX_BLOCK_TOKENS,
    MAX_DRAFT_DEPTH,
    Chunk,
    DecodeState,
    Step,
)
from kimi_jax.runtime.engine import Controller, abstract_weights, weight_pspecs
from kimi_jax.runtime.llm import DEMO
from kimi_jax.runtime.mesh import MeshError
from spec import draft
from spec.controller import AdaptiveLength, FixedProposal
from spec.cycle import speculative_step
from spec.draft import DraftState
from spec.eagle3 import model as eagle3
from spec.eagle3.checkpoint import DrafterFiles, check_target, open_drafter
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3
from spec.tree import Chain, DynamicTree, Shape, is_count

DEMO_DRAFTER = DEMO / "drafter"
"""The folder of the bundled demo's own drafter."""

DEFAULT_DRAFT_TOKENS = 3
"""What all published drafters for Kimi-K2 models recommend."""

AUTO_DRAFT_TOKENS = (0, 1, 2, 3, 5)
"""What "auto" chooses from: each has its program, so there are few."""

AUTO = "auto"


# It checks its own arguments, and says more about them; so does the class below.
@typing.no_type_check
def load_drafter(
    path_or_id: str | os.PathLike[str],
    *,
    num_draft_tokens: int | str | None = None,
    tree: Shape | None = None,
    sample_drafts: bool = False,
    lossy_threshold: float | None = None,
    taps: Sequence[int] | None = None,
    revision: str | None = None,
) -> "Eagle3Drafter":
    """A published EAGLE-3 drafter, as `LLM(path, drafter=load_drafter(drafter_path))` takes it.

    Its weights are read when the `LLM` is made, onto the target's devices.

    Args:
        path_or_id: a folder in a published format, or a hub id.
        num_draft_tokens: tokens drafted a cycle, 0 to 8, one after the other; None is 3. "auto"
            measures what cycles cost and how many drafts stand, and drafts between 0 and 5 tokens,
            whichever is fastest, so that speculation does not lose to plain decoding.
        tree: drafts a tree in place of a chain, a `StaticTree` or a `DynamicTree`.
        sample_drafts: draws drafts from the drafter's distribution where a request samples, and
            accepts by rejection: the reply has the distribution, not the tokens, of plain decoding
            (at temperature 0, its tokens), and the closer the drafter's distribution is to the
            target's, the more drafts stand. By default drafts are the most likely tokens, and
            replies the very tokens of plain decoding.
        lossy_threshold: takes every draft to which the target gives at least this probability, in
            (0, 1). More drafts stand, and **replies no longer follow the target's distribution**.
            None, the default, is exact.
        taps: the target's streams the drafter reads, as the ids of the layers they enter; None
            takes what its configuration says.
        revision: of a hub id.

    Raises:
        ValueError: an option out of range, or two that contradict each other.
    """
    return Eagle3Drafter(
        path_or_id=path_or_id,
        num_draft_tokens=num_draft_tokens,
        tree=tree,
        sample_drafts=sample_drafts,
        lossy_threshold=lossy_threshold,
        taps=tuple(taps) if isinstance(taps, Sequence) else taps,
        revision=revision,
    )


@typing.no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Drafter:
    """A drafter as `load_drafter` describes it, not yet bound to a target."""

    path_or_id: str | os.PathLike[str]
    num_draft_tokens: int | str | None = None
    tree: Shape | None = None
    sample_drafts: bool = False
    lossy_threshold: float | None = None
    taps: tuple[int, ...] | None = None
    revision: str | None = None

    def __post_init__(self):
        if not isinstance(self.path_or_id, str | os.PathLike):
            raise ValueError(f"path_or_id is {self.path_or_id!r}, expected a folder or a hub id")
        K = self.num_draft_tokens
        if isinstance(K, str):
            is_known = K == AUTO
        else:
            is_known = K is None or (is_count(K) and int(K) <= MAX_DRAFT_DEPTH)
        if not is_known:
            raise ValueError(
                f"num_draft_tokens is {K!r}, expected an integer from 0 to {MAX_DRAFT_DEPTH}, or "
                f"{AUTO!r}"
            )
        if self.tree is not None and not isinstance(self.tree, Shape):
            raise ValueError(f"tree is {self.tree!r}, expected a StaticTree or a DynamicTree")
        if self.tree is not None and K is not None:
            raise ValueError("num_draft_tokens and tree are both given; a tree says its own size")
        is_list = isinstance(self.taps, Sequence) and not isinstance(self.taps, str)
        if self.taps is not None and not (is_list and all(map(is_count, self.taps))):
            raise ValueError(f"taps is {self.taps!r}, expected layer ids (integers from 0)")
        if not isinstance(self.sample_drafts, bool):
            raise ValueError(f"sample_drafts is {self.sample_drafts!r}, expected True or False")
        if self.sample_drafts and isinstance(self.tree, DynamicTree):
            raise ValueError(
                "sample_drafts with a DynamicTree: it grows from the most likely tokens; a "
                "StaticTree can be sampled"
            )
        threshold = self.lossy_threshold
        if threshold is not None:
            is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
            if not is_number or not 0 < threshold < 1:
                raise ValueError(
                    f"lossy_threshold is {threshold!r}, expected a probability between 0 and 1, or "
                    "None for exact replies"
                )
            if self.sample_drafts:
                raise ValueError("lossy_threshold and sample_drafts are both given; take one")
        if not any(shape.num_draft_tokens for shape in self.shapes):
            given = {"sample_drafts": self.sample_drafts, "lossy_threshold": threshold is not None}
            if names := [name for name, is_given in given.items() if is_given]:
                raise ValueError(f"{', '.join(names)}: nothing is drafted")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What a cycle may propose."""
        if self.tree is not None:
            return (self.tree,)
        if self.num_draft_tokens == AUTO:
            return tuple(map(Chain, AUTO_DRAFT_TOKENS))
        K = DEFAULT_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens
        return (Chain(int(K)),)

    def check(self, cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
        """Refuses a target or mesh the drafter's configuration does not fit; reads that alone.

        Raises:
            DrafterError: it is no drafter, or one of another target.
            CheckpointError: no such folder.
            MeshError: the mesh does not divide the drafter.
        """
        folder = resolve(self.path_or_id, revision=self.revision, patterns=("config.json",))
        self._config(folder, cfg, mesh)

    def _config(self, folder: Path, cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> DrafterConfig:
        taps = None if self.taps is None else tuple(self.taps)
        own = DrafterConfig.from_folder(folder, num_target_layers=cfg.num_hidden_layers, taps=taps)
        check_target(own, cfg)
        check_mesh(own, mesh)
        widest = max(shape.num_siblings for shape in self.shapes)
        if widest > own.draft_vocab_size:
            raise ValueError(
                f"{folder}: a draft tree {widest} wide, of a drafter that knows "
                f"{own.draft_vocab_size} tokens"
            )
        return own

    def open(self, cfg: ModelConfig, mesh: Mesh) -> DrafterFiles:
        """Its files, their headers compared with its configuration, that with the target's.

        Raises:
            DrafterError, CheckpointError, MeshError: as `bind`.
        """
        folder = resolve(self.path_or_id, revision=self.revision)
        return open_drafter(folder, self._config(folder, cfg, mesh))

    def bind(self, cfg: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> "BoundEagle3":
        """The drafter for this target, its weights loaded and placed on the mesh.

        Raises:
            DrafterError: the files are no drafter, or one of another target.
            CheckpointError: no such folder, or files that cannot be read.
            MeshError: the mesh does not divide the drafter.
        """
        files = self.open(cfg, mesh)
        own = files.cfg
        graph, weights = load_weights(files, own, mesh, dtype)
        return BoundEagle3(
            cfg=own,
            graph=graph,
            weights=weights,
            taps=eagle3.target_taps(own, cfg),
            shapes=self.shapes,
            sample_drafts=self.sample_drafts,
            lossy_threshold=self.lossy_threshold,
            dtype=dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundEagle3:
    """A drafter ready for one target on one mesh (`engine.BoundDrafter`)."""

    cfg: DrafterConfig
    graph: nnx.GraphDef
    weights: Any
    taps: tuple[int, ...]
    shapes: tuple[Shape, ...]
    sample_drafts: bool = False
    lossy_threshold: float | None = None
    dtype: Any
    controllers: dict[int, Controller] = dataclasses.field(default_factory=dict)
    """Of each batch size: costs differ, and what was learnt is kept."""

    @property
    def proposals(self) -> tuple[Shape | None, ...]:
        """The shapes asked for, and plain decoding past the drafter's own positions."""
        return (None, *self.shapes)

    def pspecs(self, rules: Rules) -> Any:
        """Placement of the weights, in their structure."""
        return weight_pspecs(self.weights, rules)

    def make_step(self, graph: nnx.GraphDef, rules: Rules, proposal: Shape) -> Step:
        """The cycle that drafts this."""
        does_draft = proposal.num_draft_tokens > 0
        return speculative_step(
            graph,
            self.graph,
            self.cfg,
            taps=self.taps,
            shape=proposal,
            is_sampled=self.sample_drafts and does_draft,
            lossy_threshold=self.lossy_threshold if does_draft else None,
            rules=rules,
        )

    def after_block(
        self,
        weights: Any,
        state: DecodeState,
        graph: nnx.GraphDef,
        rules: Rules,
        proposal: Shape,
    ) -> DraftState:
        """Runs the drafter over what a block that drafted nothing has put by."""
        if proposal.num_draft_tokens:
            return state.drafter
        target, model = nnx.merge(graph, weights[0]), nnx.merge(self.graph, weights[1])
        return draft.catch_up(model, self.cfg, target, state, taps=self.taps, rules=rules)

    def init_state(self, batch: int, capacity: int) -> DraftState:
        """No rows, and nothing carried: the first draft of a one-token prompt is a guess."""
        return DraftState(
            cache=eagle3.empty_cache(self.cfg, batch, capacity, self.dtype),
            carried=jnp.zeros((batch, self.cfg.hidden_size), self.dtype),
            pending=jnp.zeros(
                (batch, MAX_BLOCK_TOKENS, len(self.taps) * self.cfg.target_hidden_size), self.dtype
            ),
        )

    def state_pspecs(self, rules: Rules) -> DraftState:
        """Key-value heads are cut like their weights, latent rows are whole on every device."""
        cache = tuple(rules.pspec(axes) for axes in eagle3.cache_axes(self.cfg))
        like = jax.eval_shape(lambda: self.init_state(1, 1))
        return replace(like, cache=cache, carried=rules.pspec("B D"), pending=rules.pspec(""))

    def grow(
        self, drafter_state: DraftState, batch: int, capacity: int, rules: Rules
    ) -> DraftState:
        """The same rows with room for `capacity` slots each; on a device's own part of them."""
        shares = [rules.num_shards(axes.split()[0]) for axes in eagle3.cache_axes(self.cfg)]
        cache = tuple(
            grow_rows(x, batch, capacity // n)
            for x, n in zip(drafter_state.cache, shares, strict=True)
        )
        return replace(drafter_state, cache=cache)

    def insert(self, drafter_state: DraftState, own: DraftState, row: jax.Array) -> DraftState:
        """The same with this row taken from `own`: its slots, what it carries, what is pending."""
        return insert_row(drafter_state, own, row)

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

    def controller(self, batch: int) -> Controller:
        """The shape as asked, or of several lengths the one that promises most."""
        if batch not in self.controllers:
            limit = self.cfg.max_position_embeddings
            if len(self.shapes) == 1:
                self.controllers[batch] = FixedProposal(self.shapes[0], limit)
            else:
                lengths = [shape.num_draft_tokens for shape in self.shapes]
                self.controllers[batch] = AdaptiveLength(lengths, limit)
        return self.controllers[batch]


def load_weights(
    files: DrafterFiles, cfg: DrafterConfig, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, Any]:
    """A drafter's module structure and its weights, placed on the mesh in this dtype."""
    owned = {
        "has_own_embedding": files.has_own_embedding,
        "has_own_head": files.has_own_head,
        "has_map": files.has_map,
    }
    graph, shapes = abstract_weights(
        lambda: Eagle3(cfg, **owned, dtype=dtype, rngs=nnx.Rngs(0)), mesh
    )
    flat = []
    for path, param in nnx.to_flat_state(shapes):
        value = files.read(".".join(map(str, path))).astype(param.dtype)
        flat.append((path, param.replace(jax.device_put(value, param.get_value().sharding))))
    return graph, nnx.from_flat_state(flat)


def abstract_drafter(
    cfg: DrafterConfig,
    target: ModelConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    shapes: tuple[Shape, ...],
) -> BoundEagle3:
    """A drafter whose weights are shapes, for lowering programs; it cannot run.

    As the published Llama-style ones it has its own head and lends the target's embedding.

    Raises:
        DrafterError: one of another target.
        MeshError: the mesh does not divide the drafter.
    """
    check_target(cfg, target)
    check_mesh(cfg, mesh)
    has_map = cfg.draft_vocab_size < cfg.vocab_size
    graph, weights = abstract_weights(
        lambda: Eagle3(
            cfg,
            has_own_embedding=False,
            has_own_head=True,
            has_map=has_map,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        ),
        mesh,
    )
    return BoundEagle3(
        cfg=cfg,
        graph=graph,
        weights=weights,
        taps=eagle3.target_taps(cfg, target),
        shapes=shapes,
        dtype=dtype,
    )


def check_mesh(cfg: DrafterConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a mesh that does not divide the drafter.

    Raises:
        MeshError: names the sizes that do not divide.
    """
    sizes = {
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "intermediate_size": cfg.intermediate_size,
        "draft_vocab_size": cfg.draft_vocab_size,
    }
    if bad := [f"{name} {size}" for name, size in sizes.items() if size % mesh.size]:
        working = [n for n in range(1, mesh.size) if not any(size % n for size in sizes.values())]
        raise MeshError(
            f"a mesh of {mesh.size} devices does not divide the drafter: {', '.join(bad)}. Numbers "
            f"that do: {', '.join(map(str, working))}; or decode without one"
        )
