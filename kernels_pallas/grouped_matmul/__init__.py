"""The routed experts' products: the plain jnp contract, its kernels, and the choice of one.

`expert_ffn` is what the model calls; `reference.py` says what it computes, `layout.py` how INT4
weights lie. The kernels' module is imported where a kernel runs: Pallas takes a while to import.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, shapes, tiles
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, Int4Weight
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
        ShapeError: the operands are no call of it.
    """
    operands = x, experts, expert_ids, combine_f32, shared
    op = "expert_ffn"
    sizes = shapes.bind(
        op,
        x=(x, "T D"),
        expert_ids=(expert_ids, "T A"),
        combine_f32=(combine_f32, "T A"),
        gate=None if shared is None else (shared.gate, "T F"),
        up=None if shared is None else (shared.up, "T F"),
        down_proj=None if shared is None else (shared.down_proj, "F D"),
    )
    _check_experts(op, experts, sizes["D"])
    shapes.require_integers(op, expert_ids=expert_ids)
    is_f32 = combine_f32.dtype == jnp.float32
    shapes.require(op, is_f32, f"combine_f32 as float32, not {combine_f32.dtype}")

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


def _check_experts(op: str, experts: ExpertWeights, D: int) -> None:
    """Compares the matrices of experts over a stream D wide with each other."""
    found: dict[str, int] = {"D": D}
    for name, axes in (("gate_proj", "E D F"), ("up_proj", "E D F"), ("down_proj", "E F D")):
        weight = getattr(experts, name)
        if isinstance(weight, Int4Weight):
            packed, scale = weight
            is_bytes = packed.dtype == jnp.uint8
            shapes.require(op, is_bytes, f"{name}.packed as uint8, not {packed.dtype}")
            shape = (packed.shape[0], 2 * packed.shape[1], packed.shape[2])
            wanted = (shape[0], shape[1] // GROUP_SIZE, shape[2])
            same = tuple(scale.shape) == wanted
            shapes.require(op, same, f"{name}.scale {list(wanted)}, not {list(scale.shape)}")
        else:
            shape = tuple(weight.shape)
        for letter, size in zip(axes.split(), shape, strict=True):
            known = found.setdefault(letter, size)
            expected = f"{letter} = {known} in {name} [{axes}], not {list(shape)}"
            shapes.require(op, known == size, expected)
