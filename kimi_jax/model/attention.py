"""What queries see of a cache, and attention of many queries, a block of keys at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.axes import pytree_dataclass

KEY_BLOCK = 256
"""Keys a prefill chunk attends to at a time; bounds its memory whatever the context's length."""


@pytree_dataclass
class TreeRows:
    """Where the rows of a draft tree lie in the cache, and what they see.

    All rows see the text, slots 0..first-1 of their batch row; of the X slots from `first` on, the
    ones their mask names: their ancestors and themselves. A call's T rows lie in the last T of the
    X slots, in order.
    """

    first: Int[Array, " B"]
    mask: Bool[Array, "B T X"]

    @property
    def start(self) -> Int[Array, " B"]:
        """The slot of the call's first row."""
        return self.first + self.mask.shape[2] - self.mask.shape[1]

    @property
    def last(self) -> Int[Array, "B T"]:
        """The last slot of the text, for each row."""
        return jnp.broadcast_to(self.first[:, None] - 1, self.mask.shape[:2])


def attend_blocked(
    q: Float[Array, "B N T X"],
    keys_values: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
    positions: Int[Array, "B T"],
    *,
    num_slots: int,
    value_width: int,
    scale: float,
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B N T H"]:
    """Attends slots 0..position of each row; softmax in float32, result in the query's dtype.

    Online softmax (arXiv 2205.14135, algorithm 1). The loop ends at the last block any query sees,
    so the cost follows the context, not the capacity.

    Args:
        q: queries, heads before tokens: products then run as one batch of matrices, which XLA:CPU
            needs to be fast.
        keys_values: gives keys [B, N, X, s] (each a column) and values [B, N, s, H] of `s` slots
            from the first on.
        positions: the last slot each query sees.
        num_slots: slots a row has.
        value_width: H.
        scale: of the scores.
        first: the first slot each query sees; None is 0 for all.

    Raises:
        ValueError: the slots are no multiple of `KEY_BLOCK`.
    """
    B, N, T, _ = q.shape
    block = min(KEY_BLOCK, num_slots)
    if num_slots % block:
        raise ValueError(f"a cache of {num_slots} slots is not a multiple of the key block {block}")

    def attend_block(i: jax.Array, carry: tuple) -> tuple:
        out_f32, total_f32, largest_f32 = carry
        k, v = keys_values(i * block, block)
        scores_f32 = jnp.matmul(q, k, preferred_element_type=jnp.float32) * scale
        slots = i * block + jnp.arange(block, dtype=positions.dtype)
        seen = slots <= positions[:, None, :, None]
        if first is not None:
            seen &= slots >= first[:, None, :, None]
        scores_f32 = jnp.where(seen, scores_f32, -jnp.inf)
        new_largest = jnp.maximum(largest_f32, jnp.max(scores_f32, axis=-1, keepdims=True))
        weights_f32 = jnp.exp(scores_f32 - new_largest)
        shrink = jnp.exp(largest_f32 - new_largest)
        update = jnp.matmul(weights_f32.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total_f32 = total_f32 * shrink + jnp.sum(weights_f32, axis=-1, keepdims=True)
        return out_f32 * shrink + update, total_f32, new_largest

    start = (
        jnp.zeros((B, N, T, value_width), jnp.float32),
        jnp.zeros((B, N, T, 1), jnp.float32),
        # Finite, so that a block no query sees shrinks by exp(0) and not by exp(nan).
        jnp.full((B, N, T, 1), -1e30, jnp.float32),
    )
    num_blocks = jnp.max(positions) // block + 1
    out_f32, total_f32, _ = jax.lax.fori_loop(0, num_blocks, attend_block, start)
    return (out_f32 / total_f32).astype(q.dtype)
