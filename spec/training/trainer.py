"""The optimiser step of a drafter: gradients of the unrolled loss, AdamW, over the mesh.

Rows of a batch are cut over all devices; weights and optimiser state are whole on each, or cut too
and gathered where they are used. Weights are float32; the computation runs in the streams' dtype.
It knows nothing of files, logs or time.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.axes import pytree_dataclass
from kimi_jax.model.layers import take_rows
from kimi_jax.runtime.decode import Weights
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3
from spec.training.batches import Batch
from spec.training.loss import (
    Ends,
    Labels,
    Streams,
    Sums,
    Unrolling,
    make_labels,
    total_loss,
    unrolled_sums,
)
from spec.training.unroll import shift


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimisation:
    """AdamW without decay of gains; the learning rate rises, then falls along a cosine to zero.

    The defaults are those that public EAGLE-3 drafters were trained with (SpecForge).
    """

    learning_rate: float = 1e-4
    num_steps: int
    warmup_share: float = 0.015
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    placement: Literal["replicated", "sharded"] = "replicated"

    def schedule(self) -> optax.Schedule:
        """The learning rate of each step."""
        warmup = max(1, round(self.warmup_share * self.num_steps))
        return optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (warmup + 1),
            peak_value=self.learning_rate,
            warmup_steps=warmup,
            decay_steps=max(self.num_steps, warmup + 1),
        )

    def transformation(self) -> optax.GradientTransformation:
        """Clipping by the global norm, then AdamW."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(
                self.schedule(),
                b1=self.b1,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
            ),
        )


@pytree_dataclass
class TrainState:
    """What a step changes; `weights` are the trained ones alone."""

    weights: Weights
    optimizer: optax.OptState
    step: jax.Array


@pytree_dataclass
class StepReport:
    """What one optimiser step measured."""

    loss: jax.Array
    gradient_norm: jax.Array
    is_finite: jax.Array
    """Where it is not, the step changed nothing."""
    sums: Sums


class Example(NamedTuple):
    """A micro-batch with what the target says of it."""

    batch: Batch
    streams: Streams


class Trainer:
    """Runs steps for one drafter; it holds what is frozen, the caller holds the state.

    The embedding is frozen, the target's or the drafter's own; so is the map to target ids.
    """

    def __init__(
        self,
        cfg: DrafterConfig,
        model: Eagle3,
        ends: Ends,
        *,
        unrolling: Unrolling,
        optimisation: Optimisation,
        mesh: Mesh,
    ):
        self.cfg, self.unrolling, self.optimisation = cfg, unrolling, optimisation
        self.mesh = mesh
        self._whole = NamedSharding(mesh, PartitionSpec())
        self.row_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._graph, weights, frozen = nnx.split(model, is_trained, ...)
        # On the host: a step gives its state up, and weights that are cut need no whole copy.
        self._first_weights = jax.device_get(weights)
        self._frozen = jax.device_put(frozen, self._whole)
        self._ends = ends
        draft_ids = _draft_ids(model, cfg)
        to_draft = np.full((cfg.vocab_size,), -1, np.int32)
        to_draft[draft_ids] = np.arange(len(draft_ids))
        self._to_draft = jax.device_put(to_draft, self._whole)
        self._draft_ids = jax.device_put(draft_ids, self._whole)
        self._draft_head = jax.jit(lambda head: head[:, draft_ids], out_shardings=self._whole)(
            ends.lm_head
        )
        self._has_own_head = hasattr(model, "lm_head")
        self._optimizer = optimisation.transformation()
        self._placements = jax.tree.map(self._placement, weights)
        self._labels = jax.jit(make_labels)
        self._gradients = jax.jit(self._run_gradients)
        self._update = jax.jit(self._run_update, donate_argnames="state")
        self._evaluate = jax.jit(self._run_evaluate)

    def init_state(self) -> TrainState:
        """The state before the first step."""
        placed = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        return jax.jit(self._begin, out_shardings=placed)(self._first_weights)

    def abstract_state(self) -> Any:
        """A `TrainState` of shapes, dtypes and placements, for restoring one."""

        def struct(x: Any, placement: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)

        shapes = jax.eval_shape(self._begin, self._first_weights)
        optimizer = optax.tree_utils.tree_map_params(
            self._optimizer,
            struct,
            shapes.optimizer,
            self._placements,
            transform_non_params=lambda x: struct(x, self._whole),
        )
        weights = jax.tree.map(struct, shapes.weights, self._placements)
        leaves = jax.tree.leaves((weights, optimizer, struct(shapes.step, self._whole)))
        # Not by the constructor, which takes arrays alone.
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def place(self, batch: Batch, streams: Streams) -> Example:
        """Both on the devices, rows cut over them.

        Raises:
            ValueError: the rows do not divide by the devices.
        """
        rows, devices = batch.tokens.shape[0], self.mesh.size
        if rows % devices:
            raise ValueError(f"{rows} rows a batch do not divide over {devices} devices")
        return Example(*jax.device_put((batch, streams), self.row_sharding))

    def train_step(
        self, state: TrainState, examples: Iterable[Example], num_targets: int
    ) -> tuple[TrainState, StepReport]:
        """One step over the micro-batches; a loss or gradient that is not finite changes nothing.

        Args:
            state: given up to the new one.
            examples: the step's micro-batches, each dropped before the next is taken.
            num_targets: rows trained on at the first draft step, in all of them.
        """
        gradients, sums, loss = self.gradients(state, examples, num_targets)
        return self._update(state, gradients, loss, sums)

    def gradients(
        self, state: TrainState, examples: Iterable[Example], num_targets: int
    ) -> tuple[Weights, Sums, jax.Array]:
        """Gradients, sums by step, and the loss of a step over these micro-batches."""
        count = jnp.int32(num_targets)
        total: Any = None
        for example in examples:
            labels = self.labels(example)
            part = self._gradients(
                state.weights, self._frozen, example, labels, self._ends, self._draft_head, count
            )
            total = part if total is None else _add(total, part)
        return total

    def labels(self, example: Example) -> Labels:
        """The target's distributions over an example."""
        return self._labels(
            example.streams.hidden, self._ends.lm_head, self._draft_head, self._to_draft
        )

    def evaluate(self, state: TrainState, example: Example) -> tuple[Sums, jax.Array, jax.Array]:
        """Sums of one batch; where each draft is the token the text has, and which rows count.

        Both bool [K, B, T].
        """
        return self._evaluate(
            state.weights,
            self._frozen,
            example,
            self.labels(example),
            self._ends,
            self._draft_head,
            self._draft_ids,
        )

    def weights(self, state: TrainState) -> Weights:
        """All of the drafter's weights, in the structure `nnx.split` gives the whole model."""
        model = nnx.merge(self._graph, state.weights, self._frozen)
        return nnx.split(model)[1]

    # Inside.

    def _begin(self, weights: Weights) -> TrainState:
        return TrainState(
            weights=weights,
            optimizer=self._optimizer.init(weights),
            step=jnp.zeros((), jnp.int32),
        )

    def _placement(self, x: jax.Array) -> NamedSharding:
        """Whole, or cut along the largest axis that divides."""
        if self.optimisation.placement == "sharded" and self.mesh.size > 1:
            for axis in sorted(range(x.ndim), key=lambda axis: -x.shape[axis]):
                if x.shape[axis] % self.mesh.size == 0:
                    entries = [None] * axis + [self.mesh.axis_names]
                    return NamedSharding(self.mesh, PartitionSpec(*entries))
        return self._whole

    def _sums(self, weights, frozen, example: Example, labels: Labels, ends: Ends, draft_head):
        # Weights that are cut are gathered here, in the dtype of the computation, and not turned
        # into sums of partial products.
        dtype = example.streams.hidden.dtype
        weights = jax.tree.map(lambda x: x.astype(dtype), weights)
        weights = jax.lax.with_sharding_constraint(weights, self._whole)
        model = nnx.merge(self._graph, weights, frozen)
        own = getattr(model, "embed_tokens", None)
        table = ends.embed_tokens if own is None else own[...]
        batch, streams = example
        return unrolled_sums(
            model,
            self.cfg,
            batch,
            streams,
            take_rows(table, batch.tokens),
            labels,
            self.unrolling,
            borrowed_head=None if self._has_own_head else draft_head,
        )

    def _run_gradients(self, weights, frozen, example, labels, ends, draft_head, num_targets):
        def loss_of(weights):
            sums, _ = self._sums(weights, frozen, example, labels, ends, draft_head)
            return total_loss(sums, self.unrolling, num_targets), sums

        (loss, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return jax.lax.with_sharding_constraint(gradients, self._placements), sums, loss

    def _run_update(self, state: TrainState, gradients, loss, sums):
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Optax raises Python numbers to the power of its step count.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.weights)
            weights = optax.apply_updates(state.weights, updates)
        new = TrainState(weights=weights, optimizer=optimizer, step=state.step + 1)
        new = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, state)
        return new, StepReport(loss=loss, gradient_norm=norm, is_finite=is_finite, sums=sums)

    def _run_evaluate(self, weights, frozen, example, labels, ends, draft_head, draft_ids):
        sums, drafts = self._sums(weights, frozen, example, labels, ends, draft_head)
        steps = range(self.unrolling.draft_steps)
        wanted = jnp.stack([shift(example.batch.tokens, s + 2) for s in steps])
        counts = drafts >= 0
        return sums, (draft_ids[jnp.maximum(drafts, 0)] == wanted) & counts, counts


def is_trained(path: tuple, value: Any) -> bool:
    """Whether a weight of the drafter is trained: all but the embedding and the map."""
    return isinstance(value, nnx.Param) and path[0] != "embed_tokens"


def _draft_ids(model: Eagle3, cfg: DrafterConfig) -> np.ndarray:
    table = getattr(model, "draft_to_target", None)
    return np.arange(cfg.draft_vocab_size) if table is None else np.asarray(table[...])


@functools.partial(jax.jit, donate_argnums=0)
def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
