"""Residual sum, RMSNorm and products: the plain jnp contract, its kernel, and the choice of one.

`norm_linear` is what the model calls; `reference.py` says what it computes. The kernel's module is
imported where a kernel runs: Pallas takes a while to import.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import dispatch, shapes, tiles
from kernels_pallas.norm_linear import reference
from kernels_pallas.norm_linear.reference import Normed as Normed


def norm_linear(
    x: Float[Array, "*B D"],
    delta: Float[Array, "*B D"] | None,
    gain: Float[Array, " D"],
    kernels: Sequence[Float[Array, "D _"]],
    *,
    eps: float,
    dtypes: Sequence[jnp.dtype] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Normed:
    """`reference.norm_linear` by the implementation named, or the best the device supports.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
        ShapeError: the operands are no call of it.
    """

    op = "norm_linear"
    sizes = shapes.bind(op, gain=(gain, "D"))
    for number, kernel in enumerate(kernels):
        shapes.bind(op, gain=(gain, "D"), **{f"kernels[{number}]": (kernel, "D _")})
    D = sizes["D"]
    shapes.require(op, x.shape[-1] == D and x.size > 0, f"x [..., {D}], not {list(x.shape)}")
    if delta is not None:
        expected = f"delta {list(x.shape)}, as x, not {list(delta.shape)}"
        shapes.require(op, delta.shape == x.shape, expected)

    def obstacle() -> str | None:
        from kernels_pallas.norm_linear import pallas_triton

        return pallas_triton.obstacle(x, kernels)

    choice = dispatch.choose("norm_linear", implementation, obstacle)
    if not choice.is_kernel:
        return reference.norm_linear(x, delta, gain, kernels, eps=eps, dtypes=dtypes)
    from kernels_pallas.norm_linear import pallas_triton

    return pallas_triton.norm_linear(
        x,
        delta,
        gain,
        tuple(kernels),
        eps=eps,
        dtypes=(x.dtype,) * len(kernels) if dtypes is None else tuple(dtypes),
        tiles=tiles.chip_tiles(choice.target).norm_linear,
        interpret=choice.interpret,
    )
