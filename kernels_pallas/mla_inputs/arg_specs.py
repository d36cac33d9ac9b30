"""Named shapes of what attention takes in, and random operands: for tests, compiling and timing.

`kimi-*` are Kimi-K2.5 on one of 8 devices (8 of 64 heads). `tiny-*` are the demo's widths.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class MlaInputsSpec:
    """Sizes of one call, by axis letter."""

    B: int
    T: int
    N: int
    S: int
    C: int = 512
    R: int = 64
    U: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        return {"eps": 1e-6}

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Operands in the op's order."""
        struct, dtype, f32 = jax.ShapeDtypeStruct, jnp.dtype(self.dtype), jnp.dtype(jnp.float32)
        B, T, N, C, R, U = self.B, self.T, self.N, self.C, self.R, self.U
        angles = struct((B, T, R // 2), f32)
        return (
            struct((B, T, N, U + R), dtype),
            struct((B, T, C + R), dtype),
            struct((C,), dtype),
            struct((N, U, C), dtype),
            angles,
            angles,
            struct((B * self.S, C + R), jnp.dtype(self.cache_dtype)),
            struct((B,), jnp.dtype(jnp.int32)),
        )

    def operands(self, seed: int = 0, start: tuple[int, ...] = ()) -> tuple[np.ndarray, ...]:
        """Normal values, angles of a circle; slots drawn by default."""
        rng = np.random.default_rng(seed)

        def draw(s: jax.ShapeDtypeStruct, scale: float = 1.0) -> np.ndarray:
            return (scale * rng.standard_normal(s.shape, np.float32)).astype(s.dtype)

        q, kv, gain, w_uk, angles, _, cache, slots = self.shapes()
        angle = rng.uniform(0, 6.3, angles.shape)
        first = np.array(start or rng.integers(0, self.S - self.T + 1, self.B))
        return (
            draw(q),
            draw(kv),
            draw(gain),
            draw(w_uk, self.U**-0.5),
            np.cos(angle).astype(np.float32),
            np.sin(angle).astype(np.float32),
            draw(cache),
            first.astype(slots.dtype),
        )


SPECS = {
    "kimi-step": MlaInputsSpec(B=1, T=1, N=8, S=8192),
    "kimi-verify": MlaInputsSpec(B=1, T=4, N=8, S=8192),
    "kimi-batch": MlaInputsSpec(B=16, T=4, N=8, S=8192),
    "kimi-one-device": MlaInputsSpec(B=1, T=4, N=64, S=8192),
    "kimi-float32": MlaInputsSpec(B=1, T=4, N=8, S=8192, dtype="float32", cache_dtype="float32"),
    "tiny-step": MlaInputsSpec(
        B=1, T=1, N=4, S=64, C=64, R=16, U=32, dtype="float32", cache_dtype="float32"
    ),
    "tiny-verify": MlaInputsSpec(B=3, T=5, N=2, S=40, C=64, R=16, U=32),
    "tiny-wide-cache": MlaInputsSpec(B=2, T=3, N=2, S=16, C=32, R=16, U=16, cache_dtype="float32"),
}
