"""Quantising to INT4 groups of 32 inputs, and the training-time twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model import quant

F32 = np.float32

quantize_int4, dequantize_int4, fake_quantize = map(
    jax.jit, (quant.quantize_int4, quant.dequantize_int4, quant.fake_quantize)
)


def weight(*shape) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(F32))


@pytest.mark.parametrize("lead", [(), (3,)])
def test_equals_a_loop(lead):
    w = weight(*lead, 64, 5)
    q, scale = quantize_int4(w)
    assert q.dtype == jnp.int8 and scale.dtype == jnp.bfloat16
    assert q.shape == w.shape and scale.shape == (*lead, 2, 5)
    for index in np.ndindex(*lead, 2, 5):
        *e, group, out = index
        inputs = slice(32 * group, 32 * group + 32)
        column = np.asarray(w)[(*e, inputs, out)]
        s = (np.abs(column).max() / F32(7)).astype(jnp.bfloat16)
        assert scale[index] == s
        expected = np.clip(np.rint(column / s.astype(F32)), -7, 7)
        np.testing.assert_array_equal(q[(*e, inputs, out)], expected)


def test_ties_go_to_even_and_minus_8_is_left_out():
    # A scale of exactly 1: the largest magnitude is 7.
    column = np.zeros((32, 1), F32)
    column[:8, 0] = [7, -7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    q, scale = quantize_int4(jnp.asarray(column))
    assert scale[0, 0] == 1
    np.testing.assert_array_equal(q[:8, 0], [7, -7, 0, 2, 2, 0, -2, -2])
    # The scale is rounded down to bfloat16 here, so the largest would be 7.03 / 7 steps of it.
    q, scale = quantize_int4(weight(64, 500))
    assert int(q.min()) == -7 and int(q.max()) == 7


def test_zero_groups_stay_zero():
    q, scale = quantize_int4(jnp.zeros((32, 2)))
    assert not np.asarray(q).any() and not np.asarray(scale).any()
    assert not np.asarray(dequantize_int4(q, scale)).any()


def test_quantising_again_changes_nothing():
    q, scale = quantize_int4(weight(64, 5))
    values = dequantize_int4(q, scale)
    assert values.dtype == jnp.float32
    for a, b in zip(quantize_int4(values), (q, scale), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dequantize_has_every_integer():
    q = jnp.asarray(np.resize(np.arange(-8, 8, dtype=np.int8), (64, 3)))
    scale = jnp.asarray(np.array([[0.5, 1, 2], [0.25, 3, 4]], F32)).astype(jnp.bfloat16)
    expected = np.asarray(q).astype(F32) * np.repeat(np.asarray(scale).astype(F32), 32, axis=0)
    np.testing.assert_array_equal(dequantize_int4(q, scale), expected)


def test_error_is_at_most_half_a_step_and_the_rounding_of_the_scale(assert_close):
    w = weight(64, 5)
    q, scale = quantize_int4(w)
    step = np.repeat(np.asarray(scale).astype(F32), 32, axis=0)
    # A scale rounded down by 2^-9 leaves the largest magnitude 7 * 2^-9 steps outside the grid.
    assert (np.abs(dequantize_int4(q, scale) - w) <= (0.5 + 7 * 2**-8) * step).all()


def test_fake_quantize_has_the_quantised_values_and_a_straight_gradient(assert_close):
    w = weight(2, 64, 5)
    # w + (rounded - w) rounds twice in float32.
    assert_close(fake_quantize(w), dequantize_int4(*quantize_int4(w)), atol=5e-7)
    probe = weight(2, 64, 5) + 1
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(fake_quantize(w) * probe)))(w)
    np.testing.assert_array_equal(gradient, probe)
    gradient = jax.grad(lambda w: jnp.sum(fake_quantize(w)))(jnp.zeros((32, 2)))
    np.testing.assert_array_equal(gradient, np.ones((32, 2)))


@pytest.mark.parametrize("width", [48, 12])
def test_int_1_a_width_that_is_no_multiple_of_the_group_is_refused(width):
    with pytest.raises((ValueError, TypeError)):
        quantize_int4(weight(width, 4))
