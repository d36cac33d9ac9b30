"""What the kernels share: a product that runs compiled and interpreted, and sizes of tiles."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

FEWEST_ROWS = 16
"""Rows of a tensor core's tile: fewer are padded with rows that are not read."""

MOST_ROWS = 64
"""Of the kernels that take the place of XLA's products: beyond, XLA's are the better ones, which
read the weights once for many rows."""


def matmul(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """a @ b inside a kernel, accumulated in float32; float32 operands are not rounded first."""
    if interpret:
        # Products of bfloat16 are exact in float32, and XLA:CPU lacks some bfloat16 forms.
        a, b = _widened(a), _widened(b)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _widened(x: jax.Array) -> jax.Array:
    """In float32, rounded as it was: of a cast there and back XLA would leave the rounding out."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.float32)


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def is_power_of_two(size: int) -> bool:
    """Whether the Triton lowering takes an axis of this size."""
    return size > 0 and size & (size - 1) == 0


def next_power_of_two(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, size - 1).bit_length()


def largest_power_of_two_in(size: int) -> int:
    """The largest one that divides the size."""
    return size & -size


def padded_rows(num_rows: int) -> int:
    """Rows of the tile that holds them."""
    return max(FEWEST_ROWS, next_power_of_two(num_rows))


def rows_to_load(padded: int, num_rows: int, program: jax.Array) -> tuple[Any, jax.Array]:
    """The first `padded` rows of an array inside a kernel, and which of them there are.

    The start is made from a program id, to be no constant: rows past the array's end are then
    masked, where a constant slice would be refused or cut short.
    """
    zero = program * 0
    return pl.ds(zero, padded), zero + jnp.arange(padded, dtype=jnp.int32) < num_rows
