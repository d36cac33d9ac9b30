"""YaRN's frequencies against the published numbers, the rotation against a loop."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kimi_jax.config import RopeConfig
from kimi_jax.model.rope import cos_sin, inverse_frequencies, rotate

K25 = RopeConfig(
    theta=50000.0,
    factor=64.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=4096,
)
# Nine significant digits; float32 keeps seven of them.
K25_TABLE = """
1 0.713111085 0.508527419 0.36263654 0.258600136 0.184410624 0.13150526 0.0937778586
0.0668740305 0.043776656 0.0284279591 0.0182829556 0.0116191599 0.00727411927 0.00446584875
0.00267020339 0.00153729673 0.000834655045 0.000408645987 0.000158374991 1.80702339e-05
1.28860841e-05 9.1892094e-06 6.55292708e-06 4.67296494e-06 3.3323431e-06 2.3763308e-06
1.69458784e-06 1.20842937e-06 8.6174438e-07 6.14519469e-07 4.38220646e-07
"""


def plain(theta: float, width: int) -> np.ndarray:
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


def test_published_table(assert_close):
    table = inverse_frequencies(K25, 64)
    assert table.dtype == np.float32
    assert_close(table, np.array(K25_TABLE.split(), np.float64), rtol=1e-6)


def test_published_ramp_runs_from_pair_8_to_pair_20(assert_close):
    ratio = inverse_frequencies(K25, 64) / plain(50000.0, 64)
    ramp = np.clip((np.arange(32) - 8) / 12, 0, 1)
    assert_close(ratio, 1 - ramp + ramp / 64, rtol=1e-6)


def test_k2_steps_between_pairs_19_and_20(assert_close):
    k2 = dataclasses.replace(K25, factor=32.0, beta_fast=1.0)
    ratio = inverse_frequencies(k2, 64) / plain(50000.0, 64)
    assert_close(ratio, np.where(np.arange(32) <= 19, 1.0, 1 / 32), rtol=1e-6)


@pytest.mark.parametrize("theta, width", [(50000.0, 64), (10000.0, 8)])
def test_factor_one_is_plain_rope(theta, width, assert_close):
    # beta_fast = beta_slow would be a ramp of no width: it must not be looked at.
    rope = dataclasses.replace(K25, theta=theta, factor=1.0, beta_fast=1.0)
    assert_close(inverse_frequencies(rope, width), plain(theta, width), rtol=1e-6)


def test_ramp_of_no_width_and_limits(assert_close):
    """low = high, and low and high outside 0..width-1 (an original length of a few tokens)."""
    for change in (
        {"beta_fast": 1e-9, "beta_slow": 1e-9},
        {"beta_fast": 1e9, "beta_slow": 1e9},
        {"original_max_position_embeddings": 4},
        {"original_max_position_embeddings": 10**9},
    ):
        rope = dataclasses.replace(K25, **change)
        fields = dataclasses.asdict(rope)
        assert_close(inverse_frequencies(rope, 64), oracles.yarn_inv_freq(64, **fields), rtol=1e-6)


def test_mla_3_limits_do_not_change_frequencies(assert_close):
    """Frequencies know the original length and the factor, and no maximum."""
    rope = dataclasses.replace(K25, factor=4.0, original_max_position_embeddings=32)
    expected = oracles.yarn_inv_freq(64, **dataclasses.asdict(rope))
    assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-6)
    assert not {f.name for f in dataclasses.fields(RopeConfig)} & {"max_position_embeddings"}


def test_angles_at_the_last_position(assert_close):
    positions = np.array([[0, 1, 100, 4095, 262143]], np.int32)
    cos, sin = cos_sin(jnp.asarray(positions), K25, 64)
    assert cos.shape == sin.shape == (1, 5, 32) and cos.dtype == sin.dtype == jnp.float32
    angles = positions[..., None] * np.array(K25_TABLE.split(), np.float64)
    # An angle of 262143 radians has a float32 step of 0.03; up to 4095 it is 2.4e-4.
    assert_close(cos[:, :3], np.cos(angles[:, :3]), atol=1e-5)
    assert_close(sin[:, :3], np.sin(angles[:, :3]), atol=1e-5)
    assert_close(cos, np.cos(angles), atol=0.04)
    assert_close(cos**2 + sin**2, np.ones(cos.shape), atol=1e-6)


def test_magnitude_is_the_ratio_of_the_two_mscales(assert_close):
    positions = jnp.zeros((1, 1), jnp.int32)
    for mscale, all_dim in ((1.0, 1.0), (1.0, 0.0), (0.707, 0.5)):
        rope = dataclasses.replace(K25, mscale=mscale, mscale_all_dim=all_dim)
        m = [0.1 * a * math.log(64.0) + 1 for a in (mscale, all_dim)]
        cos, sin = cos_sin(positions, rope, 64)
        assert_close(cos, np.full((1, 1, 32), m[0] / m[1]), rtol=1e-6)
        assert not np.asarray(sin).any()


def rotate_by_loop(x, positions, inv_freq):
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        for i, frequency in enumerate(inv_freq):
            angle = float(positions[index[:2]]) * frequency
            even, odd = x[index][2 * i], x[index][2 * i + 1]
            out[index][2 * i] = even * math.cos(angle) - odd * math.sin(angle)
            out[index][2 * i + 1] = even * math.sin(angle) + odd * math.cos(angle)
    return out


@pytest.mark.parametrize("heads", [(), (3,)], ids=["shared key", "heads"])
def test_rotation_is_interleaved(heads, assert_close):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, *heads, 64)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3], [50, 51, 99, 100]], np.int32)
    run = jax.jit(lambda x, positions: rotate(x, *cos_sin(positions, K25, 64)))
    expected = rotate_by_loop(x, positions, np.array(K25_TABLE.split(), np.float64))
    # Angles up to 100 in float32: 4e-6 each.
    assert_close(run(x, positions), expected, atol=3e-5)
    np.testing.assert_array_equal(run(x, positions)[0, 0], x[0, 0])


def test_rotation_is_float32_whatever_goes_in(assert_close):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, 2, 8))).astype(jnp.bfloat16)
    cos, sin = cos_sin(jnp.array([[7, 31]], jnp.int32), K25, 8)
    out = rotate(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))
