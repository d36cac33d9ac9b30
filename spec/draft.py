"""Drafting a proposal, and keeping the drafter's cache true to the target's."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.axes import Rules, pytree_dataclass, replace
from kimi_jax.model.attention import TreeRows
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.decode import Chunk, DecodeState
from kimi_jax.runtime.sampling import (
    Axis,
    SamplingState,
    add_noise,
    argmax_tokens,
    filter_logits,
    gather_vocab,
    repeat_rows,
    top_tokens,
)
from spec.eagle3 import model as eagle3
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Cache, Eagle3
from spec.tree import CATCH_UP_ROWS, Drafts, DynamicTree, Shape, StaticTree, pick_rows, tree_mask

DRAFT_USE = 2
"""Of the random draws at one position (`position_keys`), those that sample drafts: this one for the
root's children, and every second one from here for those of the other rows."""


@pytree_dataclass
class DraftState:
    """What the drafter keeps of each row: true to the text up to the newest token's place.

    With n tokens in the target's cache, rows 0..n-1 are in the drafter's (the last one holds the
    newest token), all made from the target's own features, and `carried` is what row n-1 carries.
    Within a block that drafts nothing this lags behind, until `catch_up`.
    """

    cache: Cache
    carried: Float[Array, "B D"]
    pending: Float[Array, "B X ZD"]
    """In a block that drafts nothing, the streams the drafter has yet to run over, by their place
    in the block."""


def keep_pending(state: DecodeState, taps: tuple[Float[Array, "B 1 D"], ...]) -> DecodeState:
    """The state with a plain step's streams put by."""
    own: DraftState = state.drafter
    rows = jnp.arange(own.pending.shape[0], dtype=jnp.int32)
    joined = jnp.concatenate(taps, axis=-1)[:, 0].astype(own.pending.dtype)
    pending = own.pending.at[rows, state.lengths - state.block_start].set(joined, mode="drop")
    return replace(state, drafter=replace(own, pending=pending))


def catch_up(
    model: Eagle3,
    cfg: DrafterConfig,
    target: Kimi,
    state: DecodeState,
    *,
    taps: tuple[int, ...],
    rules: Rules,
) -> DraftState:
    """The drafter's state with the pending rows of a block run over, some at a time.

    One row at a time in every step would read all of the drafter's weights for each token.
    """
    own: DraftState = state.drafter
    counts = state.lengths - state.block_start
    width = own.pending.shape[2] // len(taps)

    def run(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, carried = carry
        first = i * CATCH_UP_ROWS
        streams = jax.lax.dynamic_slice_in_dim(own.pending, first, CATCH_UP_ROWS, axis=1)
        parts = tuple(streams[:, :, z * width : (z + 1) * width] for z in range(len(taps)))
        # A row that ended before this turn has nothing here: what it writes lies past its text.
        start = jnp.minimum(state.block_start - 1 + first, state.lengths - 1)
        positions = start[:, None] + jnp.arange(CATCH_UP_ROWS, dtype=jnp.int32)
        following = jnp.minimum(positions + 1, state.tokens.shape[1] - 1)
        rows, cache = eagle3.forward(
            model,
            cfg,
            eagle3.features(model, cfg, parts, target),
            jnp.take_along_axis(state.tokens, following, axis=1),
            positions,
            cache,
            target,
            rules=rules,
        )
        last = counts - 1 - first
        is_here = (last >= 0) & (last < CATCH_UP_ROWS)
        at = jnp.clip(last, 0, CATCH_UP_ROWS - 1)[:, None, None]
        newest = jnp.take_along_axis(rows, at, axis=1)[:, 0]
        return cache, jnp.where(is_here[:, None], newest, carried)

    turns = (jnp.max(counts) + CATCH_UP_ROWS - 1) // CATCH_UP_ROWS
    cache, carried = jax.lax.fori_loop(0, turns, run, (own.cache, own.carried))
    return replace(own, cache=cache, carried=carried)


def propose(
    model: Eagle3,
    cfg: DrafterConfig,
    target: Kimi,
    state: DecodeState,
    shape: Shape,
    *,
    is_sampled: bool,
    rules: Rules,
) -> tuple[Drafts, Cache]:
    """Drafts of this shape for every row, and the drafter's cache with their temporary rows.

    A node's children are the drafter's most likely tokens, or with `is_sampled` draws without
    replacement from its distribution under the row's temperature and filters (greedy rows still
    take the most likely ones). A dynamic tree is never sampled.
    """
    drafting = _Drafting(model, cfg, target, state, rules)
    with jax.named_scope("draft"):
        if isinstance(shape, DynamicTree):
            assert not is_sampled
            return _propose_dynamic(drafting, shape)
        return _propose_static(drafting, shape, is_sampled=is_sampled)


class _Drafting:
    """The drafter as drafting runs it: one depth of the tree after the other.

    The row before the first draft gives it; a node at depth d makes a row at position n - 1 + d,
    which gives its children. Their cache slots begin at n, one after the other.
    """

    def __init__(
        self, model: Eagle3, cfg: DrafterConfig, target: Kimi, state: DecodeState, rules: Rules
    ):
        self.model, self.cfg, self.target, self.rules = model, cfg, target, rules
        self.state = state
        own: DraftState = state.drafter
        self.cache = own.cache
        self.root = own.carried[:, None]

    def logits(self, carried: Float[Array, "B X D"]) -> Float32[Array, "BX W"]:
        """Of each running row's children, this device's part."""
        flat = carried.reshape(-1, carried.shape[-1])
        return eagle3.draft_logits(self.model, self.cfg, flat, self.target)

    def target_ids(self, draft_ids: Int32[Array, "BX *rest"]) -> Int32[Array, "BX *rest"]:
        return eagle3.to_target_ids(self.model, draft_ids)

    def run(
        self,
        carried: Float[Array, "B X D"],
        tokens: Int32[Array, "B X"],
        depth: int,
        mask: Array | None,
    ) -> Float[Array, "B X D"]:
        """Runs nodes of one depth; `mask` as in `TreeRows`, None for the only node of a chain."""
        first = self.state.lengths - 1
        positions = jnp.broadcast_to((first + (depth - 1))[:, None], tokens.shape)
        rows, self.cache = eagle3.forward(
            self.model,
            self.cfg,
            carried,
            tokens,
            positions,
            self.cache,
            self.target,
            rules=self.rules,
            tree=None if mask is None else TreeRows(first=first, mask=mask),
        )
        return rows


def _propose_static(
    drafting: _Drafting, shape: StaticTree, *, is_sampled: bool
) -> tuple[Drafts, Cache]:
    B = drafting.root.shape[0]
    carried, running = drafting.root, np.zeros((1,), np.int32)
    mask = np.zeros((1, 0), np.bool_)
    tokens: list[jax.Array] = []
    kept_logits: list[jax.Array] = []
    for depth, level in enumerate(shape.levels(), start=1):
        logits_f32 = drafting.logits(carried)
        width = int(level.rank.max()) + 1
        if is_sampled:
            children, filtered = _draw(drafting, logits_f32, width, depth, running)
            kept_logits.append(filtered.reshape(B, -1, filtered.shape[-1]))
        else:
            children = drafting.target_ids(_best(logits_f32, width, drafting.rules.mesh_axes("W")))
        children = children.reshape(B, -1, width)
        tokens.append(children[:, level.parent, level.rank])
        if not level.running.size:
            break
        above = level.parent[level.running]
        mask = np.concatenate([mask[above], np.eye(len(above), dtype=np.bool_)], axis=1)
        carried = drafting.run(
            carried[:, above],
            tokens[-1][:, level.running],
            depth,
            None if shape.is_chain else jnp.broadcast_to(jnp.asarray(mask), (B, *mask.shape)),
        )
        running = level.rows[level.running]
    parents = jnp.broadcast_to(jnp.asarray(shape.parents), (B, shape.num_draft_tokens))
    drafts = Drafts(
        tokens=jnp.concatenate(tokens, axis=1) if tokens else jnp.zeros((B, 0), jnp.int32),
        parents=parents,
        mask=None if shape.is_chain else tree_mask(parents, shape.depth),
        logits_f32=jnp.concatenate(kept_logits, axis=1) if kept_logits else None,
    )
    return drafts, drafting.cache


def _draw(
    drafting: _Drafting,
    logits_f32: Float32[Array, "BX W"],
    width: int,
    depth: int,
    running: np.ndarray,
) -> tuple[Int32[Array, "BX width"], Float32[Array, "BX V"]]:
    """Children drawn without replacement, and the logits of the distribution of the first draw.

    Gumbel-top-k (arXiv 1903.06059): the largest of logits plus noise, in order, are such draws.
    """
    state, X = drafting.state, len(running)
    whole = gather_vocab(logits_f32, drafting.rules.mesh_axes("W"))
    whole = eagle3.to_target_logits(drafting.model, whole, drafting.cfg.vocab_size)
    sampling: SamplingState = repeat_rows(state.sampling, X)
    filtered = filter_logits(whole, sampling)
    positions = jnp.repeat(state.lengths + (depth - 1), X)
    use = jnp.tile(jnp.asarray(DRAFT_USE + 2 * running), state.lengths.shape[0])
    noisy = add_noise(filtered, sampling=sampling, positions=positions, use=use)
    is_sampled = (sampling.temperature > 0)[:, None]
    return _best(jnp.where(is_sampled, noisy, whole), width), filtered


def _best(x_f32: Float32[Array, "X V"], width: int, axis: Axis = None) -> Int32[Array, "X width"]:
    if width == 1:
        return argmax_tokens(x_f32, axis)[:, None]
    return top_tokens(x_f32, width, axis)[0]


def _propose_dynamic(drafting: _Drafting, shape: DynamicTree) -> tuple[Drafts, Cache]:
    B, k = drafting.root.shape[0], shape.top_k
    carried, scores = drafting.root, jnp.zeros((B, 1), jnp.float32)
    # Of each node that runs: its place among all candidates (-1 is the root), and what it sees.
    node = jnp.full((B, 1), -1, jnp.int32)
    mask = jnp.zeros((B, 1, 0), jnp.bool_)
    all_scores: list[jax.Array] = []
    all_tokens: list[jax.Array] = []
    all_parents: list[jax.Array] = []
    for depth in range(1, shape.depth + 1):
        logits_f32 = drafting.logits(carried)
        ids, top, total = top_tokens(logits_f32, k, drafting.rules.mesh_axes("W"))
        tokens = drafting.target_ids(ids).reshape(B, -1)
        grown = (scores[:, :, None] + (top - total).reshape(B, -1, k)).reshape(B, -1)
        base = sum(part.shape[1] for part in all_scores)
        all_scores.append(grown)
        all_tokens.append(tokens)
        all_parents.append(jnp.repeat(node, k, axis=1))
        if depth == shape.depth:
            break
        scores, chosen = jax.lax.top_k(grown, k)
        above = chosen // k
        own = jnp.broadcast_to(jnp.eye(k, dtype=jnp.bool_), (B, k, k))
        mask = jnp.concatenate([pick_rows(mask, above), own], axis=2)
        carried = drafting.run(
            pick_rows(carried, above), jnp.take_along_axis(tokens, chosen, axis=1), depth, mask
        )
        node = base + chosen
    # Along a path scores never rise, and of equals the earlier is taken: parents are among the
    # best if their children are, and come first.
    _, best = jax.lax.top_k(jnp.concatenate(all_scores, axis=1), shape.num_draft_tokens)
    best = jnp.sort(best, axis=1)
    wanted = jnp.take_along_axis(jnp.concatenate(all_parents, axis=1), best, axis=1)
    is_parent = wanted[:, :, None] == best[:, None, :]
    row = jnp.arange(1, shape.num_draft_tokens + 1, dtype=jnp.int32)
    parents = jnp.sum(jnp.where(is_parent, row, 0), axis=-1, dtype=jnp.int32)
    drafts = Drafts(
        tokens=jnp.take_along_axis(jnp.concatenate(all_tokens, axis=1), best, axis=1),
        parents=parents,
        mask=tree_mask(parents, shape.depth),
    )
    return drafts, drafting.cache


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
    own: DraftState,
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
    return replace(own, cache=cache, carried=jnp.take_along_axis(rows, last, axis=1)[:, 0])


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
    return replace(own, cache=cache, carried=carried)
