"""Cycles predicted from a text, by hand."""

import numpy as np

from spec.training.evaluate import shares, walk


def test_walk_by_hand():
    # Rows 2 to 8; K = 2. Row 2 accepts both (next 5), row 5 none (next 6), row 6 one (next 8),
    # row 8 is the last: one token is left, it stands, nothing comes after it.
    match = np.zeros((3, 12), np.bool_)
    match[:2, 2] = True
    match[1, 5] = True  # the second draft counts for nothing after a wrong first
    match[0, 6] = True
    match[:, 8] = True
    told = walk(match, (2, 8), 2)
    assert (told.cycles, told.drafted, told.emitted) == (4, 8, 7)
    assert told.accepted_by_depth == (3, 1)
    assert shares(told) == [0.75, 0.25]


def test_all_right_and_all_wrong():
    match = np.ones((3, 20), np.bool_)
    told = walk(match, (0, 11), 3)
    assert (told.cycles, told.emitted, told.accepted_by_depth) == (3, 12, (3, 3, 3))
    told = walk(~match, (0, 11), 3)
    assert (told.cycles, told.emitted, told.accepted_by_depth) == (12, 12, (0, 0, 0))


def test_a_reply_of_one_token_takes_no_cycle():
    assert walk(np.ones((1, 4), np.bool_), (2, 1), 1).cycles == 0
