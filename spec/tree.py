"""What a cycle proposes: a chain of drafts, or a tree of them whose branches are alternatives.

A proposal has M nodes in a fixed order, parents before children. Among the T = M + 1 rows the
target verifies, row 0 is the root, which is the newest token, and row m is node m. Sizes are
static, so every proposal is one program.

    Chain(3)                              three drafts, one after the other: the default
    StaticTree(((0,), (1,), (0, 0)))      the two most likely first tokens, and one after the first
    DynamicTree(8, depth=4, top_k=2)      the eight likeliest nodes, wherever they are (EAGLE-2)
"""

import dataclasses
import numbers
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from kimi_jax.runtime.decode import MAX_DRAFT_DEPTH

CATCH_UP_ROWS = 32
"""Rows the drafter runs over at a time after a block that drafted nothing."""

MAX_NODES = 63
"""Most nodes of a tree, and most of one depth: with the root a verification of 64 rows."""


# It checks its own fields, and says more about them.
@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of always the same shape.

    Args:
        paths: every node by the ranks that lead to it: (0, 1) is the second most likely token after
            the most likely first one. In any order.

    Raises:
        ValueError: a path twice, without its parent or the sibling before it, or too many or too
            deep ones.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        is_list = isinstance(self.paths, Sequence)
        if not is_list or not all(
            isinstance(path, Sequence) and all(map(is_count, path)) for path in self.paths
        ):
            raise ValueError(
                f"a draft tree's paths are {self.paths!r}, expected tuples of ranks from 0"
            )
        paths = tuple(sorted((tuple(path) for path in self.paths), key=lambda p: (len(p), p)))
        object.__setattr__(self, "paths", paths)
        known = {(), *paths}
        if len(known) != len(paths) + 1:
            raise ValueError(f"a draft tree has a path twice, or an empty one: {paths}")
        for path in paths:
            if path[:-1] not in known:
                raise ValueError(f"path {path} of a draft tree has no parent {path[:-1]}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(
                    f"path {path} of a draft tree lacks its sibling {(*path[:-1], path[-1] - 1)}"
                )
        _check_sizes(self.num_draft_tokens, self.depth)

    def __repr__(self) -> str:
        return f"Chain({self.depth})" if self.is_chain else f"StaticTree({self.paths})"

    @property
    def num_draft_tokens(self) -> int:
        """M, the nodes."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Most drafts a cycle can accept."""
        return max(map(len, self.paths), default=0)

    @property
    def num_slots(self) -> int:
        """Cache slots a cycle, or catching up, writes after the newest token's."""
        return self.num_draft_tokens or CATCH_UP_ROWS

    @property
    def is_chain(self) -> bool:
        """No node has a sibling."""
        return self.depth == self.num_draft_tokens

    @property
    def num_siblings(self) -> int:
        """Most children of a node."""
        return 1 + max((path[-1] for path in self.paths), default=0)

    @property
    def parents(self) -> np.ndarray:
        """The row of each node's parent, int32 [M]."""
        rows = {path: row for row, path in enumerate(((), *self.paths))}
        return np.array([rows[path[:-1]] for path in self.paths], np.int32)

    def levels(self) -> list["Level"]:
        """The nodes by depth, as drafting grows them."""
        inner = {path[:-1] for path in self.paths}
        levels: list[Level] = []
        running: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth + 1):
            nodes = [path for path in self.paths if len(path) == depth]
            levels.append(
                Level(
                    parent=np.array([running.index(path[:-1]) for path in nodes], np.int32),
                    rank=np.array([path[-1] for path in nodes], np.int32),
                    rows=np.array([1 + self.paths.index(path) for path in nodes], np.int32),
                    running=np.array([i for i, p in enumerate(nodes) if p in inner], np.int32),
                )
            )
            running = [path for path in nodes if path in inner]
        return levels

    @property
    def proposers(self) -> np.ndarray:
        """Each row's place among those that have children, 0 if it has none; int32 [T]."""
        inner = sorted({int(parent) for parent in self.parents})
        at = {row: place for place, row in enumerate(inner)}
        return np.array([at.get(row, 0) for row in range(self.num_draft_tokens + 1)], np.int32)


def Chain(num_draft_tokens: int) -> StaticTree:  # noqa: N802
    """K drafts, one after the other; 0 is plain decoding that keeps the drafter's cache in step."""
    return StaticTree(tuple((0,) * length for length in range(1, num_draft_tokens + 1)))


class Level(NamedTuple):
    """The nodes of one depth of a static tree."""

    parent: np.ndarray
    """Of each node, its parent's place among the level before's running nodes."""
    rank: np.ndarray
    """Of each node, its place among its siblings."""
    rows: np.ndarray
    """Each node's row."""
    running: np.ndarray
    """Which of the nodes have children: the drafter runs over these."""


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A tree grown where the drafter is sure (EAGLE-2, arXiv 2406.16858, section 4).

    At each depth the `top_k` nodes of the highest probability, the product along their path, are
    extended by their `top_k` likeliest tokens; of all these the likeliest are proposed.

    Args:
        num_draft_tokens: nodes proposed, M.
        depth: most drafts a cycle can accept.
        top_k: nodes extended a depth, and tokens each is extended by.

    Raises:
        ValueError: a size out of range, or more nodes than the tree can grow.
    """

    num_draft_tokens: int
    depth: int = 4
    top_k: int = 4

    def __post_init__(self):
        for name in ("num_draft_tokens", "depth", "top_k"):
            value = getattr(self, name)
            if not is_count(value) or value < 1:
                raise ValueError(f"{name} of a dynamic tree is {value!r}, expected at least 1")
        _check_sizes(self.num_draft_tokens, self.depth)
        if self.top_k > MAX_NODES:
            raise ValueError(f"top_k of a dynamic tree is {self.top_k}, at most {MAX_NODES}")
        if self.num_draft_tokens > self.num_candidates:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and top_k {self.top_k} grows "
                f"{self.num_candidates} nodes, fewer than num_draft_tokens {self.num_draft_tokens}"
            )
        if self.num_draft_tokens < self.depth:
            raise ValueError(
                f"a dynamic tree of {self.num_draft_tokens} nodes cannot be {self.depth} deep"
            )

    @property
    def num_candidates(self) -> int:
        """Nodes grown, of which the likeliest are proposed."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_slots(self) -> int:
        """Cache slots a cycle writes after the newest token's."""
        return max(self.num_draft_tokens, (self.depth - 1) * self.top_k)

    @property
    def is_chain(self) -> bool:
        """A tree, even where it grows as one."""
        return False

    @property
    def num_siblings(self) -> int:
        """Most children of a node."""
        return self.top_k


Shape = StaticTree | DynamicTree
"""A proposal's sizes (`engine.Proposal`)."""


class Drafts(NamedTuple):
    """What was drafted for each batch row."""

    tokens: Int32[Array, "B M"]
    """Target ids of the nodes."""
    parents: Int32[Array, "B M"]
    """The row of each node's parent: 0 is the root, m is node m."""
    mask: Bool[Array, "B T T"] | None
    """Whether row u is row t or above it, [b, t, u]: the tree mask; None for a chain."""
    logits_f32: Float32[Array, "B X V"] | None = None
    """Of sampled drafts, the logits of the distribution each parent's children were drawn from."""


def tree_mask(parents: Int32[Array, "B M"], depth: int) -> Bool[Array, "B T T"]:
    """The mask of nodes with these parents, at most so deep."""
    T = parents.shape[1] + 1
    rows = jnp.arange(T, dtype=jnp.int32)
    own = jnp.eye(T, dtype=jnp.bool_)[None]
    # The root's parent is none.
    padded = jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
    is_parent = (padded[:, :, None] == rows).astype(jnp.float32)
    mask = jnp.broadcast_to(own, is_parent.shape)
    for _ in range(depth):
        above = jnp.matmul(is_parent, mask.astype(jnp.float32)) > 0
        mask = own | above
    return mask


def depths_of(mask: Bool[Array, "B T T"]) -> Int32[Array, "B T"]:
    """How many drafts lead to each row; 0 for the root."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def tokens_before(drafts: Drafts, depth: int) -> Int32[Array, "B T _"]:
    """The drafts that lead to each row of a tree, the first one first; 0 past the row's depth."""
    assert drafts.mask is not None
    at = jnp.arange(1, depth + 1, dtype=jnp.int32)
    is_there = depths_of(drafts.mask)[:, None, None, 1:] == at[:, None]
    is_there = is_there & drafts.mask[:, :, None, 1:]
    return jnp.sum(jnp.where(is_there, drafts.tokens[:, None, None], 0), axis=-1, dtype=jnp.int32)


def pick_rows(x: Array, rows: Int32[Array, "B X"]) -> Array:
    """x[b, rows[b, i]] for every batch row b: [B, X, ...] of [B, T, ...]."""
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *(1,) * (x.ndim - 2)), axis=1)


def is_count(value: Any) -> bool:
    """An integer from 0, and no bool."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= 0


def _check_sizes(num_draft_tokens: int, depth: int) -> None:
    if num_draft_tokens > MAX_NODES:
        raise ValueError(f"a draft tree has {num_draft_tokens} nodes, at most {MAX_NODES}")
    if depth > MAX_DRAFT_DEPTH:
        raise ValueError(f"a draft tree is {depth} deep, at most {MAX_DRAFT_DEPTH}")
