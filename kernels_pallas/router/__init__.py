"""The choice of experts: the plain jnp contract, its kernel, and the choice between them.

`choose_experts` is what the model calls; `reference.py` says what it computes. The kernel's module
is imported where a kernel runs: Pallas takes a while to import.
"""

from jaxtyping import Array, Bool, Float

from kernels_pallas import dispatch, shapes
from kernels_pallas.router import reference
from kernels_pallas.router.reference import Choosing as Choosing
from kernels_pallas.router.reference import Routing as Routing


def choose_experts(
    logits_f32: Float[Array, "T E"],
    bias_f32: Float[Array, " E"],
    is_real: Bool[Array, " T"] | None,
    choosing: Choosing,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Routing:
    """`reference.choose_experts` by the implementation named, or the best the device supports.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
        ShapeError: the operands are no call of it.
    """

    shapes.bind(
        "choose_experts",
        logits_f32=(logits_f32, "T E"),
        bias_f32=(bias_f32, "E"),
        is_real=(is_real, "T"),
    )

    def obstacle() -> str | None:
        from kernels_pallas.router import pallas_triton

        return pallas_triton.obstacle(choosing)

    choice = dispatch.choose("choose_experts", implementation, obstacle)
    if not choice.is_kernel:
        return reference.choose_experts(logits_f32, bias_f32, is_real, choosing)
    from kernels_pallas.router import pallas_triton

    return pallas_triton.choose_experts(
        logits_f32, bias_f32, is_real, choosing, interpret=choice.interpret
    )
