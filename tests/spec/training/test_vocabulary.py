"""The draft vocabulary: which tokens are in it, and how it is published."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax import DEMO
from kimi_jax.text.tokenizer import Tokenizer
from spec.training.samples import Sample
from spec.training.vocabulary import (
    choose_vocabulary,
    count_tokens,
    coverage_of,
    required_ids,
)

COUNTS = np.asarray([0, 9, 4, 4, 0, 1, 4, 0], np.int64)


def test_the_most_counted_and_of_equals_the_lower_id():
    found = choose_vocabulary(COUNTS, 3)
    assert found.ids.tolist() == [1, 2, 3] and found.ids.dtype == np.int32
    assert found.coverage == 17 / 22


def test_required_ids_are_in_it_however_rare():
    found = choose_vocabulary(COUNTS, 3, required=[7, 4, 7])
    assert found.ids.tolist() == [1, 4, 7]
    assert found.coverage == 9 / 22


def test_it_is_filled_with_the_lowest_ids_never_counted():
    found = choose_vocabulary(COUNTS, 7, required=[7])
    assert found.ids.tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert found.coverage == 1


def test_published_form():
    found = choose_vocabulary(COUNTS, 3, required=[7])
    assert found.ids.tolist() == [1, 2, 7]
    assert found.d2t.tolist() == [1, 1, 5] and found.d2t.dtype == np.int64
    assert found.t2d.tolist() == [False, True, True, False, False, False, False, True]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
def test_nothing_left_out_is_more_counted_than_what_was_chosen(counts, data):
    counts = np.asarray(counts, np.int64)
    size = data.draw(st.integers(1, len(counts)))
    required = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=size))
    found = choose_vocabulary(counts, size, required=required)
    ids = set(found.ids.tolist())
    assert len(ids) == size and ids >= set(required)
    assert found.ids.tolist() == sorted(ids)
    assert (np.flatnonzero(found.t2d) == found.ids).all()
    assert (np.arange(size) + found.d2t == found.ids).all()
    free = ids - set(required)
    out = set(range(len(counts))) - ids
    if free and out:
        last = max((-counts[token], token) for token in free)
        assert last < min((-counts[token], token) for token in out)


@pytest.mark.parametrize(
    ("size", "required", "message"),
    [
        (9, [], "size is 9, expected 1 .* to 8"),
        (0, [], "size is 0, expected 1"),
        (1, [2, 3], "size is 1, expected 2 .the ids that are required. to 8"),
        (3, [8], r"required ids \[8\] lie outside the vocabulary 0..7"),
        (3, [-1], r"required ids \[-1\] lie outside"),
    ],
)
def test_sizes_and_ids_that_do_not_fit_are_refused(size, required, message):
    with pytest.raises(ValueError, match=message):
        choose_vocabulary(COUNTS, size, required=required)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="token 1 is counted -3 times"):
        choose_vocabulary(np.asarray([1, -3], np.int64), 1)


def test_generated_tokens_are_counted_and_no_others():
    samples = [Sample.of("a", [1, 2, 3, 3], [(2, 4)]), Sample.of("b", [3, 1, 3], [(1, 2)])]
    counts = count_tokens(samples, 5)
    assert counts.tolist() == [0, 1, 0, 2, 0] and counts.dtype == np.int64
    with pytest.raises(ValueError, match="sample 'a' holds ids outside the vocabulary 0..2"):
        count_tokens(samples, 3)


def test_coverage_of_a_vocabulary_that_is_kept():
    assert coverage_of(np.asarray([1, 5], np.int32), COUNTS) == 10 / 22
    assert coverage_of(np.asarray([0], np.int32), COUNTS) == 0
    assert coverage_of(np.asarray([0], np.int32), np.zeros((8,), np.int64)) == 1


def test_required_ids_of_the_demo():
    tokenizer = Tokenizer.from_folder(DEMO)
    names = [
        *("[EOS]", "<|im_end|>", "<think>", "</think>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ]
    expected = {tokenizer.special_id(name) for name in names}
    assert required_ids(tokenizer, [7]) == [7, *sorted(expected)]
