"""INT4 layouts, to the bit: the published words, and the bytes the expert products read."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul.layout import (
    GROUP_SIZE,
    kernel_to_words,
    nibble_planes,
    pack_words,
    unpack_words,
    words_to_kernel,
)


def pack_by_loop(q: np.ndarray) -> np.ndarray:
    """Input 8j+k of a row in bits 4k..4k+3 of word j, as q + 8; the rest of a word is q = 0."""
    words = np.zeros((q.shape[0], -(-q.shape[1] // 8)), np.int32)
    for row in range(q.shape[0]):
        for j in range(words.shape[1]):
            bits = 0
            for k in range(8):
                i = 8 * j + k
                bits |= ((int(q[row, i]) if i < q.shape[1] else 0) + 8) << (4 * k)
            words[row, j] = bits - (1 << 32) if bits >= 1 << 31 else bits
    return words


def random_q(rows: int, width: int) -> np.ndarray:
    q = np.random.default_rng(rows * 1000 + width).integers(-8, 8, (rows, width), np.int8)
    q[0, :2], q[-1, -2:] = (-8, 7), (7, -8)
    return q


def test_a_worked_word():
    q = np.array([[-8, -7, -1, 0, 1, 2, 7, -2]], np.int8)
    (word,) = pack_words(q).view(np.uint32)[0]
    assert word == 0x6FA98710


@pytest.mark.parametrize("extreme", [-8, 7])
def test_extremes_fill_a_word(extreme):
    q = np.full((1, 8), extreme, np.int8)
    words = pack_words(q)
    # All ones is -1: words are signed, and shifting them must not drag the sign along.
    assert words[0, 0] == (0 if extreme == -8 else -1)
    np.testing.assert_array_equal(unpack_words(words, 8), q)


@pytest.mark.parametrize("rows, width", [(1, 8), (3, 32), (5, 64), (4, 12), (7, 1 + 48)])
def test_words_equal_the_loop_and_unpack_again(rows, width):
    q = random_q(rows, max(width, 2))
    words = pack_words(q)
    assert words.dtype == np.int32
    assert (words < 0).any() and (words >= 0).any() or words.size < 8
    np.testing.assert_array_equal(words, pack_by_loop(q))
    np.testing.assert_array_equal(unpack_words(words, width), q)


def test_words_of_a_view_unpack_alike():
    words = pack_words(random_q(6, 64))
    np.testing.assert_array_equal(unpack_words(words[::2], 64), unpack_words(words, 64)[::2])
    wide = np.repeat(words, 2, axis=1)
    np.testing.assert_array_equal(unpack_words(wide[:, ::2], 64), unpack_words(words, 64))


@pytest.mark.parametrize("width", [7 * 8, 8 * 8 + 1, 0])
def test_a_width_the_words_do_not_hold_is_refused(width):
    with pytest.raises(ValueError, match=f"8 words .* do not hold {width} inputs"):
        unpack_words(pack_words(random_q(3, 64)), width)


def test_kernel_layout_is_the_words_transposed():
    q = random_q(5, 64)
    words = pack_words(q)
    packed = words_to_kernel(words)
    assert packed.shape == (32, 5)
    for i in range(32):
        for out in range(5):
            low, high = int(q[out, 2 * i]) + 8, int(q[out, 2 * i + 1]) + 8
            assert packed[i, out] == low | (high << 4)
    np.testing.assert_array_equal(kernel_to_words(packed), words)
    np.testing.assert_array_equal(kernel_to_words(np.ascontiguousarray(packed)), words)


def test_planes_are_even_and_odd_inputs():
    q = random_q(5, 64)
    low, high = nibble_planes(jnp.asarray(words_to_kernel(pack_words(q))))
    np.testing.assert_array_equal(low, q[:, 0::2].T)
    np.testing.assert_array_equal(high, q[:, 1::2].T)
    assert low.dtype == high.dtype == np.int8


def test_a_cut_at_a_group_is_a_cut_of_the_words():
    q = random_q(4, 4 * GROUP_SIZE)
    cut = slice(GROUP_SIZE, 3 * GROUP_SIZE)
    np.testing.assert_array_equal(
        words_to_kernel(pack_words(q))[GROUP_SIZE // 2 : 3 * GROUP_SIZE // 2],
        words_to_kernel(pack_words(q[:, cut])),
    )
