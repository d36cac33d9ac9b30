"""Which drafts stand: exact for every drafter, in greedy decoding and in sampling.

`accept_equal` asks of each row what plain decoding would choose there, with the row's own options
and the randomness of that position, and keeps drafts while they are it. The reply is then the very
tokens of plain decoding, sampled or not. For a drafter that proposes its most likely token this
accepts with probability p(draft), as rejection sampling against a certain proposal does.

`accept_sampled` is speculative sampling (arXiv 2211.17192, section 2.3) for drafts drawn from a
known distribution q: a draft stands with probability min(1, p/q), and the first that falls is
replaced by a draw from max(p - q, 0). It accepts more, sum(min(p, q)), and keeps the distribution,
not the tokens, of plain decoding. At temperature 0 both give the tokens of plain decoding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kimi_jax.axes import Rules
from kimi_jax.runtime.decode import DecodeState
from kimi_jax.runtime.sampling import (
    Choice,
    choose_tokens,
    describe_tokens,
    edit_logits,
    filter_logits,
    gather_vocab,
    position_keys,
    repeat_rows,
    sample_tokens,
)

ACCEPT_USE = 1
"""Of the random draws at one position (`position_keys`), the one that accepts a draft."""


def accept_equal(
    logits_f32: Float32[Array, "B T V"],
    drafts: Int32[Array, "B K"],
    state: DecodeState,
    rules: Rules,
) -> tuple[Choice, Int32[Array, " B"]]:
    """What plain decoding chooses in each row, and how many rows of it follow from the drafts.

    Args:
        logits_f32: this device's part of the target's, after the newest token and each draft.
        drafts: target ids, one fewer than the rows.

    Returns:
        The choice, fields [B, T, ...], and the accepted drafts plus one, [B].
    """
    rows = _Rows(state, drafts)
    choice = choose_tokens(
        logits_f32.reshape(-1, logits_f32.shape[-1]),
        tokens=rows.tokens,
        lengths=rows.lengths,
        prompt_lengths=rows.prompt_lengths,
        sampling=rows.sampling,
        axis=rules.mesh_axes("V"),
    )
    chosen = jax.tree.map(rows.unflatten, choice)
    is_equal = chosen.token[:, :-1] == drafts
    return chosen, 1 + _num_leading(is_equal)


def accept_sampled(
    logits_f32: Float32[Array, "B T V"],
    drafts: Int32[Array, "B K"],
    draft_logits_f32: Float32[Array, "B K V"],
    state: DecodeState,
    rules: Rules,
) -> tuple[Choice, Int32[Array, " B"]]:
    """`accept_equal` for drafts drawn from the softmax of `draft_logits_f32`, by rejection."""
    rows = _Rows(state, drafts)
    B, K = drafts.shape
    flat = logits_f32.reshape(-1, logits_f32.shape[-1])
    axis = rules.mesh_axes("V")
    edited = edit_logits(
        flat,
        tokens=rows.tokens,
        lengths=rows.lengths,
        prompt_lengths=rows.prompt_lengths,
        sampling=rows.sampling,
        axis=axis,
    )
    filtered = filter_logits(gather_vocab(edited, axis), rows.sampling)
    target_probs = rows.unflatten(jax.nn.softmax(filtered, axis=-1))
    draft_probs = jax.nn.softmax(draft_logits_f32, axis=-1)
    at = drafts[:, :, None]
    target_prob = jnp.take_along_axis(target_probs[:, :K], at, axis=-1)[..., 0]
    draft_prob = jnp.take_along_axis(draft_probs, at, axis=-1)[..., 0]
    is_accepted = _uniform(state, K) * draft_prob < target_prob
    num_accepted = _num_leading(is_accepted)
    # After the last draft nothing was proposed: the rest there is the target's own distribution.
    first_fallen = num_accepted[:, None, None]
    target_here = jnp.take_along_axis(target_probs, first_fallen, axis=1)[:, 0]
    draft_padded = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0)))
    draft_here = jnp.take_along_axis(draft_padded, first_fallen, axis=1)[:, 0]
    rest = jnp.maximum(target_here - draft_here, 0.0)
    # Where the drafter's covers the target's, rounding alone refused the draft.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, target_here)
    replacement = sample_tokens(
        jnp.log(rest), sampling=state.sampling, positions=state.lengths + num_accepted
    )
    place = jnp.arange(K + 1, dtype=jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    token = jnp.where(place < num_accepted[:, None], padded, replacement[:, None])
    chosen = describe_tokens(flat, token.reshape(-1), rows.sampling, axis)
    return jax.tree.map(rows.unflatten, chosen), 1 + num_accepted


class _Rows:
    """The state as each of a row's K+1 verified places sees it, places side by side."""

    def __init__(self, state: DecodeState, drafts: Int32[Array, "B K"]):
        self._B, K = drafts.shape
        T = K + 1
        place = jnp.arange(T, dtype=jnp.int32)
        batch = jnp.arange(self._B, dtype=jnp.int32)[:, None]
        # Penalties count the drafts before a place as if they stood.
        ahead = state.tokens.at[batch, state.lengths[:, None] + place[:-1]].set(drafts)
        self.tokens = jnp.repeat(ahead, T, axis=0)
        self.lengths = (state.lengths[:, None] + place).reshape(-1)
        self.prompt_lengths = jnp.repeat(state.prompt_lengths, T)
        self.sampling = repeat_rows(state.sampling, T)

    def unflatten(self, x: jax.Array) -> jax.Array:
        return x.reshape(self._B, -1, *x.shape[1:])


def _num_leading(flags: Array) -> Int32[Array, " B"]:
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1)


def _uniform(state: DecodeState, K: int) -> Float32[Array, "B K"]:
    """In [0, 1), fixed by each row's seed and the drafts' positions."""

    def one(k: int) -> jax.Array:
        keys = position_keys(state.sampling, state.lengths + k, use=ACCEPT_USE)
        return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)

    return jnp.stack([one(k) for k in range(K)], axis=1)
