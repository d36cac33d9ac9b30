"""What the next block drafts, against simulated machines and drafters."""

import pytest

from kimi_jax.runtime.engine import BlockReport
from spec.controller import MANY, AdaptiveLength, FixedProposal
from spec.tree import Chain, DynamicTree

LENGTHS = (0, 1, 2, 3, 5)
# What a plain step, and a cycle of each length, costs; tokens of a block.
STEP, BLOCK = 1.0, 64
COSTS = {0: 1.0, 1: 1.5, 2: 1.8, 3: 2.1, 5: 2.7}


def cycles_of(shape, most):
    return min(most, BLOCK // (shape.depth + 1))


def tokens_of(acceptance, K):
    """Mean tokens of a cycle, and drafts that stand at each depth."""
    stood, alive = [0.0] * 8, 1.0
    for depth in range(K):
        alive *= acceptance[depth]
        stood[depth] = alive
    return 1 + sum(stood), stood


def run(controller, acceptance, blocks, costs=COSTS, length=10):
    """Runs blocks on the simulated machine: the lengths chosen, tokens and seconds."""
    chosen, tokens, seconds = [], 0.0, 0.0
    for _ in range(blocks):
        shape, most = controller.choose([length])
        K, cycles = shape.num_draft_tokens, cycles_of(shape, most)
        each, stood = tokens_of(acceptance, K)
        report = BlockReport(
            proposal=shape,
            cycles=cycles,
            row_cycles=float(cycles),
            tokens=cycles * each,
            accepted_by_depth=tuple(cycles * x for x in stood),
            seconds=cycles * costs[K],
            is_timed=True,
        )
        controller.observe(report)
        chosen.append(K)
        tokens, seconds = tokens + cycles * each, seconds + cycles * costs[K]
    return chosen, tokens, seconds


def best_rate(acceptance, costs=COSTS):
    return max(tokens_of(acceptance, K)[0] / costs[K] for K in costs)


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(8, depth=3, top_k=2)], ids=str)
def test_fixed_until_the_drafters_own_limit(shape):
    fixed = FixedProposal(shape, max_length=32)
    assert fixed.choose([10, 29]) == (shape, MANY)
    # Rows past the limit ride along while one is inside it.
    assert fixed.choose([10, 200]) == (shape, MANY)
    assert fixed.choose([30, 200]) == (None, MANY)


@pytest.mark.parametrize(
    "acceptance, best",
    [
        ([0.0] * 5, 0),
        ([0.3, 0.2, 0.1, 0.1, 0.1], 0),
        ([0.75, 0.3, 0.2, 0.2, 0.2], 1),
        ([0.9, 0.8, 0.75, 0.4, 0.3], 3),
        ([0.95] * 5, 5),
    ],
)
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_it_comes_within_a_twentieth_of_the_best_fixed_length(acceptance, best, is_calibrated):
    controller = AdaptiveLength(LENGTHS, max_length=1000)
    if is_calibrated:
        controller.calibrate({Chain(K): each for K, each in COSTS.items()})
    first, _, _ = run(controller, acceptance, 6)
    chosen, tokens, seconds = run(controller, acceptance, 60)
    assert max(set(chosen), key=chosen.count) == best
    assert tokens / seconds > 0.95 * best_rate(acceptance)
    # A calibrated controller looks once how many drafts stand, and knows.
    assert not is_calibrated or first[:2] == [5, best]


def test_it_follows_a_text_that_changes():
    controller = AdaptiveLength(LENGTHS, max_length=1000)
    run(controller, [0.0] * 5, 40)
    chosen, _, _ = run(controller, [0.95] * 5, 140)
    assert chosen[-1] == 5 and chosen.count(5) > 40
    chosen, _, _ = run(controller, [0.0] * 5, 40)
    assert chosen[-10:].count(0) >= 9


def test_small_differences_do_not_make_it_waver():
    controller = AdaptiveLength((0, 3), max_length=1000)
    # The two are equally fast, give or take a hundredth.
    chosen, _, _ = run(controller, [0.7, 0.5, 0.4, 0, 0], 6)
    for i in range(30):
        rate = 0.7 + 0.007 * (-1) ** i
        more, _, _ = run(controller, [rate, 0.5, 0.4, 0, 0], 1, costs={0: 1.0, 3: 2.18})
        chosen += more
    switches = sum(a != b for a, b in zip(chosen[6:], chosen[7:], strict=False))
    assert switches <= 2 * (len(chosen) // 8 + 1)


def test_past_the_limit_nothing_is_drafted():
    controller = AdaptiveLength((1, 3), max_length=32)
    assert controller.choose([31, 40]) == (None, MANY)


def test_a_block_that_compiled_teaches_no_cost():
    controller = AdaptiveLength((0, 3), max_length=100)
    report = BlockReport(
        proposal=Chain(3),
        cycles=8,
        row_cycles=8.0,
        tokens=8.0,
        accepted_by_depth=(0.0,) * 8,
        seconds=100.0,
        is_timed=False,
    )
    controller.observe(report)
    assert controller.choose([1])[0] == Chain(3)
