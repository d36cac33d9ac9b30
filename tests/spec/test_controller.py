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


def run(controller, acceptance, tokens_wanted, costs=COSTS, most_cycles=MANY, overhead=0.0):
    """Runs the simulated machine: the length each token came from, tokens and seconds.

    `overhead` is a call's own cost, `most_cycles` what a stream's reader lets a block have.
    """
    chosen, tokens, seconds = [], 0.0, 0.0
    while tokens < tokens_wanted:
        shape, most = controller.choose([10])
        K, cycles = shape.num_draft_tokens, cycles_of(shape, min(most, most_cycles))
        each, stood = tokens_of(acceptance, K)
        report = BlockReport(
            proposal=shape,
            cycles=cycles,
            row_cycles=float(cycles),
            accepted_by_depth=tuple(cycles * x for x in stood),
            seconds=overhead + cycles * costs[K],
            is_timed=True,
        )
        controller.observe(report)
        chosen += [K] * round(cycles * each)
        tokens, seconds = tokens + cycles * each, seconds + report.seconds
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


@pytest.mark.slow
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
@pytest.mark.parametrize("most_cycles", [4, MANY])
def test_it_comes_within_a_twentieth_of_the_best_fixed_length(
    acceptance, best, is_calibrated, most_cycles
):
    """Also in a stream, whose blocks are short and begin with shorter ones."""
    controller = AdaptiveLength(LENGTHS, max_length=10**6)
    if is_calibrated:
        controller.calibrate({Chain(K): each for K, each in COSTS.items()})
    for cycles in (1, 2, 4) if most_cycles == 4 else ():
        run(controller, acceptance, 1, most_cycles=cycles, overhead=0.3)
    first, _, _ = run(controller, acceptance, 300, most_cycles=most_cycles, overhead=0.1)
    chosen, tokens, seconds = run(
        controller, acceptance, 4000, most_cycles=most_cycles, overhead=0.1
    )
    assert max(set(chosen), key=chosen.count) == best
    assert controller.current == Chain(best)
    shortest_block = min(most_cycles, BLOCK // (best + 1))
    fixed = {K: cost + 0.1 / min(shortest_block, BLOCK // (K + 1)) for K, cost in COSTS.items()}
    assert tokens / seconds > 0.95 * best_rate(acceptance, fixed)
    # A calibrated controller looks once how many drafts stand, and knows.
    if is_calibrated and most_cycles == MANY:
        lengths = list(dict.fromkeys(first))
        assert lengths[0] == 5 and (best == 5 or lengths[1] == best)


def test_it_follows_a_text_that_changes():
    controller = AdaptiveLength(LENGTHS, max_length=10**6)
    run(controller, [0.0] * 5, 4000)
    chosen, _, _ = run(controller, [0.95] * 5, 4000)
    assert chosen[-1] == 5 and chosen.count(5) > 2500
    chosen, _, _ = run(controller, [0.0] * 5, 1000)
    assert chosen[-800:].count(0) > 700


def test_it_follows_a_machine_that_changes():
    """Costs learnt at one context do not hold at another, nor do their ratios."""
    controller = AdaptiveLength((0, 3), max_length=10**6)
    controller.calibrate({Chain(0): 12.0, Chain(3): 16.0})
    long_context = {0: 30.0, 3: 90.0}
    chosen, _, _ = run(controller, [0.2, 0.0, 0.0], 1000, costs=long_context)
    assert chosen[-500:].count(0) > 450
    # Back at short ones: nothing stands, and drafting does not pay there either.
    chosen, tokens, seconds = run(controller, [0.0] * 3, 3000, costs={0: 12.0, 3: 16.0})
    assert tokens / seconds > 0.95 / 12.0
    # Where cycles have become cheap, drafting is found again.
    chosen, _, _ = run(controller, [0.5, 0.3, 0.1], 4000, costs={0: 12.0, 3: 13.0})
    assert chosen[-500:].count(3) > 450


def test_small_differences_do_not_make_it_waver():
    controller = AdaptiveLength((0, 3), max_length=10**6)
    # The two are equally fast, give or take a hundredth.
    chosen: list[int] = []
    for i in range(40):
        rate = 0.7 + 0.007 * (-1) ** i
        more, _, _ = run(controller, [rate, 0.5, 0.4, 0, 0], 50, costs={0: 1.0, 3: 2.18})
        chosen += more
    switches = sum(a != b for a, b in zip(chosen, chosen[1:], strict=False))
    assert switches < 20


def test_past_the_limit_nothing_is_drafted():
    controller = AdaptiveLength((1, 3), max_length=32)
    assert controller.choose([31, 40]) == (None, MANY)


def test_a_block_that_compiled_teaches_no_cost():
    controller = AdaptiveLength((0, 3), max_length=100)
    report = BlockReport(
        proposal=Chain(3),
        cycles=8,
        row_cycles=8.0,
        accepted_by_depth=(0.0,) * 8,
        seconds=100.0,
        is_timed=False,
    )
    controller.observe(report)
    assert controller.choose([1])[0] == Chain(3)
