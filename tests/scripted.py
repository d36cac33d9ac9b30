"""Drafters for tests: with a program for many shapes, and told what to draft by a script."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kimi_jax.runtime.llm import LLM
from spec import DynamicTree, StaticTree, draft
from spec.drafter import BoundEagle3, Eagle3Drafter
from spec.tree import Chain, Shape

CHAINS = tuple(map(Chain, range(9)))
TREES = (
    StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    DynamicTree(6, depth=3, top_k=2),
    DynamicTree(10, depth=4, top_k=3),
)
WIDE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 0, 0)))
"""Deepest along its last branches."""

SLACK = max(shape.num_slots for shape in (*CHAINS, *TREES, WIDE))

REAL, PERFECT, WRONG = -1, 0, 1
"""Drafts are the drafter's own; or what the script says; or anything but that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyShapes(Eagle3Drafter):
    """Has a program for each of these shapes, compiled when it is first asked for."""

    choices: tuple[Shape, ...] = (*CHAINS, *TREES, WIDE)

    @property
    def shapes(self):
        return self.choices

    def bind(self, cfg, mesh, dtype):
        bound = super().bind(cfg, mesh, dtype)
        fields = {f.name: getattr(bound, f.name) for f in dataclasses.fields(bound)}
        return Scripted(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(BoundEagle3):
    """Takes its drafts from a script where it has one: one program for all kinds of drafter.

    Of each node's children the last one is what the script has at its position (`PERFECT`), so
    that a perfect tree is accepted along its last branches; the others are wrong. With `WRONG` all
    of them are.
    """

    def pspecs(self, rules):
        whole = PartitionSpec()
        return {"own": super().pspecs(rules), "script": whole, "mode": whole}

    def after_block(self, weights, *args):
        return super().after_block((weights[0], weights[1]["own"]), *args)

    def prefill(self, weights, *args):
        return super().prefill((weights[0], weights[1]["own"]), *args)

    def make_step(self, graph, rules, proposal):
        step = super().make_step(graph, rules, proposal)
        real = draft.propose

        def scripted(weights, state):
            given = weights[1]

            def propose(model, cfg, target, state, shape, **options):
                drafts, cache = real(model, cfg, target, state, shape, **options)
                scripted = _scripted_tokens(drafts.parents, given, state, cfg.vocab_size)
                tokens = jnp.where(given["mode"] == REAL, drafts.tokens, scripted)
                return drafts._replace(tokens=tokens), cache

            with mock.patch.object(draft, "propose", propose):
                return step((weights[0], given["own"]), state)

        return scripted


def _scripted_tokens(parents, given, state, vocab_size) -> jax.Array:
    B, M = parents.shape
    if not M:
        return jnp.zeros((B, 0), jnp.int32)
    # A node is one deeper than its parent, and parents come first.
    depths = [jnp.zeros((B,), jnp.int32)]
    for m in range(M):
        above = jnp.take_along_axis(jnp.stack(depths, axis=1), parents[:, m : m + 1], axis=1)
        depths.append(above[:, 0] + 1)
    at = state.lengths[:, None] + jnp.stack(depths[1:], axis=1) - 1
    right = jnp.take_along_axis(given["script"][:B], at, axis=1)
    same = parents[:, :, None] == parents[:, None, :]
    later = jnp.arange(M)[None, :] > jnp.arange(M)[:, None]
    num_later = jnp.sum(same & later, axis=-1, dtype=jnp.int32)
    return (right + num_later + given["mode"]) % vocab_size


def write_script(llm: LLM, mode: int, texts: list[list[int]] | None = None) -> None:
    """From now on this LLM drafts so; `texts` are whole, prompts included."""
    engine = llm.engine
    script = np.zeros((engine.max_batch, 2 * llm.max_length), np.int32)
    for row, text in enumerate(texts or []):
        script[row, : len(text)] = text
    own = engine.drafter.weights
    given: dict[str, Any] = {"own": own, "script": script, "mode": np.int32(mode)}
    everywhere = engine._everywhere
    given |= jax.device_put({k: given[k] for k in ("script", "mode")}, everywhere)
    engine._weights = (engine.target_weights, given)


def write_replies(llm: LLM, prompts: list[list[int]], replies: list[Any], mode: int) -> None:
    """The script is these replies, which may be read past their end."""
    write_script(llm, mode, [p + list(r.token_ids) for p, r in zip(prompts, replies, strict=True)])
