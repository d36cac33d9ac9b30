"""The oracle's own parts against published numbers and worked examples."""

import numpy as np
import oracles

# Kimi-K2.5's inverse frequencies, nine significant digits.
PUBLISHED_ROPE = {
    "dim": 64,
    "theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
PUBLISHED_INV_FREQ = {
    0: 1.0,
    1: 0.713111085,
    7: 0.0937778586,
    8: 0.0668740305,
    9: 0.043776656,
    14: 0.00446584875,
    19: 0.000158374991,
    20: 1.80702339e-05,
    31: 4.38220646e-07,
}


def test_yarn_gives_the_published_table():
    table = oracles.yarn_inv_freq(**PUBLISHED_ROPE)
    assert table.shape == (32,)
    for pair, expected in PUBLISHED_INV_FREQ.items():
        np.testing.assert_allclose(table[pair], expected, rtol=5e-9)
    m = oracles.yarn_mscale(64.0, 1.0)
    np.testing.assert_allclose(192**-0.5 * m * m, 0.144679626, rtol=1e-8)


def test_int4_worked_word_and_round_trip():
    q = np.array([[-8, -7, -1, 0, 1, 2, 7, -2]], np.int8)
    # q + 8 = 0 1 7 8 9 a f 6, the first in the lowest nibble.
    assert oracles.pack_int4(q).view(np.uint32)[0, 0] == 0x6FA98710
    np.testing.assert_array_equal(oracles.unpack_int4(oracles.pack_int4(q), 8), q)
    ones = np.ones((1, 1), np.float32)
    np.testing.assert_array_equal(oracles.dequantize_int4(oracles.pack_int4(q), ones, 8), q)


def test_router_by_hand():
    logits = np.log(np.array([[3.0, 1.0, 1 / 3, 1.0]]))  # scores 0.75, 0.5, 0.25, 0.5
    bias = np.array([-0.6, 0.0, 0.3, 0.0])  # choices 0.15, 0.5, 0.55, 0.5
    ids, weights = oracles.route(logits, bias, 2, scaling=3.0)
    np.testing.assert_array_equal(ids, [[2, 1]])
    np.testing.assert_allclose(weights, [[1.0, 2.0]])
    # Group sums 0.65 and 1.05: only the second group is left.
    ids, weights = oracles.route(
        logits, bias, 1, n_group=2, topk_group=1, norm_topk_prob=False, scaling=2.0
    )
    np.testing.assert_array_equal(ids, [[2]])
    np.testing.assert_allclose(weights, [[0.5]])
    # All but the first group's best are out of reach, even with the best single choice.
    ids, _ = oracles.route(logits, np.array([0.2, 0.4, 0.9, -0.9]), 2, n_group=2, topk_group=1)
    np.testing.assert_array_equal(ids, [[0, 1]])
