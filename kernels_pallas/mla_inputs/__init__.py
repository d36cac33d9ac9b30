"""Absorbed queries and cache rows: the plain jnp contract, its kernel, and the choice of one.

`mla_inputs` is what the model calls; `reference.py` says what it computes. The kernel's module is
imported where a kernel runs: Pallas takes a while to import.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, shapes, tiles
from kernels_pallas.mla_inputs import reference
from kernels_pallas.mla_inputs.reference import MlaInputs as MlaInputs
from kernels_pallas.slots import ALL, Share


def mla_inputs(
    q: Float[Array, "B T N UR"],
    kv: Float[Array, "B T CR"],
    gain: Float[Array, " C"],
    w_uk: Float[Array, "N U C"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    cache: Float[Array, "BS CR"],
    start: Int[Array, " B"],
    *,
    eps: float,
    share: Share = ALL,
    implementation: dispatch.Implementation | None = None,
) -> MlaInputs:
    """`reference.mla_inputs` by the implementation named, or the best the device supports.

    The kernel writes the cache in place where the caller gives it up (donation), else XLA copies
    it first.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
        ShapeError: the operands are no call of it.
    """
    operands = q, kv, gain, w_uk, cos, sin, cache, start
    op = "mla_inputs"
    sizes = shapes.bind(
        op,
        q=(q, "B T N UR"),
        kv=(kv, "B T CR"),
        gain=(gain, "C"),
        w_uk=(w_uk, "N U C"),
        cos=(cos, "B T half"),
        sin=(sin, "B T half"),
        start=(start, "B"),
    )
    U, C, R = sizes["U"], sizes["C"], 2 * sizes["half"]
    shapes.require(op, sizes["UR"] == U + R, f"queries {U + R} wide, U + R, not {sizes['UR']}")
    shapes.require(op, sizes["CR"] == C + R, f"kv {C + R} wide, C + R, not {sizes['CR']}")
    shapes.check_cache(op, cache, sizes | {"R": R})
    shapes.require_integers(op, start=start)

    def obstacle() -> str | None:
        from kernels_pallas.mla_inputs import pallas_triton

        return pallas_triton.obstacle(q, w_uk, cache)

    choice = dispatch.choose("mla_inputs", implementation, obstacle)
    if not choice.is_kernel:
        return reference.mla_inputs(*operands, eps=eps, share=share)
    from kernels_pallas.mla_inputs import pallas_triton

    return pallas_triton.mla_inputs(
        *operands,
        share.index,
        eps=eps,
        num_shares=share.count,
        tiles=tiles.chip_tiles(choice.target).absorb,
        interpret=choice.interpret,
    )
