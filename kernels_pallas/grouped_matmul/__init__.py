"""The routed experts' products: the plain jnp contract, its kernels, and the choice of one.

`expert_ffn` is what the model calls; `reference.py` says what it computes, `layout.py` how INT4
weights lie. The kernels' module is imported where a kernel runs: Pallas takes a while to import.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, tiles
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.reference import ExpertWeights as ExpertWeights
from kernels_pallas.grouped_matmul.reference import SharedExpert as SharedExpert
from kernels_pallas.grouped_matmul.reference import num_experts as num_experts


def expert_ffn(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    expert_ids: Int[Array, "T A"],
    combine_f32: Float[Array, "T A"],
    shared: SharedExpert | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "T D"]:
    """`reference.expert_ffn` by the implementation named, or the best the device supports.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
    """
    operands = x, experts, expert_ids, combine_f32, shared

    def obstacle() -> str | None:
        from kernels_pallas.grouped_matmul import pallas_triton

        return pallas_triton.obstacle(x, experts, expert_ids, shared)

    choice = dispatch.choose("expert_ffn", implementation, obstacle)
    if not choice.is_kernel:
        return reference.expert_ffn(*operands)
    from kernels_pallas.grouped_matmul import pallas_triton

    if x.shape[0] <= pallas_triton.FEW_TOKENS:
        run = pallas_triton.few_tokens
        gate_up, down = tiles.expert_tiles(choice.target, x.shape[0])
    else:
        run, chip = pallas_triton.many_tokens, tiles.chip_tiles(choice.target)
        gate_up, down = chip.gate_up_sorted, chip.down_sorted
    return run(*operands, gate_up=gate_up, down=down, interpret=choice.interpret)
