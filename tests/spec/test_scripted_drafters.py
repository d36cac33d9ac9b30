"""Drafters that know: one is always right, one always wrong. Neither changes a reply."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from spec_options import OPTIONS, SHORT

from kimi_jax.axes import replace
from kimi_jax.runtime.decode import autoregressive_step
from kimi_jax.runtime.llm import LLM
from spec import Eagle3Drafter, draft
from spec.draft import Drafts
from spec.drafter import BoundEagle3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(BoundEagle3):
    """Drafts what plain decoding would emit, plus `shift`: 0 is perfect, 1 always wrong."""

    shift: int

    def make_step(self, graph, rules, num_draft_tokens):
        plain = autoregressive_step(graph, rules)
        step = super().make_step(graph, rules, num_draft_tokens)

        def chain(model, cfg, target, state, **_):
            ahead = replace(
                state,
                limits=jnp.full_like(state.limits, 10**6),
                stop_ids=jnp.full_like(state.stop_ids, -1),
            )
            weights = nnx.split(target)[1]
            ahead = jax.lax.fori_loop(0, num_draft_tokens, lambda _, s: plain(weights, s), ahead)
            place = state.lengths[:, None] + jnp.arange(num_draft_tokens, dtype=jnp.int32)
            tokens = jnp.take_along_axis(ahead.tokens, place, axis=1)
            return Drafts((tokens + self.shift) % cfg.vocab_size, None), state.drafter.cache

        def scripted(weights, state):
            with mock.patch.object(draft, "draft_chain", chain):
                return step(weights, state)

        return scripted


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter(Eagle3Drafter):
    shift: int = 0

    def bind(self, cfg, mesh, dtype):
        bound = super().bind(cfg, mesh, dtype)
        fields = {f.name: getattr(bound, f.name) for f in dataclasses.fields(bound)}
        return Scripted(**fields, shift=self.shift)


def scripted(target_folder, drafter_folder, shift):
    drafter = ScriptedDrafter(drafter_folder, num_draft_tokens=tuple(range(9)), shift=shift)
    return LLM(target_folder, drafter=drafter, max_length=248, max_batch=4, progress=False)


@pytest.fixture(scope="module")
def perfect(target_folder, make_drafter_folder):
    return scripted(target_folder, make_drafter_folder()[0], 0)


@pytest.fixture(scope="module")
def adversary(target_folder, make_drafter_folder):
    return scripted(target_folder, make_drafter_folder()[0], 1)


@pytest.mark.parametrize("num_draft_tokens", [3, 8])
def test_a_perfect_drafter_is_accepted_whole(
    check_same, perfect, only, plain, ids, on, num_draft_tokens
):
    llm = perfect
    only(num_draft_tokens)
    whole = num_draft_tokens + 1
    for options in ({}, {"temperature": 0.9, "seed": 4, "presence_penalty": 1.5}):
        params = on(3 * whole, **options)
        for result in check_same(llm, plain, [ids(n, n) for n in SHORT], params):
            told = result.speculation
            assert (told.cycles, told.tokens_per_cycle) == (3, whole)
            assert told.accepted_by_depth[:num_draft_tokens] == (3,) * num_draft_tokens
            assert told.acceptance_rate == 1.0


@pytest.mark.parametrize("num_draft_tokens", [4])
def test_an_adversarial_drafter_costs_only_time(
    check_same, adversary, only, plain, ids, on, num_draft_tokens
):
    only(num_draft_tokens)
    for result in check_same(adversary, plain, [ids(n, n) for n in SHORT], on(20)):
        assert (result.speculation.accepted, result.speculation.tokens_per_cycle) == (0, 1.0)


def test_a_stop_anywhere_in_a_cycle_ends_the_reply(check_same, perfect, only, plain, ids, on):
    """The end token is met inside a run of accepted drafts; what follows it is dropped."""
    only(3)
    prompts = [ids(n, n) for n in SHORT]
    free = plain.generate(prompts, on(12, temperature=1.0, seed=3))
    for place in range(8):
        params = [
            on(12, temperature=1.0, seed=3, stop_token_ids=(r.token_ids[place],)) for r in free
        ]
        for result in check_same(perfect, plain, prompts, params):
            assert result.finish_reason == "stop"


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 63, 64, 65])
def test_max_new_tokens_is_exact(check_same, perfect, only, plain, ids, on, new):
    only(3)
    for result in check_same(perfect, plain, [ids(n, n) for n in SHORT], on(new)):
        assert result.usage.new_tokens == new


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_means_the_same_where_all_drafts_stand(
    check_same, perfect, only, plain, ids, on, options
):
    only(3)
    for result in check_same(perfect, plain, [ids(n, n) for n in SHORT], on(32, **options)):
        assert result.speculation.tokens_per_cycle == 4
