"""What the kernels share: a product that runs compiled and interpreted, and sizes of tiles."""

import jax
import jax.numpy as jnp


def matmul(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """a @ b inside a kernel, accumulated in float32; float32 operands are not rounded first."""
    if interpret:
        # Products of bfloat16 are exact in float32, and XLA:CPU lacks some bfloat16 forms.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def is_power_of_two(size: int) -> bool:
    """Whether the Triton lowering takes an axis of this size."""
    return size > 0 and size & (size - 1) == 0


def next_power_of_two(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, size - 1).bit_length()
