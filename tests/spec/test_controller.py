"""Which number of drafts the next block takes."""

from spec.controller import PROBE_EVERY, FastestLength, FixedLength


def test_fixed_until_the_drafters_own_limit():
    fixed = FixedLength(3, max_length=32)
    assert fixed.choose([10, 29]) == 3
    # Rows past the limit ride along while one is inside it.
    assert fixed.choose([10, 200]) == 3
    assert fixed.choose([30, 200]) == 0


def run(controller, tokens_per_second, blocks):
    chosen = []
    for _ in range(blocks):
        k = controller.choose([10])
        chosen.append(k)
        controller.observe(k, 10, 64.0, 64 / tokens_per_second[k])
    return chosen


def test_the_fastest_is_found_and_the_others_are_tried_again():
    controller = FastestLength((0, 1, 3), max_length=1000)
    chosen = run(controller, {0: 80.0, 1: 100.0, 3: 60.0}, 3 + 4 * PROBE_EVERY)
    assert chosen[:3] == [3, 1, 0]
    later = chosen[3:]
    assert later.count(1) == 4 * (PROBE_EVERY - 1)
    assert {later[i] for i in range(PROBE_EVERY - 1, len(later), PROBE_EVERY)} == {0, 3}


def test_plain_decoding_wins_where_drafting_does_not_pay():
    controller = FastestLength((0, 3), max_length=1000)
    chosen = run(controller, {0: 82.0, 3: 60.0}, 2 + 8 * PROBE_EVERY)
    assert chosen[2:].count(3) == 8


def test_it_follows_a_text_that_changes():
    controller = FastestLength((0, 3), max_length=1000)
    run(controller, {0: 82.0, 3: 60.0}, 20)
    later = run(controller, {0: 82.0, 3: 160.0}, 6 * PROBE_EVERY)
    assert later[-PROBE_EVERY:].count(3) >= PROBE_EVERY - 1


def test_past_the_limit_nothing_is_drafted():
    assert FastestLength((1, 3), max_length=32).choose([31, 40]) == 0


def test_an_empty_or_a_short_block_teaches_nothing():
    controller = FastestLength((0, 3), max_length=100)
    controller.observe(3, 0, 0.0, 0.0)
    controller.observe(3, 2, 2.0, 1.0)
    assert controller.choose([1]) == 3
