"""INT4 group-32 weights: the published words, and the byte layout the expert products read.

Published (compressed-tensors `pack-quantized`): int32 words along the inputs of an [out, in]
matrix, input 8j+k of a row in bits 4k..4k+3 of word j, stored as q + 8 with q in -8..7, one scale
for every 32 inputs of a row.

Kernel layout: `packed` uint8 [..., in/2, out], byte i of a column holds input 2i in its low and
2i+1 in its high nibble, still as q + 8; `scale` [..., in/32, out]. It is the published bytes
transposed, so nothing is shuffled inside a byte, and any cut along `in` at a multiple of 32 is a
cut of both arrays. A product reads two planes: x[..., 0::2] @ low + x[..., 1::2] @ high.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int8, Int32, UInt8

GROUP_SIZE = 32
VALUES_PER_WORD = 8


class Int4Weight(NamedTuple):
    """INT4 weights of all experts in the kernel layout (a pytree of two arrays)."""

    packed: UInt8[Array, "E half_in out"]
    scale: Float[Array, "E groups out"]


def pack_words(q: Int8[np.ndarray, "out in"]) -> Int32[np.ndarray, "out words"]:
    """Published words of integers in -8..7; a last word that is not full is filled with q = 0."""
    rows, width = q.shape
    padded = np.zeros((rows, -(-width // VALUES_PER_WORD) * VALUES_PER_WORD), np.int8)
    padded[:, :width] = q
    nibbles = (padded + 8).astype(np.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view("<u4").astype(np.uint32).view(np.int32)


def unpack_words(words: Int32[np.ndarray, "out words"], width: int) -> Int8[np.ndarray, "out in"]:
    """Inverse of `pack_words`: the first `width` integers of every row.

    Raises:
        ValueError: the rows hold fewer words than `width` needs, or more.
    """
    if -(-width // VALUES_PER_WORD) != words.shape[1]:
        raise ValueError(
            f"{words.shape[1]} words of 8 INT4 values per row do not hold {width} inputs"
        )
    raw = np.ascontiguousarray(words).view(np.uint8)
    q = np.empty((words.shape[0], raw.shape[1] * 2), np.int8)
    q[:, 0::2] = raw & 0xF
    q[:, 1::2] = raw >> 4
    return q[:, :width] - np.int8(8)


def words_to_kernel(words: Int32[np.ndarray, "out words"]) -> UInt8[np.ndarray, "half_in out"]:
    """The kernel layout's `packed` of one matrix (a view; copying it transposes the bytes)."""
    return np.ascontiguousarray(words).view(np.uint8).T


def kernel_to_words(packed: UInt8[np.ndarray, "half_in out"]) -> Int32[np.ndarray, "out words"]:
    """Inverse of `words_to_kernel`."""
    return np.ascontiguousarray(packed.T).view(np.int32)


def pack_kernel(q: Int8[Array, "*lead in out"]) -> UInt8[Array, "*lead half_in out"]:
    """`packed` of integers in -8..7."""
    nibbles = (q + 8).astype("uint8")
    return nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)


def nibble_planes(packed: UInt8[Array, "*lead out"]) -> tuple[jax.Array, jax.Array]:
    """Integers in -8..7 (int8) of the even inputs (low nibbles) and of the odd ones (high)."""
    low = (packed & 0xF).astype("int8") - 8
    high = (packed >> 4).astype("int8") - 8
    return low, high
