"""Drafting a chain of tokens, and keeping the drafter's cache true to the target's."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.axes import Rules, pytree_dataclass
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.decode import Chunk, DecodeState
from kimi_jax.runtime.sampling import argmax_tokens, filter_logits, gather_vocab, sample_tokens
from spec.eagle3 import model as eagle3
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Cache, Eagle3

DRAFT_USE = 2
"""Of the random draws at one position (`position_keys`), the one that samples a draft."""


@pytree_dataclass
class DraftState:
    """What the drafter keeps of each row: true to the text up to the newest token's place.

    With n tokens in the target's cache, rows 0..n-1 are in the drafter's (the last one holds the
    newest token), all made from the target's own features, and `carried` is what row n-1 carries.
    """

    cache: Cache
    carried: Float[Array, "B D"]


class Drafts(NamedTuple):
    """Proposed target ids, and for sampled ones the logits of the distribution they come from."""

    tokens: Int32[Array, "B K"]
    logits_f32: Float32[Array, "B K V"] | None


def draft_chain(
    model: Eagle3,
    cfg: DrafterConfig,
    target: Kimi,
    state: DecodeState,
    *,
    num_draft_tokens: int,
    is_sampled: bool,
    rules: Rules,
) -> tuple[Drafts, Cache]:
    """K tokens a row, one after the other, and the drafter's cache with their temporary rows.

    Each is the drafter's most likely token, or with `is_sampled` a draw from its distribution under
    the row's temperature and filters (a greedy row still takes the most likely one).
    """
    own: DraftState = state.drafter
    carried, cache = own.carried, own.cache
    # Row n-1 gives the first draft; the draft in place k-1 makes row n-1+k, which gives the next.
    last = state.lengths - 2
    tokens: list[jax.Array] = []
    kept_logits: list[jax.Array] = []
    with jax.named_scope("draft"):
        for k in range(num_draft_tokens):
            if k:
                rows, cache = eagle3.forward(
                    model,
                    cfg,
                    carried[:, None],
                    tokens[-1][:, None],
                    (last + k)[:, None],
                    cache,
                    target,
                    rules=rules,
                )
                carried = rows[:, 0]
            logits_f32 = eagle3.draft_logits(model, cfg, carried, target)
            axis = rules.mesh_axes("W")
            if is_sampled:
                whole = gather_vocab(logits_f32, axis)
                whole = eagle3.to_target_logits(model, whole, cfg.vocab_size)
                filtered = filter_logits(whole, state.sampling)
                kept_logits.append(filtered)
                positions = state.lengths + k
                tokens.append(
                    sample_tokens(
                        filtered, sampling=state.sampling, positions=positions, use=DRAFT_USE
                    )
                )
            else:
                tokens.append(eagle3.to_target_ids(model, argmax_tokens(logits_f32, axis)))
    B = state.lengths.shape[0]
    stacked = jnp.stack(tokens, axis=1) if tokens else jnp.zeros((B, 0), jnp.int32)
    return Drafts(stacked, jnp.stack(kept_logits, axis=1) if kept_logits else None), cache


def extend(
    model: Eagle3,
    cfg: DrafterConfig,
    target: Kimi,
    cache: Cache,
    *,
    taps: tuple[Float[Array, "B T D"], ...],
    next_tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    num_true: Int32[Array, " B"],
    rules: Rules,
) -> DraftState:
    """The drafter's state after T verified rows, of which the first `num_true` a row are true.

    All rows run at a fixed shape with the target's features, over whatever drafting left in their
    slots (keeping that costs 8-15 % of the accepted length, vLLM issue 14649). Rows past the true
    ones are written over by the next cycle before anything attends to them.
    """
    feature = eagle3.features(model, cfg, taps, target)
    rows, cache = eagle3.forward(
        model, cfg, feature, next_tokens, positions, cache, target, rules=rules
    )
    last = (num_true - 1)[:, None, None]
    return DraftState(cache=cache, carried=jnp.take_along_axis(rows, last, axis=1)[:, 0])


def prefill(
    model: Eagle3,
    cfg: DrafterConfig,
    target: Kimi,
    own: DraftState,
    chunk: Chunk,
    rules: Rules,
) -> DraftState:
    """The drafter's state with one prompt chunk taken in.

    The last row of a chunk holds the prompt's true next token, whether or not it is in the chunk.
    """
    feature = eagle3.features(model, cfg, chunk.taps, target)
    rows, cache = eagle3.forward(
        model,
        cfg,
        feature,
        chunk.next_tokens,
        chunk.positions,
        own.cache,
        target,
        rules=rules,
        is_prefill=True,
    )
    count = jnp.sum(chunk.is_real.astype(jnp.int32), axis=1)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(rows, last, axis=1)[:, 0]
    carried = jnp.where((count > 0)[:, None], newest, own.carried)
    return DraftState(cache=cache, carried=carried)
