"""The latent cache: what a token leaves behind for later queries, 576 values a layer in K2.5."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.slots import write_rows as write_rows
from kimi_jax.axes import WHOLE, Rules, pytree_dataclass
from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import take_rows

CACHE_AXES = "S CR"
"""Of a layer's rows, for their placement."""


@pytree_dataclass
class LatentCache:
    """One [B*S, C+R] array a layer: the latent after its norm, the shared key after RoPE.

    Batch row b owns slots b*S to (b+1)*S, and a slot's place in them is its token's position. Which
    slots count follows from the queries' positions alone, so dropping rejected tokens is dropping
    their lengths: their slots are written over later.

    Rows and slots share one axis because XLA:CPU copies the whole cache at every step otherwise:
    it fuses the reshape of [1, S, C+R] into the write and then writes twice.

    Where rules cut "S", every device holds a share of each row's slots; B*S are then its own.
    """

    layers: tuple[Float[Array, "BS CR"], ...]

    @classmethod
    def empty(cls, cfg: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype) -> "LatentCache":
        """Zeros for `capacity` slots a row."""
        shape = (batch * capacity, cfg.latent_width)
        return cls(layers=tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_hidden_layers)))

    def grown(self, batch: int, capacity: int) -> "LatentCache":
        """The same rows with `capacity` slots each on this device, the new ones zero."""
        return LatentCache(layers=tuple(grow_rows(x, batch, capacity) for x in self.layers))

    def pspecs(self, rules: Rules) -> "LatentCache":
        """Placement of the layers, in their structure."""
        return jax.tree.map(lambda _: rules.pspec(CACHE_AXES), self)

    def moved(
        self,
        source: Int[Array, "B X"],
        start: Int[Array, " B"],
        offset: int,
        rules: Rules = WHOLE,
    ) -> "LatentCache":
        """Rows start + source[b, i] of each batch row copied to start + offset + i."""
        share = rules.share()
        B = source.shape[0]
        S = self.layers[0].shape[0] // B
        slots = start[:, None] + source
        own = jnp.arange(B, dtype=start.dtype)[:, None] * S + share.last(slots)
        moving = [take_rows(layer, own) for layer in self.layers]
        if not share.is_all:
            # One exchange for all layers; zeros from the devices that do not hold a slot.
            is_here = share.slot(share.last(slots)) == slots
            stacked = jnp.where(is_here[None, :, :, None], jnp.stack(moving), 0)
            moving = list(rules.sum(stacked, "S"))
        pairs = zip(self.layers, moving, strict=True)
        return LatentCache(
            layers=tuple(write_rows(x, rows, start + offset, share) for x, rows in pairs)
        )


def insert_row(rows: Any, own: Any, row: Int[Array, ""]) -> Any:
    """The tree of arrays with this batch row taken from `own`, a tree of one row alone.

    An array's first axis is the rows, or the rows and their slots as here; how many places of it
    are a row's is what `own` has, so that a device's part of the slots is as good as all of them.
    """

    def put(x: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, one, row * one.shape[0], axis=0)

    return jax.tree.map(put, rows, own)


def grow_rows(cache: Float[Array, "BS *row"], batch: int, capacity: int) -> jax.Array:
    """The same rows with `capacity` slots each, the new ones zero."""
    rows = cache.reshape(batch, -1, *cache.shape[1:])
    more = ((0, 0), (0, capacity - rows.shape[1]), *((0, 0),) * (cache.ndim - 1))
    return jnp.pad(rows, more).reshape(batch * capacity, *cache.shape[1:])
