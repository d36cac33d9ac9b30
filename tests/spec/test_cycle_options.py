"""Everything a request may ask for, in a speculative cycle."""

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import PERFECT, REAL, TREES, WIDE, write_replies, write_script
from spec_options import OPTIONS, SHORT

from kimi_jax.runtime.mesh import make_mesh
from spec import load_drafter
from spec.drafter import BoundEagle3
from spec.tree import Chain


@pytest.fixture(scope="module")
def llm(make_drafted):
    return make_drafted()


@pytest.mark.parametrize(
    "shape",
    [Chain(3), *(pytest.param(shape, marks=pytest.mark.slow) for shape in (WIDE, TREES[1]))],
    ids=str,
)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_means_the_same(llm, only, plain, check_same, ids, on, shape, options):
    """Where all drafts stand, where none does, and where the drafter's own do now and then."""
    only(shape)
    prompts = [ids(n, n) for n in SHORT]
    replies = plain.generate(prompts, on(32, **options))
    for mode in (REAL, PERFECT) if shape == WIDE else (PERFECT,):
        write_replies(llm, prompts, replies, mode)
        for result in check_same(llm, plain, prompts, on(24, **options)):
            if mode == PERFECT and shape in (Chain(3), WIDE):
                assert result.speculation.tokens_per_cycle == 4


@pytest.mark.parametrize("shape", [Chain(3), WIDE], ids=str)
def test_a_stop_anywhere_in_a_cycle_ends_the_reply(llm, only, plain, check_same, ids, on, shape):
    """The end token is met inside a run of accepted drafts; what follows it is dropped."""
    only(shape)
    prompts = [ids(n, n) for n in SHORT]
    free = plain.generate(prompts, on(16, temperature=1.0, seed=3))
    write_replies(llm, prompts, free, PERFECT)
    for place in range(6):
        params = [
            on(12, temperature=1.0, seed=3, stop_token_ids=(r.token_ids[place],)) for r in free
        ]
        for result in check_same(llm, plain, prompts, params):
            assert result.finish_reason == "stop"


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 63, 64, 65])
def test_max_new_tokens_is_exact(llm, only, plain, check_same, ids, on, new):
    only(Chain(3))
    prompts = [ids(n, n) for n in SHORT]
    write_replies(llm, prompts, plain.generate(prompts, on(70)), PERFECT)
    for result in check_same(llm, plain, prompts, on(new)):
        assert result.usage.new_tokens == new


# EAGLE-3.1, as the newest drafters of the MLA kind are published.
MLA_31 = {"fc_norm": True, "norm_output": True}


@pytest.mark.parametrize(
    "shape", [Chain(3), pytest.param(TREES[1], marks=pytest.mark.slow)], ids=str
)
def test_mla_drafters(check_same, make_drafted, only, plain, ids, on, shape):
    llm = make_drafted("mla", **MLA_31)
    only(shape)
    check_same(llm, plain, [ids(n, n) for n in SHORT], on(32))


@pytest.mark.slow
def test_sampled_drafts_keep_the_tokens_at_temperature_zero(
    check_same, make_drafted, only, plain, ids, on
):
    """And at a temperature more of them stand than most likely ones would."""
    llm = make_drafted(sample_drafts=True)
    prompts = [ids(n, n) for n in SHORT]
    for shape in llm.engine.drafter.shapes:
        only(shape)
        check_same(llm, plain, prompts, on(24))
        found = llm.generate(prompts, on(24, temperature=1.0, seed=3))
        again = llm.generate(prompts, on(24, temperature=1.0, seed=3))
        assert [r.token_ids for r in found] == [r.token_ids for r in again]
        assert sum(r.speculation.accepted for r in found) > 5


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["chain", "tree"])
def test_sampled_replies_have_the_distribution_of_plain_ones(
    make_drafted, only, plain, ids, on, place
):
    """Three tokens of two choices each: eight replies, by chi-square against the target's own."""
    llm = make_drafted(sample_drafts=True)
    only(llm.engine.drafter.shapes[place])
    prompt, options = ids(6, 1), {"temperature": 1.5, "top_k": 2}

    def best_two(text):
        row = plain.logits(text)[-1].astype(np.float64) / options["temperature"]
        two = np.argsort(-row)[:2]
        weights = np.exp(row[two] - row[two].max())
        return zip(two.tolist(), weights / weights.sum(), strict=True)

    expected = {(): 1.0}
    for _ in range(3):
        expected = {
            (*reply, token): chance * share
            for reply, chance in expected.items()
            for token, share in best_two(prompt + list(reply))
        }
    seen = dict.fromkeys(expected, 0)
    num = 1200
    for first in range(0, num, 4):
        params = [on(3, seed=first + row, **options) for row in range(4)]
        for result in llm.generate([prompt] * 4, params):
            seen[result.token_ids] += 1
    chi_square = sum(
        (seen[reply] - num * chance) ** 2 / (num * chance) for reply, chance in expected.items()
    )
    # The 99.99 % point for seven degrees of freedom.
    assert chi_square < 29.9


@pytest.mark.slow
def test_lossy_is_exact_where_replies_are_greedy(check_same, make_drafted, only, plain, ids, on):
    """And takes nearly every draft at a temperature where the threshold is next to nothing."""
    llm = make_drafted(lossy_threshold=1e-6)
    only(Chain(3))
    prompts = [ids(n, n) for n in SHORT]
    check_same(llm, plain, prompts, on(24))
    for result in llm.generate(prompts, on(24, temperature=1.0, seed=1)):
        assert result.speculation.tokens_per_cycle > 3.5


@pytest.mark.slow
def test_a_seeded_row_depends_on_nothing_but_its_seed(llm, only, ids, on):
    only(Chain(3))
    write_script(llm, REAL)
    own, others = ids(9, 1), [ids(30, 2), ids(4, 3), ids(100, 4)]
    seeded, free = on(20, temperature=0.8, seed=7), on(20, temperature=0.8)
    expected = llm.generate([own], seeded)[0].token_ids
    for slot in range(4):
        prompts, params = list(others), [free] * 3
        prompts.insert(slot, own)
        params.insert(slot, seeded)
        assert llm.generate(prompts, params)[slot].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, shape, cache",
    [
        ("mla", Chain(3), "replicated"),
        ("llama", WIDE, "sequence"),
        ("llama", TREES[1], "replicated"),
        ("mla", TREES[1], "sequence"),
    ],
    ids=str,
)
def test_eight_devices_give_the_replies_of_one(
    check_same, make_drafted, only, plain, ids, on, kind, shape, cache
):
    only(shape)
    variant = MLA_31 if kind == "mla" else {}
    llm = make_drafted(kind, mesh="tensor=8", cache=cache, **variant)
    one = make_drafted(kind, **variant)
    write_script(one, REAL)
    prompts = [ids(n, n) for n in SHORT]
    for params in (on(16), on(16, temperature=0.8, seed=1)):
        found, alone = check_same(llm, plain, prompts, params), one.generate(prompts, params)
        assert [r.speculation for r in found] == [r.speculation for r in alone]


@pytest.mark.slow
def test_past_its_own_positions_a_drafter_rests(
    check_same, llm, make_drafter_folder, target_cfg, monkeypatch, plain, ids, on
):
    write_script(llm, REAL)
    folder, _ = make_drafter_folder(max_position_embeddings=16)
    short = load_drafter(folder).bind(target_cfg, make_mesh(None), jnp.dtype("float32"))
    controller = short.controller(4)
    monkeypatch.setattr(BoundEagle3, "controller", lambda self, batch: controller)
    # Blocks are whole: the one that passes the limit still drafts to its end.
    for length, does_draft in ((12, True), (13, True), (14, False), (17, False)):
        for result in check_same(llm, plain, [ids(length, s) for s in range(4)], on(40)):
            assert (result.speculation.drafted > 0) == does_draft


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, shape",
    [
        ("llama", WIDE),
        ("mla", Chain(3)),
        ("llama", Chain(3)),
        ("mla", TREES[1]),
    ],
    ids=str,
)
def test_the_caches_are_those_of_one_pass_over_the_text(
    make_drafted, plain, ids, on, assert_close, kind, shape
):
    """Rejected drafts, moved rows and features made by the drafter itself leave no trace."""
    llm = make_drafted(kind, **({} if kind == "llama" else MLA_31))
    engine = llm.engine
    prompt = ids(40, 1)
    reply = list(plain.generate([prompt], on(8))[0].token_ids)
    # Right at first, then all wrong.
    write_script(llm, PERFECT, [prompt + reply])
    [request] = llm._requests([prompt], on(30))
    state = engine.prefill(engine.new_state([request], batch=4), 39)
    state, _ = engine.decode(state, 9, np.zeros((4,), np.bool_), shape)
    n = int(state.lengths[0]) - 1
    assert 0 < int(state.accepted.sum()) < int(state.drafted[0])
    text = state.tokens[0, : n + 1].tolist()
    [whole] = llm._requests([text], on(1))
    again = engine.prefill(engine.new_state([whole], batch=4), n)
    for a, b in zip(state.drafter.cache, again.drafter.cache, strict=True):
        assert_close(a[:n], b[:n], atol=2e-5)
    for a, b in zip(state.cache.layers, again.cache.layers, strict=True):
        assert_close(a[:n], b[:n], atol=2e-5)
    assert_close(state.drafter.carried[0], again.drafter.carried[0], atol=1e-4)
