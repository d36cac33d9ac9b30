"""The cycle: the very replies of plain decoding, whatever is drafted and in whatever shape."""

import jax
import numpy as np
import pytest
from scripted import CHAINS, PERFECT, REAL, TREES, WIDE, WRONG, write_replies, write_script
from spec_options import OPTIONS, SHORT

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.llm import LLM
from spec import DynamicTree, load_drafter
from spec.tree import Chain

LENGTHS = (SHORT, (3, 40, 128, 200), (5, 129, 33, 64))


@pytest.fixture(scope="module")
def llm(make_drafted):
    """One program a shape, for drafters of every kind."""
    return make_drafted()


@pytest.fixture(scope="module")
def expected(plain, ids, on):
    """Prompts and their greedy replies, batch by batch."""
    batches = [[ids(n, seed * 10 + n) for n in lengths] for seed, lengths in enumerate(LENGTHS)]
    return [(batch, plain.generate(batch, on(32))) for batch in batches]


# Of each tree, the depth of its last branches: how much of it a perfect drafter's target accepts.
LAST = {TREES[0]: 1, WIDE: 3}


# Lengths between these are no case of their own; all but one length and one tree are slow.
LENGTHS_TRIED = tuple(CHAINS[K] for K in (0, 1, 3, 5, 8))
DEFAULT = (CHAINS[3], TREES[1])
EVERY = [
    shape if shape in DEFAULT else pytest.param(shape, marks=pytest.mark.slow)
    for shape in (*LENGTHS_TRIED, *TREES, WIDE)
]


@pytest.mark.parametrize("shape", EVERY, ids=str)
def test_greedy_replies_are_those_of_plain_decoding(llm, only, expected, check_replies, on, shape):
    """With a random drafter, one that is always right, and one that is always wrong."""
    only(shape)
    for prompts, replies in expected:
        for mode in (REAL, PERFECT, WRONG):
            write_replies(llm, prompts, replies, mode)
            # A multiple of no cycle's tokens; a perfect script must reach to the end.
            found = check_replies(llm.generate(prompts, on(24)), replies, 24)
            for result in found:
                told = result.speculation
                assert told.drafted == shape.num_draft_tokens * told.cycles
                if mode == WRONG:
                    assert (told.accepted, told.tokens_per_cycle) == (0, 1.0)
                if mode == PERFECT and not isinstance(shape, DynamicTree):
                    depth = LAST.get(shape, shape.depth)
                    assert told.cycles == -(-24 // (depth + 1))


@pytest.mark.parametrize(
    "shape", [Chain(0), pytest.param(TREES[2], marks=pytest.mark.slow)], ids=str
)
def test_replies_end_in_the_last_slot(
    make_drafted, only, plain, check_same, ids, on, shape, monkeypatch
):
    """Where a row's last slots end, the next row's begin."""
    llm = make_drafted(choices=(shape,), max_length=256 - shape.num_slots)
    monkeypatch.setattr(plain.engine, "max_length", llm.max_length)
    monkeypatch.setattr(plain.requests, "max_length", llm.max_length)
    only(shape)
    most = min(240, llm.max_length)
    prompts = [ids(n, n) for n in (most - 2, 200, most - 7, most - 1)]
    whole = plain.generate(prompts, on(None))
    write_replies(llm, prompts, whole, PERFECT)
    for result in check_same(llm, plain, prompts, on(None)):
        assert result.finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", pytest.param("mla", marks=pytest.mark.slow)])
def test_after_plain_blocks_the_drafter_has_caught_up(make_drafted, ids, on, assert_close, kind):
    """Blocks of unequal lengths and rows; then its cache is that of one pass over the text."""
    llm = make_drafted(kind, choices=CHAINS[:1])
    engine = llm.engine
    prompts = [ids(40, 1), ids(7, 2)]
    requests = llm._requests(prompts, [on(30), on(3)])
    state = engine.prefill(engine.new_state(requests, batch=4), 39)
    for cycles in (1, 20, 5):
        state, _ = engine.decode(state, cycles, np.zeros((4,), np.bool_), Chain(0))
    n = int(state.lengths[0]) - 1
    assert n == 40 + 26 - 1
    [whole] = llm._requests([state.tokens[0, : n + 1].tolist()], on(1))
    again = engine.prefill(engine.new_state([whole], batch=4), n)
    for a, b in zip(state.drafter.cache, again.drafter.cache, strict=True):
        assert_close(a[:n], b[:n], atol=2e-5)
    assert_close(state.drafter.carried[0], again.drafter.carried[0], atol=1e-4)


def test_nothing_compiles_after_warm_up(target_folder, make_drafter_folder, ids, on):
    folder, _ = make_drafter_folder()
    drafter = load_drafter(folder, tree=DynamicTree(4, depth=2, top_k=2))
    llm = LLM(target_folder, drafter=drafter, max_length=200, max_batch=1, progress=False)
    llm.warm_up()
    before = num_compiles()
    for length in (1, 2, 17, 130):
        for options in ({}, OPTIONS[1], OPTIONS[4]):
            [result] = llm.generate([ids(length)], on(30, **options))
            assert result.timings.compiles == 0
    # Three hundred requests in a row, each as the first.
    first = llm.generate([ids(3)], on(4))[0].token_ids
    for _ in range(300):
        assert llm.generate([ids(3)], on(4))[0].token_ids == first
    assert num_compiles() == before


def test_a_block_of_cycles_never_leaves_the_device(llm, ids, on):
    write_script(llm, REAL)
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(100))
    state = engine.prefill(engine.new_state([request], batch=4), 4)
    call = (engine._weights, state, np.int32(16), np.zeros((4,), np.bool_))
    program = engine._decode.lower(*call, proposal=Chain(3)).as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program
    for shape in (Chain(3), WIDE):
        with jax.transfer_guard_device_to_host("disallow"):
            state, block = engine.decode(state, 4, np.zeros((4,), np.bool_), shape)
            jax.block_until_ready(block)
    assert int(block.cycles[0]) == 8


def test_decode_runs_fewer_cycles_where_a_block_would_overflow(llm, ids, on):
    engine = llm.engine
    [request] = llm._requests([ids(5)], on(200))
    state = engine.prefill(engine.new_state([request], batch=4), 4)
    _, block = engine.decode(state, 64, np.zeros((4,), np.bool_), Chain(8))
    assert int(block.cycles[0]) == 64 // 9
