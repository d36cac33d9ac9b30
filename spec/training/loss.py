"""The drafter's loss, summed over the steps of the training-time test.

At step s row i is to give the target's distribution after token i + 1 + s, over the draft
vocabulary:

    cross_entropy   - sum target_probs log draft_probs, target_probs renormalised over the draft
                    vocabulary (EAGLE-3); rows whose most likely token is outside it count nothing
    acceptance      - log sum min(target_probs, draft_probs), target_probs as they are: the sum is
                    the chance that a draft drawn from draft_probs stands (arXiv 2211.17192, 3.1)

Step s weighs `decay`^s. Sums are divided by the number of targets of the first draft step in the
whole optimiser step, so that padding, packing, micro-batches and devices change nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from kimi_jax.axes import pytree_dataclass
from spec.eagle3 import model as eagle3
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3
from spec.training.batches import Batch, HostOrDevice
from spec.training.unroll import ROW_BLOCK, Seen, draft_step, shift, valid_rows

LossName = Literal["cross_entropy", "acceptance"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unrolling:
    """How far the drafter is run on its own output, and what its rows are judged by."""

    draft_steps: int = 7
    decay: float = 0.8
    loss: LossName = "cross_entropy"
    remat: bool = True
    """Whether the backward pass runs each step again, to hold the activations of one alone."""


class Ends(NamedTuple):
    """The target's two vocabulary matrices: all of it that training itself needs."""

    embed_tokens: Float[Array, "V D"]
    lm_head: Float[Array, "D V"]


@pytree_dataclass
class Streams:
    """What the target gives for a batch, in the dtype of its computation."""

    taps: tuple[Float[HostOrDevice, "B T D"], ...]
    """Not read where the drafter takes the final hidden state alone."""
    hidden: Float[HostOrDevice, "B T D"]
    """The final hidden state after the final norm."""


@pytree_dataclass
class Labels:
    """The target's distribution after each token."""

    logits_f32: Float32[Array, "B T W"]
    """Of the draft vocabulary."""
    total_f32: Float32[Array, "B T"]
    """Log of the sum of exponentials over the whole vocabulary."""
    best: Int32[Array, "B T"]
    """The draft id of the most likely token; -1 where the drafter does not know it."""


@pytree_dataclass
class Sums:
    """Sums over the rows trained on, of one draft step or by step.

    `correct` counts rows whose most likely draft is the target's most likely token; `stands` sums
    the chances that a draft drawn from the drafter's distribution is accepted at temperature 1.
    """

    loss_f32: Float32[HostOrDevice, "*K"]
    correct: Int[HostOrDevice, "*K"]
    stands_f32: Float32[HostOrDevice, "*K"]
    rows: Int[HostOrDevice, "*K"]


def make_labels(
    hidden: Float[Array, "B T D"],
    lm_head: Float[Array, "D V"],
    draft_head: Float[Array, "D W"],
    target_to_draft: Int32[Array, " V"],
) -> Labels:
    """The target's distributions from its final hidden states; the head runs a block at a time.

    Args:
        hidden: after the final norm.
        lm_head: the target's.
        draft_head: its columns of the draft vocabulary.
        target_to_draft: the draft id of each token, -1 for none.
    """
    B, T, D = hidden.shape

    def block(h: Float[Array, "B t D"]) -> tuple[jax.Array, jax.Array]:
        logits_f32 = jnp.matmul(h, lm_head.astype(h.dtype), preferred_element_type=jnp.float32)
        best = jnp.argmax(logits_f32, axis=-1).astype(jnp.int32)
        return jax.nn.logsumexp(logits_f32, axis=-1), best

    if T <= ROW_BLOCK:
        total_f32, best = block(hidden)
    else:
        blocks = hidden.reshape(B, -1, ROW_BLOCK, D).swapaxes(0, 1)
        totals, bests = jax.lax.map(block, blocks)
        total_f32, best = (x.swapaxes(0, 1).reshape(B, T) for x in (totals, bests))
    return Labels(
        logits_f32=jnp.matmul(
            hidden, draft_head.astype(hidden.dtype), preferred_element_type=jnp.float32
        ),
        total_f32=total_f32,
        best=target_to_draft[best],
    )


def unrolled_sums(
    model: Eagle3,
    cfg: DrafterConfig,
    batch: Batch,
    streams: Streams,
    embedded: Float[Array, "B T D"],
    labels: Labels,
    unrolling: Unrolling,
    *,
    borrowed_head: Float[Array, "D W"] | None = None,
) -> tuple[Sums, Int[Array, "K B T"]]:
    """Sums by step, and the drafts: each row's most likely draft id, -1 where it is not trained on.

    Args:
        embedded: of the batch's tokens.
        borrowed_head: the target's, where the drafter has none.
    """
    graph, weights = nnx.split(model)
    own_head = getattr(model, "lm_head", None)
    assert own_head is not None or borrowed_head is not None

    def step(weights, feature, valid, seen: Seen):
        model = nnx.merge(graph, weights)
        ahead = 1 + len(seen.keys)
        shifted = shift(embedded, ahead)
        feature, seen = draft_step(model, cfg, feature, shifted, batch.positions, batch.first, seen)
        head = borrowed_head if own_head is None else model.lm_head[...]
        assert head is not None

        def judge(carried, labels, valid):
            logits_f32 = eagle3.head_logits(model, cfg, carried, head)
            return _judge(logits_f32, labels, valid, unrolling.loss)

        shifted_labels = jax.tree.map(lambda x: shift(x, ahead), labels)
        return feature, seen, _in_blocks(judge, feature, shifted_labels, valid)

    if unrolling.remat:
        step = jax.checkpoint(step)
    if cfg.use_aux_hidden_state:
        feature = eagle3.fuse(model, cfg, streams.taps)
    else:
        feature = streams.hidden
    seen = Seen()
    judged = []
    for valid in valid_rows(batch.generated, batch.first, unrolling.draft_steps):
        feature, seen, row = step(weights, feature, valid, seen)
        judged.append(row)
    sums, drafts = zip(*judged, strict=True)
    return jax.tree.map(lambda *x: jnp.stack(x), *sums), jnp.stack(drafts)


def total_loss(sums: Sums, unrolling: Unrolling, num_targets: jax.Array) -> jax.Array:
    """The loss: sums weighed by step, over the targets of the optimiser step."""
    weights = unrolling.decay ** jnp.arange(unrolling.draft_steps, dtype=jnp.float32)
    return jnp.sum(weights * sums.loss_f32) / jnp.maximum(num_targets, 1).astype(jnp.float32)


def _in_blocks(
    judge: Callable[..., tuple[Sums, Int32[Array, "B t"]]],
    carried: Float[Array, "B T D"],
    labels: Labels,
    valid: Bool[Array, "B T"],
) -> tuple[Sums, Int32[Array, "B T"]]:
    """`judge` over so many places at a time that the logits stay small."""
    B, T, _ = carried.shape
    if T <= ROW_BLOCK:
        return judge(carried, labels, valid)
    blocks = jax.tree.map(
        lambda x: x.reshape(B, -1, ROW_BLOCK, *x.shape[2:]).swapaxes(0, 1),
        (carried, labels, valid),
    )
    sums, drafts = jax.lax.map(jax.checkpoint(lambda block: judge(*block)), blocks)
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), sums)
    return total, drafts.swapaxes(0, 1).reshape(B, T)


def _judge(
    logits_f32: Float32[Array, "B T W"], labels: Labels, valid: Bool[Array, "B T"], loss: LossName
) -> tuple[Sums, Int32[Array, "B T"]]:
    log_draft_probs = jax.nn.log_softmax(logits_f32, axis=-1)
    target_probs = jnp.exp(labels.logits_f32 - labels.total_f32[..., None])
    stands_f32 = jnp.sum(jnp.minimum(target_probs, jnp.exp(log_draft_probs)), axis=-1)
    if loss == "cross_entropy":
        within = jax.nn.softmax(labels.logits_f32, axis=-1)
        losses_f32 = -jnp.sum(within * log_draft_probs, axis=-1)
        counted = valid & (labels.best >= 0)
    else:
        losses_f32 = -jnp.log(jnp.maximum(stands_f32, 1e-20))
        counted = valid
    draft = jnp.argmax(logits_f32, axis=-1).astype(jnp.int32)

    def total(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)))

    sums = Sums(
        loss_f32=total(losses_f32, counted),
        correct=jnp.sum(valid & (draft == labels.best), dtype=jnp.int32),
        stands_f32=total(jax.lax.stop_gradient(stands_f32), valid),
        rows=jnp.sum(valid, dtype=jnp.int32),
    )
    return sums, jnp.where(valid, draft, -1)
