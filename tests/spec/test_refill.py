"""A drafter's state moves with the request that takes a row; its neighbours stay as they are."""

import jax
import numpy as np
import pytest
from scripted import REAL, write_script
from spec_options import OPTIONS

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.llm import DEMO, LLM
from kimi_jax.runtime.run import Run
from spec import DEMO_DRAFTER, load_drafter
from spec.tree import Chain

CASES = [
    ("llama", "tensor=8"),
    pytest.param("llama", None, marks=pytest.mark.slow),
    pytest.param("mla", None, marks=pytest.mark.slow),
]
"""Eight devices by default: one is the case in which nothing is cut."""


def parts(x: jax.Array, num_rows: int) -> list[np.ndarray]:
    """A leaf of a state by rows, slots or not."""
    return np.split(np.asarray(x), num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind, mesh", CASES)
def test_insertion_changes_one_row_and_all_of_it(make_drafted, only, ids, on, kind, mesh):
    """Bit for bit: every other row as it was, the row as it is alone after prefill."""
    llm = make_drafted(kind, mesh=mesh)
    engine = llm.engine
    write_script(llm, REAL)
    only(Chain(3))
    prompts = [ids(n, n) for n in (30, 3, 17, 1)]
    options = on(40, logit_bias={7: 3.0}, temperature=1.0, seed=2, logprobs=1)
    state = engine.prefill(engine.new_state(llm._requests(prompts, options)), 29)
    state, _ = engine.decode(state, 4, np.array([False, False, True, False]), Chain(3))
    # Copies: what another looks at is not donated.
    before = jax.tree.map(np.array, state)
    [request] = llm._requests([ids(21, 5)], on(9, logit_bias={8: 1.0}, seed=1, logprobs=3))
    S = state.tokens.shape[1]
    own = engine.prefill(engine.new_state([request], batch=1, capacity=S), 20)
    own = jax.tree.map(np.asarray, own)
    after = engine.insert(state, request, 2)
    leaves = zip(*map(jax.tree.leaves, (before, after, own)), strict=True)
    for old, new, alone in leaves:
        assert new.shape == old.shape and new.dtype == old.dtype
        rows = parts(new, 4)
        np.testing.assert_array_equal(rows[2], alone)
        for row in (0, 1, 3):
            np.testing.assert_array_equal(rows[row], parts(old, 4)[row])
    assert state.tokens.is_deleted()


@pytest.fixture
def requests_of(ids, on):
    """Ragged prompts and replies, neighbours of every kind."""

    def requests_of(num: int):
        prompts = [ids(1 + (13 * n) % 40, n) for n in range(num)]
        each = ({}, *OPTIONS)
        params = [on(1 + (7 * n) % 30, **each[n % len(each)]) for n in range(num)]
        return prompts, params

    return requests_of


@pytest.mark.parametrize("kind, mesh", CASES)
def test_replies_are_those_of_plain_decoding_alone(
    make_drafted, only, plain, check_replies, requests_of, kind, mesh
):
    llm = make_drafted(kind, mesh=mesh)
    write_script(llm, REAL)
    only(Chain(3))
    prompts, params = requests_of(13)
    expected = [plain.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    check_replies(llm.generate(prompts, params), expected)


@pytest.mark.slow
def test_speculation_is_that_of_the_request_alone(on):
    """The demo's drafter is right as often: it knows all of the prompt it was given in a running
    batch."""
    drafter = load_drafter(DEMO_DRAFTER, num_draft_tokens=3)
    llm = LLM(DEMO, drafter=drafter, max_length=128, max_batch=2, progress=False)
    prompts = ["def add(a, b):", "import ", "class Stack:\n    def push(self", "for i in", "x = ["]
    params = [on(24), on(5), on(16), on(30), on(9, temperature=0.7, seed=1)]
    found = llm.generate(prompts, params)
    for prompt, own, result in zip(prompts, params, found, strict=True):
        [alone] = llm.generate([prompt], own)
        assert (result.token_ids, result.speculation) == (alone.token_ids, alone.speculation)
    assert sum(result.speculation.accepted for result in found) > 20


@pytest.mark.slow
def test_auto_sees_the_rows_that_are_live(
    target_folder, make_drafter_folder, plain, check_replies, requests_of, monkeypatch
):
    """Every length of "auto", after warm-up: nothing compiles, and replies are the plain ones."""
    folder, _ = make_drafter_folder()
    drafter = load_drafter(folder, num_draft_tokens="auto")
    llm = LLM(target_folder, drafter=drafter, max_length=200, max_batch=2, progress=False)
    llm.warm_up()
    before = num_compiles()
    controller = llm.engine.drafter.controller(2)
    choose, observe, seen, told = controller.choose, controller.observe, [], []
    turn = iter([(Chain(K), 3) for K in (0, 5, 1, 0, 3, 2)] * 100)

    def choose_in_turn(lengths):
        seen.append(list(lengths))
        choose(lengths)
        return next(turn)

    def listen(report):
        told.append(report)
        observe(report)

    monkeypatch.setattr(controller, "choose", choose_in_turn)
    monkeypatch.setattr(controller, "observe", listen)
    prompts, params = requests_of(9)
    expected = [plain.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    check_replies(llm.generate(prompts, params), expected)
    assert num_compiles() == before
    assert {len(lengths) for lengths in seen} == {1, 2}
    assert len(told) == len(seen)
    for report in told:
        assert report.is_timed and 0 < report.row_cycles <= report.cycles
        assert sum(report.accepted_by_depth) <= report.row_cycles * report.proposal.depth


@pytest.mark.slow
def test_rows_past_the_drafters_positions_do_not_spoil_a_new_one(
    target_folder, make_drafter_folder, plain, check_replies, ids, on
):
    """Plain decoding leaves them behind; the next request in the other row is drafted for again."""
    folder, _ = make_drafter_folder(max_position_embeddings=24)
    drafter = load_drafter(folder, num_draft_tokens=2)
    llm = LLM(target_folder, drafter=drafter, max_length=200, max_batch=2, progress=False)
    prompts = [ids(30, 1), ids(28, 2), ids(4, 3), ids(5, 4)]
    params = [on(170), on(3), on(12), on(9)]
    expected = [plain.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    found = check_replies(llm.generate(prompts, params), expected)
    assert found[1].speculation.drafted == 0 and found[2].speculation.drafted > 0


def test_updates_count_from_the_requests_own_start(make_drafted, only, ids, on):
    llm = make_drafted("llama", mesh="tensor=8")
    write_script(llm, REAL)
    only(Chain(3))
    requests = llm._requests([ids(3, n) for n in range(9)], [on(3 + n) for n in range(9)])
    for updates in Run(llm.engine, requests):
        for update in updates:
            assert update.drafted == 3 * update.cycles
            assert sum(update.accepted) <= update.drafted
