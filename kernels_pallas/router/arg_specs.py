"""Named shapes of expert choices, and random operands of them: for tests, compiling and timing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.router.reference import Choosing

KIMI = Choosing(
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
)


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """Sizes of one call."""

    T: int
    E: int = 384
    choosing: Choosing = KIMI

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        return {"choosing": self.choosing}

    def shapes(self) -> tuple:
        """Operands in the op's order, but for `choosing`."""
        struct, f32 = jax.ShapeDtypeStruct, jnp.dtype(jnp.float32)
        tokens = struct((self.T,), jnp.dtype(jnp.bool_))
        return struct((self.T, self.E), f32), struct((self.E,), f32), tokens

    def operands(self, seed: int = 0) -> tuple:
        """Normal logits, biases a tenth as large; of several tokens the last is padding."""
        rng = np.random.default_rng(seed)
        logits, bias, real = self.shapes()
        is_real = np.ones(real.shape, np.bool_)
        is_real[1:][-1:] = False
        return (
            rng.standard_normal(logits.shape, np.float32),
            0.1 * rng.standard_normal(bias.shape, np.float32),
            is_real,
        )


SPECS = {
    "kimi-step": RouterSpec(T=1),
    "kimi-verify": RouterSpec(T=4),
    "kimi-prefill": RouterSpec(T=512),
    "tiny": RouterSpec(T=5, E=12, choosing=dataclasses.replace(KIMI, num_experts_per_tok=3)),
}
