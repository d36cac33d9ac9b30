"""Nibbles made into bfloat16 weights in registers: plain, and in PTX for two at a time.

The bits 0x4300 | n are the bfloat16 number 128 + n, so that taking 136 from it, which is exact,
makes the integer n - 8 without a conversion. Of 16-bit values the compiler would do each step for
one at a time; written out, a register's two values go through each together, and a nibble costs
half the instructions. PTX runs on a GPU alone: interpreted kernels take the plain form.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE

SHIFTS = (0, 4)
"""Where the two nibbles of a byte begin: the even inputs', the odd inputs'."""


def ptx(shift: int) -> str:
    """$0 = two bfloat16 integers in -8..7 from the nibbles at `shift` of $1's two 16-bit words.

    Needs compute capability 8.0, where `fma.rn.bf16x2` begins.
    """
    # 0xEA is (a & b) | c; 0x3F80 is 1, 0xC308 is -136. An fma takes no constants.
    return f"""{{
        .reg .b32 one, less;
        mov.b32 one, 0x3F803F80;
        mov.b32 less, 0xC308C308;
        shr.u32 $0, $1, {shift};
        lop3.b32 $0, $0, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, $0, one, less;
    }}"""


def integers_ptx(packed: UInt8[Array, "half_in out"], shift: int) -> Float[Array, "half_in out"]:
    """bfloat16 integers in -8..7 of the nibbles at `shift`, inside a compiled kernel."""
    (out,) = plgpu.elementwise_inline_asm(
        ptx(shift),
        args=[packed.astype(jnp.int16)],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return out


def dequantised(
    nibble: UInt8[Array, "#half_in #out"], scale: Float[Array, "half_in out"], dtype: jnp.dtype
) -> Float[Array, "half_in out"]:
    """(nibble - 8) * scale, rounded once to `dtype`; the plain form."""
    if dtype == jnp.bfloat16 and scale.dtype == jnp.bfloat16:
        bits = nibble.astype(jnp.uint16) | jnp.uint16(0x4300)
        q = jax.lax.bitcast_convert_type(bits, jnp.bfloat16) - jnp.bfloat16(136.0)
        return q * scale
    q_f32 = nibble.astype(jnp.int32).astype(jnp.float32) - 8.0
    return (q_f32 * scale.astype(jnp.float32)).astype(dtype)


def planes(
    packed: UInt8[Array, "half_in out"],
    scale: Float[Array, "groups out"],
    dtype: jnp.dtype,
    *,
    interpret: bool,
) -> tuple[Float[Array, "half_in out"], Float[Array, "half_in out"]]:
    """Weights of the even inputs and of the odd ones, in `dtype`."""
    groups, width = scale.shape
    spread = jnp.broadcast_to(scale[:, None, :], (groups, GROUP_SIZE // 2, width))
    spread = spread.reshape(packed.shape)
    if dtype == scale.dtype == jnp.bfloat16 and not interpret:
        low, high = (integers_ptx(packed, shift) * spread for shift in SHIFTS)
        return low, high
    nibbles = packed & jnp.uint8(0xF), packed >> jnp.uint8(4)
    low, high = (dequantised(nibble, spread, dtype) for nibble in nibbles)
    return low, high
