"""Named shapes of norms with products, and random operands of them: for tests, compiling, timing.

`kimi-*` are Kimi-K2.5 on one of 8 devices: `attention` makes the latents of queries and keys,
`queries` expands the former, `moe` feeds the router and the shared expert, `dense` layer 0's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class NormLinearSpec:
    """Sizes of one call; `widths` of its products, the first `exact` of them in float32."""

    T: int
    D: int
    widths: tuple[int, ...]
    has_delta: bool = True
    exact: int = 0
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        kinds = [jnp.dtype(jnp.float32)] * self.exact
        kinds += [jnp.dtype(self.dtype)] * (len(self.widths) - self.exact)
        return {"eps": 1e-5, "dtypes": tuple(kinds)}

    def shapes(self) -> tuple:
        """Operands in the op's order."""
        dtype = jnp.dtype(self.dtype)
        struct = jax.ShapeDtypeStruct
        stream = struct((self.T, self.D), dtype)
        kernels = tuple(struct((self.D, width), dtype) for width in self.widths)
        return stream, stream if self.has_delta else None, struct((self.D,), dtype), kernels

    def operands(self, seed: int = 0) -> tuple:
        """Normal values; gains near 1, products with a standard deviation near 1."""
        rng = np.random.default_rng(seed)

        def draw(s: jax.ShapeDtypeStruct, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
            values = mean + scale * rng.standard_normal(s.shape, np.float32)
            return values.astype(s.dtype)

        x, delta, gain, kernels = self.shapes()
        return (
            draw(x, 3.0),
            None if delta is None else draw(delta),
            draw(gain, 0.2, 1.0),
            tuple(draw(kernel, self.D**-0.5) for kernel in kernels),
        )


SPECS = {
    "kimi-attention-step": NormLinearSpec(T=1, D=7168, widths=(1536, 576)),
    "kimi-attention": NormLinearSpec(T=4, D=7168, widths=(1536, 576)),
    "kimi-queries": NormLinearSpec(T=4, D=1536, widths=(1536,), has_delta=False),
    "kimi-moe": NormLinearSpec(T=4, D=7168, widths=(384, 256, 256), exact=1),
    "kimi-moe-batch": NormLinearSpec(T=64, D=7168, widths=(384, 256, 256), exact=1),
    "kimi-dense": NormLinearSpec(T=4, D=7168, widths=(2304, 2304)),
    "kimi-float32": NormLinearSpec(T=4, D=7168, widths=(384, 256), dtype="float32"),
    "tiny-attention": NormLinearSpec(T=1, D=256, widths=(96, 80), dtype="float32"),
    "tiny-moe": NormLinearSpec(T=5, D=192, widths=(16, 48, 48), exact=1),
    "tiny-queries": NormLinearSpec(T=9, D=96, widths=(64,), has_delta=False, dtype="float32"),
}
