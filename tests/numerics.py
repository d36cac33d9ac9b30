"""Comparing arrays: a failure says how large the difference is and where."""

import numpy as np


def assert_close(actual, expected, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """|actual - expected| <= atol + rtol * |expected|, everywhere, both finite and of one shape."""
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), "the expected values are not finite"
    assert np.isfinite(actual).all(), f"{(~np.isfinite(actual)).sum()} values are not finite"
    if not actual.size:
        return
    difference = np.abs(actual - expected)
    allowed = atol + rtol * np.abs(expected)
    excess = difference - allowed
    if (excess > 0).any():
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        raise AssertionError(
            f"{(excess > 0).sum()} of {actual.size} values differ too much: difference max "
            f"{difference.max():.3e}, mean {difference.mean():.3e}; worst at "
            f"{tuple(map(int, worst))}: {actual[worst]:.9g}, expected {expected[worst]:.9g} "
            f"(difference {difference[worst]:.3e}, allowed {allowed[worst]:.3e})"
        )


def assert_close_to_scale(actual, expected, tolerance: float) -> None:
    """Differences up to `tolerance` of the largest expected magnitude."""
    assert_close(actual, expected, atol=tolerance * float(np.abs(np.asarray(expected)).max()))
