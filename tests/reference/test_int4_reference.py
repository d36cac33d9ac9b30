"""INT4 words and values against compressed-tensors' own packing and decompression, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

from kernels_pallas.grouped_matmul.layout import (
    nibble_planes,
    pack_words,
    unpack_words,
    words_to_kernel,
)
from kimi_jax.model.quant import dequantize_int4

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

SHAPES = [(1, 1), (3, 7), (2, 8), (5, 9), (4, 31), (4, 32), (3, 33), (2, 100), (6, 256)]


@pytest.fixture(scope="module")
def packing():
    from compressed_tensors.compressors.pack_quantized import helpers

    return helpers


def integers(rows: int, width: int) -> np.ndarray:
    """Every value -8..7, both ends first."""
    q = np.resize(np.array([-8, 7, *range(-7, 7)], np.int8), (rows, width))
    return np.random.default_rng(width).permuted(q, axis=None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_are_read_and_written_alike(shape, packing):
    q = integers(*shape)
    theirs = packing.pack_to_int32(torch.from_numpy(q), 4).numpy()
    ours = pack_words(q)
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    if shape[1] % 8 == 0:
        np.testing.assert_array_equal(theirs, ours)
    # A last word that is not full is filled differently, and nobody reads the filling.
    np.testing.assert_array_equal(unpack_words(theirs, shape[1]), q)
    np.testing.assert_array_equal(oracles.unpack_int4(theirs, shape[1]), q)
    back = packing.unpack_from_int32(torch.from_numpy(ours), 4, torch.Size(shape)).numpy()
    np.testing.assert_array_equal(back, q)


def test_random_words_are_read_alike(packing):
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (16, 12), dtype=np.int64)
    words = words.astype(np.int32)
    theirs = packing.unpack_from_int32(torch.from_numpy(words), 4, torch.Size((16, 96))).numpy()
    np.testing.assert_array_equal(unpack_words(words, 96), theirs)
    np.testing.assert_array_equal(oracles.unpack_int4(words, 96), theirs)
    low, high = nibble_planes(jnp.asarray(words_to_kernel(words)))
    np.testing.assert_array_equal(np.asarray(low).T, theirs[:, 0::2])
    np.testing.assert_array_equal(np.asarray(high).T, theirs[:, 1::2])


def decompressed(q: np.ndarray, scale: np.ndarray, dtype) -> np.ndarray:
    """compressed-tensors' weights, computed in `dtype`, as float32."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    state = {
        "weight_packed": torch.from_numpy(pack_words(q)),
        "weight_scale": torch.from_numpy(scale.astype(np.float32)).to(dtype),
        "weight_shape": torch.tensor(q.shape),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"].float().numpy()


@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (48, 256)], ids=str)
def test_values_are_equal_in_float32_and_after_rounding_to_bfloat16(shape):
    q = integers(*shape)
    scale = np.random.default_rng(1).uniform(1e-3, 1.0, (shape[0], shape[1] // 32))
    scale = scale.astype(ml_dtypes.bfloat16)
    ours = np.asarray(dequantize_int4(jnp.asarray(q.T), jnp.asarray(scale.T))).T
    np.testing.assert_array_equal(ours, decompressed(q, scale, torch.float32))
    np.testing.assert_array_equal(
        oracles.dequantize_int4(pack_words(q), scale, shape[1]).astype(np.float32), ours
    )
    # In bfloat16 compressed-tensors rounds q * scale once more; this project does not.
    rounded = ours.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(rounded, decompressed(q, scale, torch.bfloat16))
