"""A speculative cycle as a step: draft, verify, accept and catch up, in one program.

    draft     a chain or tree of tokens from what the drafter carried
    verify    the target over the newest token and the drafts, its taps from the same forward
    accept    the drafts that stand and one token more; of a tree, their cache rows close ranks
    extend    the drafter over the accepted rows, with the target's true features

A profile finds these by the scopes "draft", "target", "accept" and "extend".

Fixed shapes, nothing read back: rejected rows of either cache are written over by the next cycle.
`Chain(0)` is the plain step, whose streams are put by; the drafter runs over them after the block.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.axes import Rules, replace
from kimi_jax.model import transformer
from kimi_jax.model.attention import TreeRows
from kimi_jax.runtime.decode import DecodeState, Step, Weights, append, autoregressive_step
from spec import draft
from spec.eagle3.config import DrafterConfig
from spec.tree import Shape, StaticTree, depths_of, pick_rows
from spec.verify import accept_equal, accept_lossy, accept_sampled


def speculative_step(
    graph: nnx.GraphDef,
    drafter_graph: nnx.GraphDef,
    cfg: DrafterConfig,
    *,
    taps: tuple[int, ...],
    shape: Shape,
    is_sampled: bool = False,
    lossy_threshold: float | None = None,
    rules: Rules,
) -> Step:
    """The step of one shape; its weights are (the target's, the drafter's) `nnx.State`s.

    Args:
        taps: the target's streams the drafter reads.
        is_sampled: drafts are drawn from the drafter's distribution, not its most likely tokens.
        lossy_threshold: see `accept_lossy`; None is exact.
    """

    if not shape.num_draft_tokens:
        plain = autoregressive_step(graph, rules, taps=taps, keep=draft.keep_pending)
        return lambda weights, state: plain(weights[0], state)

    def step(weights: Weights, state: DecodeState) -> DecodeState:
        target = nnx.merge(graph, weights[0])
        model = nnx.merge(drafter_graph, weights[1])
        drafts, own_cache = draft.propose(
            model, cfg, target, state, shape, is_sampled=is_sampled, rules=rules
        )
        newest = state.lengths - 1
        first = jnp.take_along_axis(state.tokens, newest[:, None], axis=1)
        tokens = jnp.concatenate([first, drafts.tokens], axis=1)
        tree, depths = None, jnp.arange(tokens.shape[1], dtype=jnp.int32)
        if drafts.mask is not None:
            tree, depths = TreeRows(first=newest, mask=drafts.mask), depths_of(drafts.mask)
        with jax.named_scope("target"):
            out = transformer.forward(
                target,
                tokens,
                newest[:, None] + depths,
                state.cache,
                is_real=jnp.broadcast_to(state.live[:, None], tokens.shape),
                taps=taps,
                tree=tree,
                rules=rules,
            )
            logits_f32 = transformer.logits(target, out.hidden)
        with jax.named_scope("accept"):
            if lossy_threshold is not None:
                accepted = accept_lossy(
                    logits_f32, drafts, shape, state, rules, threshold=lossy_threshold
                )
            elif is_sampled:
                assert isinstance(shape, StaticTree)
                accepted = accept_sampled(logits_f32, drafts, shape, state, rules)
            else:
                accepted = accept_equal(logits_f32, drafts, shape, state, rules)
            true_taps, cache, path = out.taps, out.cache, accepted.path
            assert cache is not None
            if tree is not None:
                true_taps = tuple(pick_rows(x, path) for x in true_taps)
                cache = cache.moved(path[:, 1:], newest, 1, rules)
        with jax.named_scope("extend"):
            own = draft.extend(
                model,
                cfg,
                target,
                own_cache,
                taps=true_taps,
                next_tokens=accepted.chosen.token,
                positions=newest[:, None] + jnp.arange(shape.depth + 1, dtype=jnp.int32),
                num_true=accepted.counts,
                rules=rules,
                own=state.drafter,
            )
        state = replace(state, cache=cache, drafter=own)
        with jax.named_scope("accept"):
            num_drafted = shape.num_draft_tokens
            return append(state, accepted.chosen, accepted.counts, num_drafted=num_drafted)

    return step
