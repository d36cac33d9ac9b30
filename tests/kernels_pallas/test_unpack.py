"""Nibbles made into weights: the plain form to the bit, and the PTX by a bit-exact emulation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import unpack


def test_every_nibble_of_every_scale_is_the_references_weight():
    """All 16 nibbles times all finite positive bfloat16 scales, to the bit."""
    bits = np.arange(0x0080, 0x7F00, dtype=np.uint16)
    scale = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    nibble = jnp.arange(16, dtype=jnp.uint8)[:, None]
    scales = jnp.broadcast_to(scale, (16, bits.size))
    ours = unpack.dequantised(nibble, scales, jnp.dtype(jnp.bfloat16))
    q_f32 = nibble.astype(jnp.float32) - 8.0
    exact = (q_f32 * scale.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(ours, exact)


def halves(register: np.ndarray) -> np.ndarray:
    """The two bfloat16 values of 32-bit registers, the low one first."""
    return register.view(np.uint16).reshape(-1, 2).view(jnp.bfloat16)


def emulated(asm: str, source: np.ndarray) -> np.ndarray:
    """What the instructions leave in $0, register by register (PTX ISA 8, section 9.7)."""
    registers = {"$1": source, "$0": np.zeros_like(source)}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(source, int(name, 0))

    for line in filter(None, (line.strip() for line in asm.strip("{}").split(";"))):
        name, operands = re.fullmatch(r"([\w.]+)\s+(.*)", line).groups()
        out, *rest = (operand.strip() for operand in operands.split(","))
        if name == ".reg":
            continue
        if name == "mov.b32":
            result = value(rest[0])
        elif name == "shr.u32":
            result = value(rest[0]) >> value(rest[1])
        elif name == "lop3.b32":
            a, b, c = (value(each) for each in rest[:3])
            result = np.zeros_like(source)
            # The table's bit 4a + 2b + c is the result's bit.
            for i in (i for i in range(8) if int(rest[3], 0) >> i & 1):
                picked = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
                result |= picked[0] & picked[1] & picked[2]
        elif name == "fma.rn.bf16x2":
            a, b, c = (halves(value(each)).astype(np.float64) for each in rest)
            # Exact in float64; rounded to even once.
            result = (a * b + c).astype(jnp.bfloat16).view(np.uint16).reshape(-1).view(np.uint32)
        else:
            raise AssertionError(f"an instruction that is not emulated: {line}")
        registers[out] = result
    return registers["$0"]


@pytest.mark.parametrize("shift", unpack.SHIFTS)
def test_the_ptx_unpacks_every_16_bit_word(shift):
    words = np.arange(1 << 16, dtype=np.uint16)
    # Beside each word in its register lies another one, which must not matter.
    pairs = np.stack([words, np.random.default_rng(shift).permutation(words)], axis=1)
    out = halves(
        emulated(unpack.ptx(shift), np.ascontiguousarray(pairs).view(np.uint32).reshape(-1))
    )
    np.testing.assert_array_equal(out.astype(np.int32), (pairs.astype(np.int32) >> shift & 0xF) - 8)


def test_the_emulation_would_show_a_wrong_mask():
    """0x00F0 in place of a shift: bfloat16 has too few bits for it."""
    wrong = unpack.ptx(0).replace("0x000F000F", "0x00F000F0")
    words = np.arange(1 << 16, dtype=np.uint32)
    out = halves(emulated(wrong, words))[:, 0].astype(np.int32)
    assert (out != (words.astype(np.int32) >> 4 & 0xF) - 8).mean() > 0.5


def test_both_planes_of_bytes_interpreted():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (32, 16), np.uint8)
    scale = rng.random((2, 16), np.float32)
    low, high = unpack.planes(
        jnp.asarray(packed), jnp.asarray(scale), jnp.dtype(jnp.float32), interpret=True
    )
    spread = np.repeat(scale, 16, axis=0)
    np.testing.assert_array_equal(low, ((packed & 0xF).astype(np.float32) - 8) * spread)
    np.testing.assert_array_equal(high, ((packed >> 4).astype(np.float32) - 8) * spread)
