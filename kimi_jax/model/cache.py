"""The latent cache: what a token leaves behind for later queries, 576 values a layer in K2.5."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.axes import pytree_dataclass
from kimi_jax.config import ModelConfig


@pytree_dataclass
class LatentCache:
    """One [B, S, C+R] array a layer: the latent after its norm, the shared key after RoPE.

    A slot is a position. Which slots count follows from the queries' positions alone, so dropping
    rejected tokens is dropping their lengths: their slots are written over later.
    """

    layers: tuple[Float[Array, "B S CR"], ...]

    @classmethod
    def empty(cls, cfg: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype) -> "LatentCache":
        """Zeros for `capacity` slots a row."""
        shape = (batch, capacity, cfg.latent_width)
        return cls(layers=tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_hidden_layers)))

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.layers[0].shape[1]


def write_rows(
    cache: Float[Array, "B S CR"], rows: Float[Array, "B T CR"], start: Int[Array, " B"]
) -> Float[Array, "B S CR"]:
    """The cache with each batch row's T new rows in slots start..start+T.

    `start + T` must not pass the capacity: XLA would shift the write back over older rows.
    """

    def write(cache_row: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache_row, new, (at, jnp.zeros_like(at)))

    if cache.shape[0] == 1:
        # Batched, the update becomes a scatter, which XLA:CPU runs a row at a time.
        return write(cache[0], rows[0].astype(cache.dtype), start[0])[None]
    return jax.vmap(write)(cache, rows.astype(cache.dtype), start)
