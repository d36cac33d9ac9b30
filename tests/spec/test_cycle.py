"""The cycle: the very replies of plain decoding, whatever is drafted."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.axes import replace
from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.decode import autoregressive_step
from kimi_jax.runtime.llm import LLM
from spec import Eagle3Drafter, draft
from spec.draft import Drafts
from spec.drafter import BoundEagle3

# Four rows of very different lengths, the shortest of one token: one program for each K.
SHORT = (1, 2, 16, 17)
LENGTHS = (SHORT, (3, 40, 128, 200), (5, 129, 33, 64), (9, 100, 7, 150))


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


def check_same(llm, plain, prompts, params):
    """Replies are equal token for token, and their counts add up."""
    expected = plain.generate(prompts, params)
    found = llm.generate(prompts, params)
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.text, a.finish_reason, a.usage) == (
            b.token_ids,
            b.text,
            b.finish_reason,
            b.usage,
        )
        told = a.speculation
        assert b.speculation is None
        assert told.cycles == a.timings.cycles and told.emitted == len(a.token_ids)
        assert 0 <= told.accepted <= told.drafted and told.accepted <= told.emitted
        assert list(told.accepted_by_depth) == sorted(told.accepted_by_depth, reverse=True)
        if b.logprobs is not None:
            np.testing.assert_allclose(
                [e.logprob for e in a.logprobs], [e.logprob for e in b.logprobs], atol=1e-4
            )
    return found


@pytest.mark.parametrize("num_draft_tokens", range(9))
def test_greedy_replies_are_those_of_plain_decoding(
    make_drafted, only, plain, ids, on, num_draft_tokens
):
    llm = make_drafted()
    only(num_draft_tokens)
    for seed, lengths in enumerate(LENGTHS):
        prompts = [ids(n, seed * 10 + row) for row, n in enumerate(lengths)]
        for result in check_same(llm, plain, prompts, on(32)):
            assert result.speculation.drafted == num_draft_tokens * result.speculation.cycles


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}])
def test_mla_drafters(make_drafted, only, plain, ids, on, options):
    llm = make_drafted("mla", **options)
    only(3)
    check_same(llm, plain, [ids(n, n) for n in LENGTHS[1]], on(32))


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_a_perfect_drafter_is_accepted_whole(perfect, only, plain, ids, on, num_draft_tokens):
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


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_an_adversarial_drafter_costs_only_time(adversary, only, plain, ids, on, num_draft_tokens):
    only(num_draft_tokens)
    for result in check_same(adversary, plain, [ids(n, n) for n in LENGTHS[1]], on(20)):
        assert (result.speculation.accepted, result.speculation.tokens_per_cycle) == (0, 1.0)


def test_a_stop_anywhere_in_a_cycle_ends_the_reply(perfect, only, plain, ids, on):
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
def test_max_new_tokens_is_exact(perfect, only, plain, ids, on, new):
    only(3)
    for result in check_same(perfect, plain, [ids(n, n) for n in SHORT], on(new)):
        assert result.usage.new_tokens == new


OPTIONS = (
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 5, "top_k": 4, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.0, "seed": 6, "min_p": 0.3},
    {"repetition_penalty": 1.5, "logprobs": 2},
    {"logit_bias": {5: 30.0, 6: 29.0}, "presence_penalty": 2.0},
    {"logit_bias": {5: 30.0, 6: 29.0}, "frequency_penalty": 2.0},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_means_the_same(make_drafted, only, plain, ids, on, options):
    prompts = [ids(n, n) for n in SHORT]
    only(3)
    check_same(make_drafted(), plain, prompts, on(32, **options))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_means_the_same_where_all_drafts_stand(perfect, only, plain, ids, on, options):
    only(3)
    for result in check_same(perfect, plain, [ids(n, n) for n in SHORT], on(32, **options)):
        assert result.speculation.tokens_per_cycle == 4


def test_a_seeded_row_depends_on_nothing_but_its_seed(make_drafted, only, ids, on):
    llm = make_drafted()
    only(3)
    own, others = ids(9, 1), [ids(30, 2), ids(4, 3), ids(100, 4)]
    seeded, free = on(20, temperature=0.8, seed=7), on(20, temperature=0.8)
    expected = llm.generate([own], seeded)[0].token_ids
    for slot in range(4):
        prompts, params = list(others), [free] * 3
        prompts.insert(slot, own)
        params.insert(slot, seeded)
        assert llm.generate(prompts, params)[slot].token_ids == expected


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_eight_devices_give_the_replies_of_one(make_drafted, only, plain, ids, on, kind):
    only(3)
    sizes = {"num_attention_heads": 8, "intermediate_size": 64}
    sizes |= {"num_key_value_heads": 8} if kind == "llama" else {}
    llm = make_drafted(kind, mesh="tensor=8", **sizes)
    one = make_drafted(kind, **sizes)
    prompts = [ids(n, n) for n in SHORT]
    for params in (on(16), on(16, temperature=0.8, seed=1)):
        found, alone = check_same(llm, plain, prompts, params), one.generate(prompts, params)
        assert [r.speculation for r in found] == [r.speculation for r in alone]


def test_past_its_own_positions_a_drafter_rests(make_drafted, plain, ids, on):
    llm = make_drafted(num_draft_tokens=3, max_position_embeddings=32)
    # Blocks are whole: the one that passes the limit still drafts to its end.
    for length, does_draft in ((20, True), (29, True), (30, False), (40, False), (200, False)):
        [result] = check_same(llm, plain, [ids(length, length)], on(40))
        assert (result.speculation.drafted > 0) == does_draft


def test_the_drafters_cache_is_that_of_one_pass_over_the_text(
    make_drafted, make_drafter_folder, ids, on, assert_close
):
    """Rejected drafts and features made by the drafter itself leave no trace."""
    for kind in ("llama", "mla"):
        llm = make_drafted(kind)
        engine = llm.engine
        [request] = llm._requests([ids(40, 1)], on(30))
        state = engine.prefill(engine.new_state([request]), 39)
        state, _ = engine.decode(state, 9, np.zeros((1,), np.bool_), 3)
        n = int(state.lengths[0]) - 1
        text = state.tokens[0, : n + 1].tolist()
        [whole] = llm._requests([text], on(1))
        again = engine.prefill(engine.new_state([whole]), n)
        for a, b in zip(state.drafter.cache, again.drafter.cache, strict=True):
            assert_close(a[:n], b[:n], atol=2e-5)
        assert_close(state.drafter.carried, again.drafter.carried, atol=1e-4)


def test_nothing_compiles_after_warm_up(target_folder, make_drafter_folder, ids, on):
    folder, _ = make_drafter_folder()
    drafter = Eagle3Drafter(folder, num_draft_tokens=(0, 2))
    llm = LLM(target_folder, drafter=drafter, max_length=200, max_batch=1, progress=False)
    llm.warm_up()
    before = num_compiles()
    for length in (1, 2, 17, 130):
        for options in ({}, OPTIONS[1], OPTIONS[4]):
            [result] = llm.generate([ids(length)], on(30, **options))
            assert result.timings.compiles == 0
    assert num_compiles() == before


def test_a_block_of_cycles_never_leaves_the_device(make_drafted, ids, on):
    llm = make_drafted()
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(100))
    state = engine.prefill(engine.new_state([request]), 4)
    call = (engine._weights, state, np.int32(16), np.zeros((1,), np.bool_))
    program = engine._decode.lower(*call, num_draft_tokens=3).as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program
    state, block = engine.decode(state, 16, np.zeros((1,), np.bool_), 3)
    assert int(block.cycles[0]) == 16


@pytest.mark.parametrize("bad", [9, -1, (), (1, 9), True])
def test_a_wrong_number_of_drafts_is_refused_at_once(bad):
    with pytest.raises(ValueError, match="num_draft_tokens is"):
        Eagle3Drafter("nowhere", num_draft_tokens=bad)


def test_decode_runs_fewer_cycles_where_a_block_would_overflow(make_drafted, ids, on):
    llm = make_drafted()
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(200))
    state = engine.prefill(engine.new_state([request]), 4)
    _, block = engine.decode(state, 64, np.zeros((1,), np.bool_), 8)
    assert int(block.cycles[0]) == 64 // 9
