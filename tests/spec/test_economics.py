import math

import pytest

from spec.economics import (
    best_num_draft_tokens,
    break_even,
    expected_tokens_per_cycle,
    speedup,
    tokens_per_second,
)

BAD_SECONDS = [0, 0.0, -0.029, math.nan, math.inf, -math.inf]
BAD_TOKENS = [0, 0.84, -2.0, math.nan, math.inf]
BAD_RATES = [-0.01, 1.0001, 2, math.nan, math.inf]

# The engine that made this project: plain decoding at 82 tok/s, a verification of 29 ms.
PLAIN = 1 / 82


def test_break_even_of_the_slow_verification():
    assert break_even(0.029, PLAIN) == pytest.approx(2.378, abs=5e-4)


@pytest.mark.parametrize(
    "tokens, seconds, expected", [(2.0, 0.029, 69), (2.0, 0.019, 105), (1.16, 0.0175, 66)]
)
def test_throughput_of_the_measured_cycles(tokens, seconds, expected):
    assert round(tokens_per_second(tokens, seconds)) == expected


def test_speedup_of_the_measured_cycles():
    assert speedup(2.0, 0.029, PLAIN) == pytest.approx(0.841, abs=5e-4)
    assert speedup(2.0, 0.019, PLAIN) == pytest.approx(1.284, abs=5e-4)
    assert speedup(1.16, 0.0175, PLAIN) == pytest.approx(0.808, abs=5e-4)


def test_break_even_tokens_are_as_fast_as_plain():
    even = break_even(0.029, PLAIN)
    assert tokens_per_second(even, 0.029) == pytest.approx(82, rel=1e-12)
    assert speedup(even, 0.029, PLAIN) == pytest.approx(1, rel=1e-12)
    assert speedup(1, PLAIN, PLAIN) == 1


def test_speedup_is_the_ratio_of_throughputs():
    ratio = tokens_per_second(2.9, 0.021) / tokens_per_second(1, 0.012)
    assert speedup(2.9, 0.021, 0.012) == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(
    "rates, expected",
    [
        ([], 1),
        ([0.0, 0.9, 0.9], 1),
        ([1, 1, 1], 4),
        ([0.5], 1.5),
        ([0.5, 0.5, 0.5], 1.875),
        ([0.8, 0.5, 0.25], 1 + 0.8 + 0.4 + 0.1),
        ((0.8, 0.0, 1.0), 1.8),
    ],
)
def test_expected_tokens_per_cycle(rates, expected):
    assert expected_tokens_per_cycle(rates) == pytest.approx(expected, rel=1e-12)


def test_expected_tokens_is_the_mean_over_all_outcomes():
    rates = [0.7, 0.6, 0.35, 0.9]
    mean, reach = 0.0, 1.0
    for accepted, rate in enumerate([*rates, 0.0]):
        mean += reach * (1 - rate) * (accepted + 1)
        reach *= rate
    assert expected_tokens_per_cycle(rates) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(
    "rates, seconds, expected",
    [
        # Nothing accepted: plain, however cheap drafting is.
        ([0.0, 0.0], {0: 0.012, 1: 0.0121, 2: 0.0122}, 0),
        # 1.9 / 18 ms beats 1 / 12 ms, and 1.9 + 0.09 does not earn 3 ms more.
        ([0.9, 0.1], {0: 0.012, 1: 0.018, 2: 0.021}, 1),
        # Everything accepted and verification nearly free: the longest.
        ([1, 1, 1], {0: 0.012, 1: 0.013, 2: 0.014, 3: 0.015}, 3),
        # 29 ms for 2.0 tokens loses to 82 tok/s; 19 ms wins.
        ([0.7, 0.3 / 0.7], {0: PLAIN, 2: 0.029}, 0),
        ([0.7, 0.3 / 0.7], {0: PLAIN, 2: 0.019}, 2),
        # Depths that were not measured are no candidates, and order does not matter.
        ([0.9, 0.9, 0.9], {3: 0.02, 0: 0.012}, 3),
        # Without a plain time the best of what there is.
        ([0.1], {1: 0.029}, 1),
        ([], {0: 0.012}, 0),
        # Probabilities beyond the longest measured K do not matter.
        ([0.5, 0.5], {0: 0.012, 1: 0.014}, 1),
    ],
)
def test_best_num_draft_tokens(rates, seconds, expected):
    assert best_num_draft_tokens(rates, seconds) == expected


def test_equal_throughput_takes_the_shortest_draft():
    assert best_num_draft_tokens([1, 1, 1], {3: 4.0, 1: 2.0, 0: 1.0}) == 0
    assert best_num_draft_tokens([1, 1, 1], {3: 4.0, 1: 2.0}) == 1


@pytest.mark.parametrize("bad", BAD_SECONDS)
def test_times_must_be_positive_and_finite(bad):
    for call, name in [
        (lambda: break_even(bad, 0.012), "cycle_seconds"),
        (lambda: break_even(0.029, bad), "step_seconds"),
        (lambda: tokens_per_second(2.0, bad), "cycle_seconds"),
        (lambda: speedup(2.0, bad, 0.012), "cycle_seconds"),
        (lambda: speedup(2.0, 0.029, bad), "step_seconds"),
        (lambda: best_num_draft_tokens([0.5], {0: 0.012, 1: bad}), r"cycle_seconds\[1\]"),
    ]:
        with pytest.raises(ValueError, match=f"{name} .*got {bad!r}$"):
            call()


@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_tokens_per_cycle_include_the_targets_own(bad):
    for call in (lambda: tokens_per_second(bad, 0.029), lambda: speedup(bad, 0.029, 0.012)):
        with pytest.raises(ValueError, match=f"tokens_per_cycle .*got {bad!r}$"):
            call()


@pytest.mark.parametrize("bad", BAD_RATES)
def test_probabilities_must_be_in_0_to_1(bad):
    for call in (
        lambda: expected_tokens_per_cycle([0.0, bad]),
        lambda: best_num_draft_tokens([0.0, bad], {0: 0.012}),
    ):
        with pytest.raises(ValueError, match=rf"acceptance_by_depth\[1\] .*got {bad!r}$"):
            call()


def test_draft_lengths_must_be_known():
    with pytest.raises(ValueError, match=r"no measured draft length: \{\}"):
        best_num_draft_tokens([0.5], {})
    with pytest.raises(ValueError, match=r"K = 2; acceptance is known for K = 0\.\.1"):
        best_num_draft_tokens([0.5], {0: 0.012, 2: 0.02})
    with pytest.raises(ValueError, match=r"K = -1;"):
        best_num_draft_tokens([0.5], {-1: 0.012})
