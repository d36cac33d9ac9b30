"""Named shapes of expert products, and random operands of them: for tests, compiling and timing.

`kimi-*` are a layer of Kimi-K2.5 on one of 8 devices (all experts, an eighth of each one's width);
`tiny-*` are the demo's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight
from kernels_pallas.grouped_matmul.reference import ExpertWeights, SharedExpert


@dataclasses.dataclass(frozen=True)
class ExpertSpec:
    """Sizes of one call, by axis letter, with INT4 weights."""

    T: int
    E: int = 384
    D: int = 7168
    F: int = 256
    A: int = 8
    dtype: str = "bfloat16"
    scale_dtype: str = "bfloat16"
    shared: int = 0
    """Width of the shared expert; 0 for none."""

    def shapes(self) -> tuple:
        """Operands in the op's order."""
        struct = jax.ShapeDtypeStruct

        def weight(inputs: int, columns: int) -> Int4Weight:
            packed = struct((self.E, inputs // 2, columns), jnp.dtype(jnp.uint8))
            scale = (self.E, inputs // GROUP_SIZE, columns)
            return Int4Weight(packed, struct(scale, jnp.dtype(self.scale_dtype)))  # type: ignore[arg-type]

        D, F = self.D, self.F
        return (
            struct((self.T, D), jnp.dtype(self.dtype)),
            ExpertWeights(weight(D, F), weight(D, F), weight(F, D)),
            struct((self.T, self.A), jnp.dtype(jnp.int32)),
            struct((self.T, self.A), jnp.dtype(jnp.float32)),
            self._shared(),
        )

    def _shared(self) -> SharedExpert | None:
        if not self.shared:
            return None
        struct, dtype = jax.ShapeDtypeStruct, jnp.dtype(self.dtype)
        hidden = struct((self.T, self.shared), dtype)
        return SharedExpert(hidden, hidden, struct((self.shared, self.D), dtype))  # type: ignore[arg-type]

    def operands(self, seed: int = 0) -> tuple:
        """Normal tokens, every nibble, distinct experts a token, shares that sum to about A/2.

        Scales keep the standard deviation near 1 from product to product.
        """
        rng = np.random.default_rng(seed)

        def weight(struct: Int4Weight) -> Int4Weight:
            packed = rng.integers(0, 256, struct.packed.shape, np.uint8)
            usual = 1 / (4.6 * np.sqrt(2 * struct.packed.shape[1]))
            scale = usual * (0.5 + rng.random(struct.scale.shape, np.float32))
            return Int4Weight(packed, scale.astype(struct.scale.dtype))  # type: ignore[arg-type]

        def normal(struct: Any, scale: float = 1.0) -> Any:
            return (scale * rng.standard_normal(struct.shape, np.float32)).astype(struct.dtype)

        x, experts, ids, combine, shared = self.shapes()
        choices = [rng.permutation(self.E)[: self.A] for _ in range(self.T)]
        return (
            rng.normal(size=x.shape).astype(np.float32).astype(x.dtype),
            ExpertWeights(*map(weight, experts)),
            np.stack(choices).astype(ids.dtype),
            rng.random(combine.shape, combine.dtype),
            shared and SharedExpert(*map(normal, shared, (1.0, 1.0, self.shared**-0.5))),
        )


SPECS = {
    "kimi-step": ExpertSpec(T=1, shared=256),
    "kimi-verify": ExpertSpec(T=4, shared=256),
    "kimi-verify-8": ExpertSpec(T=8, shared=256),
    "kimi-batch": ExpertSpec(T=64, shared=256),
    "kimi-prefill": ExpertSpec(T=512, shared=256),
    "tiny-step": ExpertSpec(T=1, E=16, D=256, F=256, A=4, dtype="float32", scale_dtype="float32"),
    "tiny-verify": ExpertSpec(T=4, E=16, D=256, F=256, A=4, shared=256),
    "tiny-sharded": ExpertSpec(T=5, E=16, D=256, F=32, A=4, dtype="float32", shared=96),
    "tiny-prefill": ExpertSpec(T=128, E=16, D=256, F=256, A=4, dtype="float32", shared=32),
}
