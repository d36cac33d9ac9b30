"""Operands compared with an op's contract before anything runs.

A kernel reads where its operands' sizes send it: one that disagrees with another would be read past
its end. Annotations say the same, but nothing checks them outside tests.
"""

from typing import Any

import jax.numpy as jnp


class ShapeError(ValueError):
    """Operands that are no call of the op; the message names the op, the operand and both sizes."""


def bind(op: str, **operands: tuple[Any, str] | None) -> dict[str, int]:
    """The size of every axis, from operands each given with the names of its axes.

    An axis named "_" may have any size. An operand that is None is left out.

    Raises:
        ShapeError: another number of axes, an axis of two sizes, or one of none.
    """
    sizes: dict[str, int] = {}
    for name, operand in operands.items():
        if operand is None or operand[0] is None:
            continue
        array, axes = operand
        letters = axes.split()
        shape = tuple(array.shape)
        if len(shape) != len(letters):
            raise ShapeError(f"{op}: {name} is {list(shape)}, expected axes [{', '.join(letters)}]")
        for letter, size in zip(letters, shape, strict=True):
            known = sizes.setdefault(letter, size) if letter != "_" else size
            if known != size:
                raise ShapeError(
                    f"{op}: {name} is {list(shape)}, expected {letter} = {known} in "
                    f"[{', '.join(letters)}]"
                )
            if not size:
                raise ShapeError(f"{op}: {name} is {list(shape)}: nothing to compute")
    return sizes


def require(op: str, is_so: bool, what: str) -> None:
    """Says what the op expects where it is not so.

    Raises:
        ShapeError: always then.
    """
    if not is_so:
        raise ShapeError(f"{op}: expected {what}")


def require_integers(op: str, **operands: Any) -> None:
    """Refuses indices of another kind.

    Raises:
        ShapeError: names the operand and its dtype.
    """
    for name, array in operands.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ShapeError(f"{op}: {name} is {array.dtype}, expected integers")


def check_cache(op: str, cache: Any, sizes: dict[str, int]) -> None:
    """Compares a cache [B*S, C+R] with the sizes of a call's other operands.

    Raises:
        ShapeError: it is no cache of so many rows, or of another width.
    """
    B, width = sizes["B"], sizes["C"] + sizes["R"]
    holds_rows = cache.ndim == 2 and not cache.shape[0] % B and cache.shape[0] > 0
    require(op, holds_rows, f"a cache of {B} rows, [{B} * S, C + R], not {list(cache.shape)}")
    is_wide = cache.shape[1] == width
    require(op, is_wide, f"a cache {width} wide, C + R, not {list(cache.shape)}")
