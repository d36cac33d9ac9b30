"""Which drafts stand: exact for every drafter, in greedy decoding and in sampling.

`accept_equal` asks of each row what plain decoding would choose there, with the row's own options
and the randomness of that position, and follows the drafts that are it. The reply is then the very
tokens of plain decoding, sampled or not. For drafts that are the most likely tokens this accepts
with the probability of one of them being drawn, which is the most any exact rule can.

`accept_sampled` is speculative sampling (arXiv 2211.17192, section 2.3) for drafts drawn from a
known distribution q: a draft stands with probability min(1, p/q), and one that falls leaves
max(p - q, 0) to its siblings and at last to the token drawn in their place (arXiv 2402.14160,
section 3.1). It keeps the distribution, not the tokens, of plain decoding, and accepts the more the
closer q is to p. At temperature 0 both give the tokens of plain decoding.

`accept_lossy` is neither: it takes more drafts than an exact rule and changes the distribution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

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
from spec.tree import Drafts, Shape, StaticTree, depths_of, pick_rows, tokens_before

ACCEPT_USE = 1
"""Of the random draws at one position (`position_keys`), those that accept drafts: this one, and
every second one from here where a tree has several at a position."""


class Accepted(NamedTuple):
    """The tokens a cycle gives, and the rows they come from."""

    chosen: Choice
    """Fields [B, depth + 1, ...]: after each row of the path."""
    counts: Int32[Array, " B"]
    """Of these, the ones that count: the accepted drafts plus one."""
    path: Int32[Array, "B _"]
    """The root and the accepted nodes, as rows; what follows them means nothing."""


def accept_equal(
    logits_f32: Float32[Array, "B T V"],
    drafts: Drafts,
    shape: Shape,
    state: DecodeState,
    rules: Rules,
) -> Accepted:
    """The path plain decoding takes through the drafts.

    Args:
        logits_f32: this device's part of the target's, after the newest token and each node.
    """
    rows = _Rows(state, drafts, shape)
    choice = choose_tokens(
        logits_f32.reshape(-1, logits_f32.shape[-1]),
        tokens=rows.tokens,
        lengths=rows.lengths,
        prompt_lengths=rows.prompt_lengths,
        sampling=rows.sampling,
        axis=rules.mesh_axes("V"),
    )
    every = jax.tree.map(rows.unflatten, choice)

    if shape.is_chain:
        num_accepted = _num_leading(every.token[:, :-1] == drafts.tokens)
        place = jnp.arange(shape.depth + 1, dtype=jnp.int32)
        return Accepted(every, 1 + num_accepted, jnp.broadcast_to(place, every.token.shape))

    def follow(depth: int, row: Int32[Array, " B"]) -> tuple[Int32[Array, " B"], None]:
        wanted = jnp.take_along_axis(every.token, row[:, None], axis=1)
        return _first_row((drafts.parents == row[:, None]) & (drafts.tokens == wanted)), None

    path, num_accepted, _ = _walk(follow, shape.depth, state)
    return Accepted(jax.tree.map(lambda x: pick_rows(x, path), every), 1 + num_accepted, path)


def accept_sampled(
    logits_f32: Float32[Array, "B T V"],
    drafts: Drafts,
    shape: StaticTree,
    state: DecodeState,
    rules: Rules,
) -> Accepted:
    """A path by rejection, for siblings drawn without replacement from `drafts.logits_f32`."""
    assert drafts.logits_f32 is not None
    draft_probs = jax.nn.softmax(drafts.logits_f32, axis=-1)
    proposer = jnp.asarray(shape.proposers)

    def proposed_by(row: Int32[Array, " B"]) -> Float32[Array, "B V"]:
        return pick_rows(draft_probs, proposer[row][:, None])[:, 0]

    def judge(child: _Child, target: jax.Array, draft: jax.Array) -> tuple:
        draft_prob = _at(draft, child.token)
        # A distribution of fewer tokens than siblings leaves some that were never drawn.
        is_drawn = (draft_prob > 0) | (state.sampling.temperature == 0)
        is_accepted = is_drawn & (child.coin * draft_prob < _at(target, child.token))
        target_left = _normalized(jnp.maximum(target - draft, 0.0), target)
        return is_accepted, target_left, _normalized(_without(draft, child.token), draft)

    return _accept_by_coin(logits_f32, drafts, shape, state, rules, proposed_by, judge)


def accept_lossy(
    logits_f32: Float32[Array, "B T V"],
    drafts: Drafts,
    shape: Shape,
    state: DecodeState,
    rules: Rules,
    *,
    threshold: float,
) -> Accepted:
    """A path that also takes every draft of at least this probability: not exact.

    A draft at or over `threshold` in the target's distribution under the row's options stands; the
    others as exact rules have it. 1 is exact; the lower, the more drafts stand and the more replies
    resemble the drafter's. Greedy rows, whose distribution is one token, stay exact.
    """

    def judge(child: _Child, target: jax.Array, draft: None) -> tuple:
        is_accepted = (child.coin < _at(target, child.token)) | (child.target_prob >= threshold)
        target_left = _normalized(_without(target, child.token), target)
        return is_accepted, target_left, None

    return _accept_by_coin(logits_f32, drafts, shape, state, rules, lambda row: None, judge)


class _Child(NamedTuple):
    """One of the drafts that follow a row, for each batch row."""

    token: Int32[Array, " B"]
    coin: Float32[Array, " B"]
    """In [0, 1), its own."""
    target_prob: Float32[Array, " B"]
    """What the target gives it, whatever siblings have fallen."""


def _accept_by_coin(
    logits_f32: Float32[Array, "B T V"],
    drafts: Drafts,
    shape: Shape,
    state: DecodeState,
    rules: Rules,
    proposed_by: Callable,
    judge: Callable,
) -> Accepted:
    """Walks down the drafts, siblings in order, each accepted or not by `judge`.

    `judge(child, target, draft)` gives whether it stands and, if not, what is left of both for its
    siblings. They begin as the target's distribution after a row and `proposed_by(row)`, the one
    its children were drawn from. The last token is drawn from what is left of the target's.
    """
    rows = _Rows(state, drafts, shape)
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

    def follow(
        depth: int, row: Int32[Array, " B"]
    ) -> tuple[Int32[Array, " B"], Float32[Array, "B V"]]:
        whole = pick_rows(target_probs, row[:, None])[:, 0]
        target, draft = whole, proposed_by(row)
        is_child = drafts.parents == row[:, None]
        order = jnp.cumsum(is_child.astype(jnp.int32), axis=1)
        found = jnp.zeros_like(row)
        for rank in range(shape.num_siblings):
            node = _first_row(is_child & (order == rank + 1))
            at = jnp.maximum(node - 1, 0)[:, None]
            token = jnp.take_along_axis(drafts.tokens, at, axis=1)[:, 0]
            child = _Child(token, _coin(state, depth, node), _at(whole, token))
            is_accepted, target_left, draft_left = judge(child, target, draft)
            is_open = (node > 0) & (found == 0)
            found = jnp.where(is_open & is_accepted, node, found)
            has_fallen = (is_open & ~is_accepted)[:, None]
            target = jnp.where(has_fallen, target_left, target)
            if draft is not None:
                draft = jnp.where(has_fallen, draft_left, draft)
        return found, target

    path, num_accepted, left = _walk(follow, shape.depth, state)
    if left is None:
        left = target_probs[:, 0]
    else:
        # After the deepest draft nothing was proposed: the whole distribution is left.
        deepest = pick_rows(target_probs, path[:, -1:])[:, 0]
        left = jnp.where((num_accepted == shape.depth)[:, None], deepest, left)
    last = sample_tokens(
        jnp.log(left), sampling=state.sampling, positions=state.lengths + num_accepted
    )
    place = jnp.arange(shape.depth + 1, dtype=jnp.int32)
    following = jnp.pad(path[:, 1:], ((0, 0), (0, 1)))
    drafted = jnp.take_along_axis(jnp.pad(drafts.tokens, ((0, 0), (1, 0))), following, axis=1)
    token = jnp.where(place < num_accepted[:, None], drafted, last[:, None])
    on_path = logits_f32 if shape.is_chain else pick_rows(logits_f32, path)
    chosen = describe_tokens(
        on_path.reshape(-1, on_path.shape[-1]),
        token.reshape(-1),
        repeat_rows(state.sampling, shape.depth + 1),
        axis,
    )
    chosen = jax.tree.map(rows.unflatten, chosen)
    return Accepted(chosen, 1 + num_accepted, path)


def _walk(
    follow: Callable, depth: int, state: DecodeState
) -> tuple[Int32[Array, "B _"], Int32[Array, " B"], Any]:
    """The path, how many drafts are on it, and what `follow` left where it ended.

    `follow(depth, row)` gives the accepted node after a row, 0 if there is none, and what it left.
    """
    row = jnp.zeros_like(state.lengths)
    path, num_accepted, is_on, left = [row], jnp.zeros_like(row), row == 0, None
    for d in range(depth):
        found, left_here = follow(d, row)
        if left_here is not None:
            # Where the walk has ended it stays as it was left there.
            left = left_here if left is None else jnp.where(is_on[:, None], left_here, left)
        is_on = is_on & (found > 0)
        row = jnp.where(is_on, found, row)
        num_accepted = num_accepted + is_on.astype(jnp.int32)
        path.append(row)
    return jnp.stack(path, axis=1), num_accepted, left


class _Rows:
    """The state as each of a row's T verified places sees it, places side by side."""

    def __init__(self, state: DecodeState, drafts: Drafts, shape: Shape):
        self._B, M = drafts.tokens.shape
        T = M + 1
        batch = jnp.arange(self._B * T, dtype=jnp.int32)[:, None]
        lengths = jnp.repeat(state.lengths, T)
        if drafts.mask is None:
            leading = jnp.repeat(drafts.tokens, T, axis=0)
            depths = jnp.tile(jnp.arange(T, dtype=jnp.int32), self._B)
        else:
            leading = tokens_before(drafts, shape.depth).reshape(self._B * T, -1)
            depths = depths_of(drafts.mask).reshape(-1)
        # Penalties count the drafts before a place as if they stood.
        at = lengths[:, None] + jnp.arange(shape.depth, dtype=jnp.int32)
        self.tokens = jnp.repeat(state.tokens, T, axis=0).at[batch, at].set(leading)
        self.lengths = lengths + depths
        self.prompt_lengths = jnp.repeat(state.prompt_lengths, T)
        self.sampling = repeat_rows(state.sampling, T)

    def unflatten(self, x: jax.Array) -> jax.Array:
        return x.reshape(self._B, -1, *x.shape[1:])


def _first_row(is_node: Bool[Array, "B M"]) -> Int32[Array, " B"]:
    """The row of the first node that is meant, 0 if none is."""
    M = is_node.shape[1]
    row = jnp.arange(1, M + 1, dtype=jnp.int32)
    first = jnp.min(jnp.where(is_node, row, M + 1), axis=1, initial=M + 1)
    return jnp.where(first > M, 0, first)


def _num_leading(flags: Array) -> Int32[Array, " B"]:
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1)


def _at(probs: Float32[Array, "B V"], token: Int32[Array, " B"]) -> Float32[Array, " B"]:
    return jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]


def _without(probs: Float32[Array, "B V"], token: Int32[Array, " B"]) -> Float32[Array, "B V"]:
    ids = jnp.arange(probs.shape[1], dtype=jnp.int32)
    return jnp.where(ids == token[:, None], 0.0, probs)


def _normalized(probs: Float32[Array, "B V"], otherwise: Array) -> Float32[Array, "B V"]:
    """Summing to 1; `otherwise` where rounding has left nothing."""
    total = jnp.sum(probs, axis=-1, keepdims=True)
    return jnp.where(total > 0, probs / jnp.where(total > 0, total, 1.0), otherwise)


def _coin(state: DecodeState, depth: int, node: Int32[Array, " B"]) -> Float32[Array, " B"]:
    """In [0, 1), fixed by the row's seed, the position and the node."""
    use = ACCEPT_USE + 2 * node
    keys = position_keys(state.sampling, state.lengths + depth, use)
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
