"""Shapes of proposals: their sizes, their masks, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.runtime.engine import Proposal
from spec import DynamicTree, StaticTree, load_drafter
from spec.tree import CATCH_UP_ROWS, Chain, Drafts, tokens_before, tree_mask

TREE = StaticTree(((0, 0), (1,), (0,), (1, 0), (0, 1), (0, 1, 0)))


def test_nodes_are_in_order_of_depth_whatever_order_they_are_given_in():
    assert TREE.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert TREE.parents.tolist() == [0, 0, 1, 1, 2, 4]
    assert (TREE.num_draft_tokens, TREE.depth, TREE.num_slots, TREE.num_siblings) == (6, 3, 6, 2)
    assert not TREE.is_chain and isinstance(TREE, Proposal)
    # Rows 0, 1, 2 and 4 have children.
    assert TREE.proposers.tolist() == [0, 1, 2, 0, 3, 0, 0]


def test_a_chain_is_a_tree_without_siblings():
    chain = Chain(3)
    assert chain == StaticTree(((0,), (0, 0), (0, 0, 0))) and chain.is_chain
    assert (chain.num_draft_tokens, chain.depth, str(chain)) == (3, 3, "Chain(3)")
    rest = Chain(0)
    assert (rest.num_draft_tokens, rest.depth, rest.is_chain) == (0, 0, True)
    assert rest.num_slots == CATCH_UP_ROWS


def test_the_mask_names_a_nodes_ancestors_and_itself():
    parents = jnp.asarray(TREE.parents)[None]
    mask = np.asarray(tree_mask(parents, TREE.depth))[0]
    expected = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 1, 4, 6}]
    assert [set(np.flatnonzero(row).tolist()) for row in mask] == expected


def test_the_text_before_a_row_is_its_branch():
    tokens = jnp.asarray([[10, 20, 11, 12, 21, 13]], jnp.int32)
    parents = jnp.asarray(TREE.parents)[None]
    drafts = Drafts(tokens, parents, tree_mask(parents, 3))
    found = tokens_before(drafts, 3)[0].tolist()
    none = [0, 0, 0]
    assert found == [
        none,
        [10, 0, 0],
        [20, 0, 0],
        [10, 11, 0],
        [10, 12, 0],
        [20, 21, 0],
        [10, 12, 13],
    ]


@pytest.mark.parametrize(
    "paths, problem",
    [
        (((0, 0),), "no parent"),
        (((1,),), "lacks its sibling"),
        (((0,), (0,)), "twice"),
        (((0,), ()), "empty"),
        (((-1,),), "ranks from 0"),
        ((0, 1), "expected tuples"),
        (3, "expected tuples"),
        (tuple((0,) * n for n in range(1, 10)), "9 deep, at most 8"),
        (tuple((n,) for n in range(64)), "64 nodes, at most 63"),
    ],
)
def test_a_static_tree_must_hang_together(paths, problem):
    with pytest.raises(ValueError, match=problem):
        StaticTree(paths)


@pytest.mark.parametrize(
    "sizes, problem",
    [
        ((0, 1, 1), "num_draft_tokens of a dynamic tree is 0"),
        ((4, 2, True), "top_k"),
        ((7, 2, 2), "grows 6 nodes"),
        ((2, 3, 2), "cannot be 3 deep"),
        ((64, 8, 8), "at most 63"),
        ((20, 9, 4), "at most 8"),
        ((8, 4, 1000), "top_k of a dynamic tree is 1000, at most 63"),
    ],
)
def test_a_dynamic_tree_must_be_able_to_grow(sizes, problem):
    with pytest.raises(ValueError, match=problem):
        DynamicTree(*sizes)


@pytest.mark.parametrize("bad", [9, -1, (1, 3), True, "some", 1.0])
def test_a_wrong_number_of_drafts_is_refused_at_once(bad):
    with pytest.raises(ValueError, match="num_draft_tokens is"):
        load_drafter("nowhere", num_draft_tokens=bad)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"tree": 3}, "expected a StaticTree or a DynamicTree"),
        ({"tree": TREE, "num_draft_tokens": 3}, "both given"),
        ({"tree": DynamicTree(4, 2, 2), "sample_drafts": True}, "a StaticTree can be sampled"),
        ({"lossy_threshold": 1.0}, "between 0 and 1"),
        ({"lossy_threshold": True}, "between 0 and 1"),
        ({"lossy_threshold": 0.5, "sample_drafts": True}, "take one"),
        ({"sample_drafts": 1}, "True or False"),
        ({"taps": (1, -1)}, "layer ids"),
        ({"taps": 3}, "layer ids"),
        ({"path_or_id": 3}, "expected a folder or a hub id"),
    ],
)
def test_wrong_and_contradicting_options_are_refused_at_once(options, problem):
    with pytest.raises(ValueError, match=problem):
        load_drafter(**{"path_or_id": "nowhere"} | options)
