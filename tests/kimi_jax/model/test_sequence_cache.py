"""A latent cache whose slots are shared out over the devices gives what a whole one gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pieces
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from kimi_jax.model.attention import TreeRows
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.transformer import forward, logits
from kimi_jax.runtime.mesh import make_mesh, rules_for

F32 = jnp.dtype("float32")
# Of the largest value: sums over slots come in another order.
TOLERANCE = 1e-5
CHUNK = 512
CAPACITY = 4096 + CHUNK
NEW = 5
# Rows 1 and 2 follow the newest token, 3 and 4 follow row 1.
PARENTS_SEEN = np.tril(np.ones((NEW, NEW), bool))
PARENTS_SEEN[2, 1] = PARENTS_SEEN[3, 2] = PARENTS_SEEN[4, 2] = PARENTS_SEEN[4, 3] = False


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pieces.quick_compiles():
        yield


@pytest.fixture(scope="module")
def model(tiny, model_of):
    """With positions for the longest text."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": CAPACITY}
    return model_of(dataclasses.replace(tiny, **sizes))


class Programs:
    """Prefill, decoding and a moved branch, with the cache whole or shared out."""

    def __init__(self, model, cache, mesh):
        graph, self.weights = nnx.split(model)
        self.cfg, self.mesh = model.cfg, make_mesh(mesh)
        rules = rules_for(self.mesh, cache)
        whole, cut = PartitionSpec(), rules.pspec("S CR")
        specs = jax.tree.map(
            lambda p: rules.pspec(p.get_metadata("axes")),
            self.weights,
            is_leaf=lambda p: isinstance(p, nnx.Variable),
        )

        def run(weights, cache, tokens, start, tree_mask=None, *, is_prefill=False):
            model = nnx.merge(graph, weights)
            positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
            tree = None if tree_mask is None else TreeRows(first=start, mask=tree_mask)
            if tree is not None:
                depth = jnp.sum(tree_mask, axis=2, dtype=jnp.int32) - 1
                positions = start[:, None] + depth
            out = forward(
                model, tokens, positions, cache, rules=rules, is_prefill=is_prefill, tree=tree
            )
            return logits(model, out.hidden), out.cache

        def over(function, num_arrays, out_specs):
            return jax.jit(
                jax.shard_map(
                    function,
                    mesh=self.mesh,
                    in_specs=(specs, cut, *(whole,) * num_arrays),
                    out_specs=out_specs,
                    check_vma=False,
                )
            )

        out = (rules.pspec("B T V"), cut)
        self.prefill = over(lambda *args: run(*args, is_prefill=True), 2, out)
        self.step = over(run, 2, out)
        self.tree = over(run, 3, out)
        self.move = over(lambda _, cache, *args: cache.moved(*args, 1, rules), 2, cut)

    def after(self, tokens, length):
        """The cache once `length` tokens of each row are in it, by chunks."""
        cache = LatentCache.empty(self.cfg, tokens.shape[0], CAPACITY, F32)
        last = None
        for start in range(0, length, CHUNK):
            chunk = tokens[:, start : start + CHUNK]
            at = jnp.full(tokens.shape[:1], start, jnp.int32)
            last, cache = self.prefill(self.weights, cache, chunk, at)
        return last, cache


@pytest.fixture(scope="module")
def both(model):
    mesh = {"expert": 2, "tensor": 4}
    return [Programs(model, cache, mesh) for cache in ("replicated", "sequence")]


@pytest.fixture(scope="module")
def tokens():
    shape = (2, CAPACITY + CHUNK)
    return jnp.asarray(np.random.default_rng(5).integers(0, 64, shape), jnp.int32)


@pytest.mark.parametrize(
    "length", [257, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 255, 256, 4096))]
)
def test_logits(both, tokens, length, assert_close_to_scale):
    """Of prompts in chunks, a verification of ragged rows, a tree, and after its branch moved."""
    found = []
    for programs in both:
        last, cache = programs.after(tokens, length)
        # Slots from here on hold the chunk's padding, which is written over before it is read.
        at = jnp.asarray([length, max(1, length - 3)], jnp.int32)
        new = tokens[:, length : length + NEW]
        one, cache = programs.step(programs.weights, cache, new, at)
        mask = jnp.broadcast_to(jnp.asarray(PARENTS_SEEN), (2, NEW, NEW))
        branches, cache = programs.tree(programs.weights, cache, new, at, mask)
        cache = programs.move(programs.weights, cache, jnp.asarray([[2, 2], [1, 3]]), at)
        moved, cache = programs.step(programs.weights, cache, new[:, :2], at + 3)
        found.append((last, one, branches, moved))
    for whole, shared in zip(*found, strict=True):
        assert_close_to_scale(shared, whole, TOLERANCE)


def test_each_device_holds_its_share_of_every_row(both, tokens):
    caches = [programs.after(tokens, 512)[1] for programs in both]
    for whole, shared in zip(*(cache.layers for cache in caches), strict=True):
        rows = np.asarray(whole).reshape(2, CAPACITY, -1)
        for i, part in enumerate(sorted(shared.addressable_shards, key=lambda s: s.device.id)):
            assert part.data.shape[0] == 2 * CAPACITY // 8
            own = np.asarray(part.data).reshape(2, CAPACITY // 8, -1)
            np.testing.assert_allclose(own[:, :64], rows[:, i::8][:, :64], atol=1e-5)
