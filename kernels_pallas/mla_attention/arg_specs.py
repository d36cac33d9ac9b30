"""Named shapes of attention calls, and random operands of them: for tests, compiling and timing.

`kimi-*` are Kimi-K2.5 on one of 8 devices (8 of 64 heads); `verify` has a newest token and 3
drafts, `tree` 8 nodes whose mask covers 12 slots. `tiny-*` are the demo's widths.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class MlaSpec:
    """Sizes of one call, by axis letter; `X` slots of a tree's mask, 0 for a chain."""

    B: int
    T: int
    N: int
    S: int
    C: int = 512
    R: int = 64
    X: int = 0
    dtype: str = "bfloat16"

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Operands in the op's order; the tree's mask last where there is one."""
        dtype = jnp.dtype(self.dtype)
        struct = jax.ShapeDtypeStruct
        shapes = (
            struct((self.B, self.T, self.N, self.C), dtype),
            struct((self.B, self.T, self.N, self.R), dtype),
            struct((self.B * self.S, self.C + self.R), dtype),
            struct((self.B, self.T), jnp.dtype(jnp.int32)),
        )
        if not self.X:
            return shapes
        return *shapes, struct((self.B, self.T, self.X), jnp.dtype(jnp.bool_))

    def operands(self, seed: int = 0, lengths: tuple[int, ...] = ()) -> tuple[np.ndarray, ...]:
        """Normal values, a row's `lengths` of text before its new tokens (drawn by default)."""
        rng = np.random.default_rng(seed)
        *floats, last_struct = self.shapes()[:4]
        arrays = [rng.normal(size=s.shape).astype(np.float32).astype(s.dtype) for s in floats]
        room = self.S - max(self.T, self.X)
        before = np.array(lengths or rng.integers(0, room + 1, self.B))[:, None]
        if not self.X:
            return *arrays, (before + np.arange(self.T)).astype(last_struct.dtype)
        last = np.broadcast_to(before - 1, last_struct.shape).astype(last_struct.dtype)
        return *arrays, last, random_tree(rng, self.B, self.T, self.X)


def random_tree(rng: np.random.Generator, B: int, T: int, X: int) -> np.ndarray:
    """Masks of random trees of X nodes, for the last T of them: ancestors and themselves."""
    masks = np.zeros((B, X, X), bool)
    for mask in masks:
        for node in range(X):
            if node:
                mask[node] = mask[rng.integers(node)]
            mask[node, node] = True
    return masks[:, X - T :]


SPECS = {
    "kimi-step": MlaSpec(B=1, T=1, N=8, S=8192),
    "kimi-verify": MlaSpec(B=1, T=4, N=8, S=8192),
    "kimi-verify-8": MlaSpec(B=1, T=8, N=8, S=8192),
    "kimi-tree": MlaSpec(B=1, T=8, N=8, S=8192, X=12),
    "kimi-batch": MlaSpec(B=8, T=4, N=8, S=2048),
    "kimi-one-device": MlaSpec(B=1, T=4, N=64, S=2048),
    "kimi-float32": MlaSpec(B=1, T=4, N=8, S=2048, dtype="float32"),
    "tiny-step": MlaSpec(B=1, T=1, N=8, S=256, C=64, R=16, dtype="float32"),
    "tiny-verify": MlaSpec(B=2, T=4, N=8, S=256, C=64, R=16, dtype="float32"),
    "tiny-tree": MlaSpec(B=2, T=5, N=2, S=100, C=64, R=16, X=40, dtype="float32"),
    "tiny-many": MlaSpec(B=1, T=64, N=1, S=200, C=64, R=16, dtype="bfloat16"),
}
