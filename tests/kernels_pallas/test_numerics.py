"""The helper the other tests trust."""

import numpy as np
import pytest


def test_a_failure_names_the_worst_pair(assert_close):
    expected = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert_close(expected + 1e-7, expected, atol=2e-7)
    actual = expected + np.array([[0.0, 0.5], [0.0, -0.25]])
    message = r"2 of 4 .* max 5.000e-01, mean 1.875e-01; worst at \(0, 1\): 2.5, expected 2 "
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_never_pass(assert_close, bad):
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_close([1.0, bad], [1.0, 1.0], atol=np.inf)
    with pytest.raises(AssertionError, match="expected values are not finite"):
        assert_close([1.0, bad], [1.0, bad])


def test_shapes_are_not_broadcast(assert_close):
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros((2, 1)), np.zeros((1, 2)))
