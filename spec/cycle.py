"""A speculative cycle as a step: draft, verify, accept and catch up, in one program.

    draft     K tokens from what the drafter carried
    verify    the target over the newest token and the drafts, its taps from the same forward
    accept    the drafts that stand and one token more
    extend    the drafter over the same rows, with the target's true features

Fixed shapes, nothing read back: rejected rows of either cache are written over by the next cycle.
K = 0 is plain decoding that keeps the drafter's cache in step, at the cost of one drafter row.
"""

import jax.numpy as jnp
from flax import nnx

from kimi_jax.axes import Rules, replace
from kimi_jax.model import transformer
from kimi_jax.runtime.decode import DecodeState, Step, Weights, append
from spec import draft
from spec.eagle3.config import DrafterConfig
from spec.verify import accept_equal, accept_sampled


def speculative_step(
    graph: nnx.GraphDef,
    drafter_graph: nnx.GraphDef,
    cfg: DrafterConfig,
    *,
    taps: tuple[int, ...],
    num_draft_tokens: int,
    is_sampled: bool = False,
    rules: Rules,
) -> Step:
    """The step of one K; its weights are (the target's, the drafter's) `nnx.State`s.

    Args:
        taps: the target's streams the drafter reads.
        is_sampled: drafts are drawn from the drafter's distribution, not its most likely tokens.
    """

    def step(weights: Weights, state: DecodeState) -> DecodeState:
        target = nnx.merge(graph, weights[0])
        model = nnx.merge(drafter_graph, weights[1])
        drafts, own_cache = draft.draft_chain(
            model,
            cfg,
            target,
            state,
            num_draft_tokens=num_draft_tokens,
            is_sampled=is_sampled,
            rules=rules,
        )
        newest = state.lengths - 1
        first = jnp.take_along_axis(state.tokens, newest[:, None], axis=1)
        tokens = jnp.concatenate([first, drafts.tokens], axis=1)
        positions = newest[:, None] + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)
        out = transformer.forward(
            target,
            tokens,
            positions,
            state.cache,
            is_real=jnp.broadcast_to(state.live[:, None], tokens.shape),
            taps=taps,
            rules=rules,
        )
        logits_f32 = transformer.logits(target, out.hidden)
        if drafts.logits_f32 is None:
            chosen, counts = accept_equal(logits_f32, drafts.tokens, state, rules)
        else:
            chosen, counts = accept_sampled(
                logits_f32, drafts.tokens, drafts.logits_f32, state, rules
            )
        own = draft.extend(
            model,
            cfg,
            target,
            own_cache,
            taps=out.taps,
            next_tokens=chosen.token,
            positions=positions,
            num_true=counts,
            rules=rules,
        )
        state = replace(state, cache=out.cache, drafter=own)
        return append(state, chosen, counts, num_drafted=num_draft_tokens)

    return step
