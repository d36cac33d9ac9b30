"""Which slots of a cache a device holds, where the cache is cut along the sequence.

Of n devices the i-th holds slots i, i + n, i + 2n, ... of every row, packed: its slot j is slot
j n + i of the row. Each then has an even share of a text of any length, and a cache grows at its
end without moving anything.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Share(NamedTuple):
    """Every `count`-th slot from `index` on; (0, 1) is all of them."""

    index: Int[Array, ""] | int
    count: int

    @property
    def is_all(self) -> bool:
        """Whether nothing is cut."""
        return self.count == 1

    def last(self, last: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """The last of this device's slots that is not after the row's slot `last`; or -1."""
        return (last - self.index) // self.count

    def first(self, slot: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """The first of this device's slots that is not before the row's `slot`."""
        return self.last(slot - 1) + 1

    def slot(self, own: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """The row's slot that this device's slot `own` is."""
        return own * self.count + self.index

    def most(self, num_slots: int) -> int:
        """Of so many slots that follow each other, how many a device holds at most."""
        return -(-num_slots // self.count)

    def tree_mask(
        self, mask: Bool[Array, "B T X"], last: Int[Array, " B"]
    ) -> Bool[Array, "B T own"]:
        """Of the X slots after `last`, what a mask says of this device's: `most(X)` slots."""
        X = mask.shape[2]
        own = self.first(last + 1)[:, None] + jnp.arange(self.most(X), dtype=last.dtype)
        place = self.slot(own) - (last[:, None] + 1)
        seen = jnp.take_along_axis(mask, jnp.minimum(place, X - 1)[:, None], axis=2)
        return seen & (place < X)[:, None]


ALL = Share(0, 1)


def write_rows(
    cache: jax.Array, rows: jax.Array, start: Int[Array, " B"], share: Share = ALL
) -> jax.Array:
    """The cache with each batch row's T new rows in slots start..start+T, as far as it holds them.

    `start + T` must not pass the capacity: it would reach into the next row's slots.

    Args:
        cache: [B*S, ...], S being the slots held of each batch row.
        rows: [B, T, ...]
    """
    B, T = rows.shape[:2]
    S = cache.shape[0] // B
    rows = rows.astype(cache.dtype)
    for b in range(B):
        if share.is_all:
            new, first = rows[b], start[b]
        else:
            # So many slots hold all new rows that are held here; what else they hold stays.
            count = share.most(T)
            first = jnp.minimum(share.first(start[b]), S - count)
            place = share.slot(first + jnp.arange(count, dtype=start.dtype)) - start[b]
            is_new = (place >= 0) & (place < T)
            new = jnp.take(rows[b], place, axis=0, mode="clip")
            old = jax.lax.dynamic_slice_in_dim(cache, b * S + first, count, axis=0)
            new = jnp.where(is_new.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, first + b * S, axis=0)
    return cache
