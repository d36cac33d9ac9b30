"""Attention over the latent cache: the plain jnp contract, its kernel, and the choice of one.

`mla_attention` and `mla_attention_with_lse` are what the model calls; `reference.py` says what they
compute. The kernel's module is imported where a kernel runs: Pallas takes a while to import.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch, shapes, tiles
from kernels_pallas.mla_attention import reference


def mla_attention(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    tree_mask: Bool[Array, "B T X"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N C"]:
    """`reference.mla_attention` by the implementation named, or the best the device supports.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
        ShapeError: the operands are no call of it.
    """
    operands = q_latent, q_rope, cache, last
    _check(*operands, tree_mask)
    choice = _choose(implementation, *operands)
    if not choice.is_kernel:
        return reference.mla_attention(*operands, scale=scale, tree_mask=tree_mask)
    return _kernel(choice, *operands, scale=scale, tree_mask=tree_mask)[0]


def mla_attention_with_lse(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    cache: Float[Array, "BS CR"],
    last: Int[Array, "B T"],
    *,
    scale: float,
    tree_mask: Bool[Array, "B T X"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """`reference.mla_attention_with_lse`, chosen likewise.

    Raises:
        ImplementationError: the one named cannot run; the message says why.
        ShapeError: the operands are no call of it.
    """
    operands = q_latent, q_rope, cache, last
    _check(*operands, tree_mask)
    choice = _choose(implementation, *operands)
    if not choice.is_kernel:
        return reference.mla_attention_with_lse(*operands, scale=scale, tree_mask=tree_mask)
    return _kernel(choice, *operands, scale=scale, tree_mask=tree_mask)


def _check(q_latent: Any, q_rope: Any, cache: Any, last: Any, tree_mask: Any) -> None:
    op = "mla_attention"
    sizes = shapes.bind(
        op,
        q_latent=(q_latent, "B T N C"),
        q_rope=(q_rope, "B T N R"),
        last=(last, "B T"),
        tree_mask=(tree_mask, "B T X"),
    )
    shapes.check_cache(op, cache, sizes)
    shapes.require_integers(op, last=last)
    S, X = cache.shape[0] // sizes["B"], sizes.get("X", 0)
    shapes.require(op, X <= S, f"a tree_mask of at most {S} slots, not {X}")


def _choose(
    implementation: dispatch.Implementation | None, q_latent: Any, q_rope: Any, cache: Any, _: Any
) -> dispatch.Choice:
    def obstacle() -> str | None:
        from kernels_pallas.mla_attention import pallas_triton

        return pallas_triton.obstacle(q_latent, q_rope, cache)

    return dispatch.choose("mla_attention", implementation, obstacle)


def _kernel(choice: dispatch.Choice, q_latent: Any, q_rope: Any, cache: Any, last: Any, *,
            scale: float, tree_mask: Any) -> Any:  # fmt: skip
    from kernels_pallas.mla_attention import pallas_triton

    T, N = q_latent.shape[1:3]
    return pallas_triton.mla_attention_with_lse(
        q_latent,
        q_rope,
        cache,
        last,
        tree_mask,
        scale=scale,
        tiles=tiles.mla_tiles(choice.target, T * N, cache.dtype),
        interpret=choice.interpret,
    )
