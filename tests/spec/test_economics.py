import math

import pytest

from spec.economics import (
    Collective,
    Latency,
    Machine,
    Read,
    Work,
    best_num_draft_tokens,
    break_even,
    distinct_experts,
    distinct_in_trace,
    distinct_of_streams,
    expected_tokens_per_cycle,
    pass_seconds,
    rates_from_shares,
    read_seconds,
    seconds_by_term,
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


# The model of time, each formula by hand.


def test_shares_of_cycles_become_conditional_rates():
    assert rates_from_shares([0.8, 0.4, 0.1]) == pytest.approx([0.8, 0.5, 0.25])
    assert expected_tokens_per_cycle(rates_from_shares([0.8, 0.4, 0.1])) == pytest.approx(2.3)
    assert rates_from_shares([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
    assert rates_from_shares([]) == []


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([0.5, 0.6], r"kept_by_depth\[1\] is 0.6, more than the 0.5 before it"),
        ([1.2], r"kept_by_depth\[0\] must be in 0..1, got 1.2"),
        ([0.5, math.nan], r"kept_by_depth\[1\] must be in 0..1, got nan"),
        ([-0.1], r"kept_by_depth\[0\] must be in 0..1"),
    ],
)
def test_shares_never_rise(shares, said):
    with pytest.raises(ValueError, match=said):
        rates_from_shares(shares)


@pytest.mark.parametrize(
    ("rows", "E", "A", "expected"),
    [
        (0, 384, 8, 0),
        (1, 384, 8, 8),
        # 384 (1 - (376/384)^n): the figures Kimi-K2.5 is planned with.
        (2, 384, 8, 15.833),
        (3, 384, 8, 23.503),
        (4, 384, 8, 31.014),
        # Two of four, twice: 4 (1 - 1/4).
        (2, 4, 2, 3),
        (9, 8, 8, 8),
    ],
)
def test_distinct_experts_of_independent_rows(rows, E, A, expected):
    assert distinct_experts(rows, E, A) == pytest.approx(expected, abs=1e-3)


def test_experts_that_cannot_be_are_refused():
    for rows, E, A in ((1, 4, 5), (1, 4, 0), (-1, 4, 2)):
        with pytest.raises(ValueError, match="1 <= num_chosen <= num_experts"):
            distinct_experts(rows, E, A)


def test_distinct_experts_of_a_trace_by_hand():
    first = [(0, 1), (1, 2), (5, 6), (5, 6)]
    second = [(0, 1), (0, 1), (0, 1), (2, 3)]
    # Windows of two: 3, 4, 2 and 2, 2, 4.
    assert distinct_in_trace([first, second], 2) == pytest.approx(17 / 6)
    assert distinct_in_trace([first, second], 1) == 2
    # The whole: 0, 1, 2, 5, 6 and 0, 1, 2, 3.
    assert distinct_in_trace([first, second], 4) == 4.5


def test_a_short_trace_is_refused():
    with pytest.raises(ValueError, match="layer 0 of the trace has 1 tokens, 2 are needed"):
        distinct_in_trace([[(0, 1)]], 2)
    with pytest.raises(ValueError, match="no layers"):
        distinct_in_trace([], 1)


def test_streams_choose_apart():
    assert distinct_of_streams(8, 1, 384) == pytest.approx(8)
    # As many independent rows, where each stream has one.
    assert distinct_of_streams(8, 4, 384) == pytest.approx(distinct_experts(4, 384, 8))
    # 4 (1 - (1 - 3/4)^2)
    assert distinct_of_streams(3, 2, 4) == 3.75


def test_reading_takes_bytes_over_the_share_of_the_bandwidth():
    assert read_seconds(8e9, 2e12, 0.8) == pytest.approx(5e-3)
    assert read_seconds(0, 2e12, 1) == 0
    for efficiency in (0, 1.01, -0.5, math.nan):
        with pytest.raises(ValueError, match="efficiency must be above 0"):
            read_seconds(1, 1, efficiency)
    with pytest.raises(ValueError, match="bytes_per_second must be positive"):
        read_seconds(1, 0, 0.5)


def test_latency_is_straight_between_points():
    latency = Latency(points=((1000, 10e-6), (3000, 14e-6), (5000, 30e-6)))
    expected = {0: 10, 1000: 10, 2000: 12, 3000: 14, 4000: 22, 5000: 30, 6000: 38}
    for size, us in expected.items():
        assert latency.seconds(size) == pytest.approx(us * 1e-6), size


def test_latency_past_the_last_point_is_limited_by_bandwidth():
    flat = Latency(points=((1000, 24e-6), (64000, 24e-6)), bytes_per_second=20e9)
    assert flat.seconds(64000) == 24e-6
    # 200 KB more at 20 GB/s are 10 us.
    assert flat.seconds(264000) == pytest.approx(34e-6)
    # Times that fall are noise: not below the last.
    falling = Latency(points=((1000, 30e-6), (2000, 20e-6)))
    assert falling.seconds(10000) == pytest.approx(20e-6)
    assert Latency(points=((1000, 9e-6),)).seconds(5000) == pytest.approx(9e-6)


@pytest.mark.parametrize("points", [(), ((2, 1e-6), (1, 1e-6)), ((1, 1e-6), (1, 2e-6))])
def test_latency_points_ascend(points):
    with pytest.raises(ValueError, match="must ascend by bytes"):
        Latency(points=points)
    with pytest.raises(ValueError, match="latency of 1 bytes must be positive"):
        Latency(points=((1, 0),))


WORK = Work(
    reads={
        "experts": Read(num_bytes=1.8e9, efficiency=0.5),
        "attention": Read(num_bytes=0.8e9, efficiency=0.8),
    },
    kernels=700,
    collectives=(
        Collective(kind="all-reduce", count=120, num_bytes=2000),
        Collective(kind="all-reduce", count=3, num_bytes=4000),
        Collective(kind="all-gather", count=1, num_bytes=64),
    ),
    host_launches=3,
)
MACHINE = Machine(
    bytes_per_second=2e12,
    kernel_seconds=2e-6,
    host_launch_seconds=5e-6,
    latencies={
        "all-reduce": Latency(points=((2000, 20e-6), (4000, 30e-6))),
        "all-gather": Latency(points=((64, 15e-6),)),
    },
)


def test_a_pass_is_the_sum_of_its_terms_by_hand():
    terms = seconds_by_term(WORK, MACHINE)
    expected = {
        "experts": 1.8e-3,
        "attention": 0.5e-3,
        "kernels": 1.4e-3,
        "all-reduce": 120 * 20e-6 + 3 * 30e-6,
        "all-gather": 15e-6,
        "host": 15e-6,
    }
    assert terms == pytest.approx(expected)
    assert pass_seconds(WORK, MACHINE) == pytest.approx(6.22e-3)


def test_a_collective_needs_a_latency():
    alone = Machine(
        bytes_per_second=2e12, kernel_seconds=2e-6, host_launch_seconds=5e-6, latencies={}
    )
    with pytest.raises(ValueError, match="no latency of 'all-reduce'; known: \\[\\]"):
        pass_seconds(WORK, alone)
