"""The cycle: the very replies of plain decoding, whatever is drafted."""

import jax.numpy as jnp
import numpy as np
import pytest
from spec_options import OPTIONS, SHORT

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import make_mesh
from spec import Eagle3Drafter
from spec.drafter import BoundEagle3

LENGTHS = (SHORT, (3, 40, 128, 200), (5, 129, 33, 64), (9, 100, 7, 150))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_replies_are_those_of_plain_decoding(
    check_same, make_drafted, only, plain, ids, on, num_draft_tokens
):
    llm = make_drafted()
    only(num_draft_tokens)
    for seed, lengths in enumerate(LENGTHS if num_draft_tokens == 3 else LENGTHS[:2]):
        prompts = [ids(n, seed * 10 + row) for row, n in enumerate(lengths)]
        for result in check_same(llm, plain, prompts, on(32)):
            assert result.speculation.drafted == num_draft_tokens * result.speculation.cycles


# EAGLE-3.1, as the newest drafters of the MLA kind are published.
MLA_31 = {"fc_norm": True, "norm_output": True}


def test_mla_drafters(check_same, make_drafted, only, plain, ids, on):
    llm = make_drafted("mla", **MLA_31)
    only(3)
    check_same(llm, plain, [ids(n, n) for n in SHORT], on(32))


def test_sampled_drafts_keep_the_tokens_at_temperature_zero(
    check_same, make_drafted, plain, ids, on
):
    """And at a temperature more of them stand than most likely ones would."""
    llm = make_drafted(num_draft_tokens=2, sample_drafts=True)
    prompts = [ids(n, n) for n in SHORT]
    check_same(llm, plain, prompts, on(24))
    found = llm.generate(prompts, on(24, temperature=1.0, seed=3))
    again = llm.generate(prompts, on(24, temperature=1.0, seed=3))
    assert [r.token_ids for r in found] == [r.token_ids for r in again]
    assert sum(r.speculation.accepted for r in found) > 5


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_every_option_means_the_same(check_same, make_drafted, only, plain, ids, on, options):
    prompts = [ids(n, n) for n in SHORT]
    only(3)
    check_same(make_drafted(), plain, prompts, on(32, **options))


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
def test_eight_devices_give_the_replies_of_one(
    check_same, make_drafted, only, plain, ids, on, kind
):
    only(3)
    variant = MLA_31 if kind == "mla" else {}
    llm = make_drafted(kind, mesh="tensor=8", **variant)
    one = make_drafted(kind, **variant)
    prompts = [ids(n, n) for n in SHORT]
    for params in (on(16), on(16, temperature=0.8, seed=1)):
        found, alone = check_same(llm, plain, prompts, params), one.generate(prompts, params)
        assert [r.speculation for r in found] == [r.speculation for r in alone]


def test_past_its_own_positions_a_drafter_rests(
    check_same, make_drafted, make_drafter_folder, target_cfg, monkeypatch, plain, ids, on
):
    folder, _ = make_drafter_folder(max_position_embeddings=16)
    short = Eagle3Drafter(folder).bind(target_cfg, make_mesh(None), jnp.dtype("float32"))
    monkeypatch.setattr(BoundEagle3, "controller", lambda self: short.own_controller)
    # Blocks are whole: the one that passes the limit still drafts to its end.
    for length, does_draft in ((12, True), (13, True), (14, False), (17, False)):
        for result in check_same(make_drafted(), plain, [ids(length, s) for s in range(4)], on(40)):
            assert (result.speculation.drafted > 0) == does_draft


def test_the_drafters_cache_is_that_of_one_pass_over_the_text(
    make_drafted, make_drafter_folder, ids, on, assert_close
):
    """Rejected drafts and features made by the drafter itself leave no trace."""
    for kind in ("llama", "mla"):
        llm = make_drafted(kind, **({} if kind == "llama" else MLA_31))
        engine = llm.engine
        [request] = llm._requests([ids(40, 1)], on(30))
        state = engine.prefill(engine.new_state([request], batch=4), 39)
        state, _ = engine.decode(state, 9, np.zeros((4,), np.bool_), 3)
        n = int(state.lengths[0]) - 1
        text = state.tokens[0, : n + 1].tolist()
        [whole] = llm._requests([text], on(1))
        again = engine.prefill(engine.new_state([whole], batch=4), n)
        for a, b in zip(state.drafter.cache, again.drafter.cache, strict=True):
            assert_close(a[:n], b[:n], atol=2e-5)
        assert_close(state.drafter.carried[0], again.drafter.carried[0], atol=1e-4)


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
    state = engine.prefill(engine.new_state([request], batch=4), 4)
    call = (engine._weights, state, np.int32(16), np.zeros((4,), np.bool_))
    program = engine._decode.lower(*call, num_draft_tokens=3).as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program
    state, block = engine.decode(state, 16, np.zeros((4,), np.bool_), 3)
    assert int(block.cycles[0]) == 16


@pytest.mark.parametrize("bad", [9, -1, (), (1, 9), True])
def test_a_wrong_number_of_drafts_is_refused_at_once(bad):
    with pytest.raises(ValueError, match="num_draft_tokens is"):
        Eagle3Drafter("nowhere", num_draft_tokens=bad)


def test_decode_runs_fewer_cycles_where_a_block_would_overflow(make_drafted, ids, on):
    llm = make_drafted()
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(200))
    state = engine.prefill(engine.new_state([request], batch=4), 4)
    _, block = engine.decode(state, 64, np.zeros((4,), np.bool_), 8)
    assert int(block.cycles[0]) == 64 // 9
