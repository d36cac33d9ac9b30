"""Programs lowered from shapes alone are those that warm-up compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.engine import Engine, abstract_weights

MESHES = [None, "expert=2,tensor=4"]


@pytest.mark.parametrize("mesh", MESHES)
def test_lowered_from_shapes_is_what_runs(make_llm, mesh):
    engine = make_llm(mesh=mesh).engine
    B, S = 2, engine.capacities[-1]
    state = engine.new_state([], batch=B, capacity=S)
    nobody = np.zeros((B,), np.bool_)
    decode = engine._decode.lower(engine._weights, state, np.int32(1), nobody, proposal=None)
    assert engine.lower_decode(B, S, None).as_text() == decode.as_text()
    prefill = engine._prefill.lower(engine._weights, state, np.int32(0), size=16)
    assert engine.lower_prefill(B, S, 16).as_text() == prefill.as_text()


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_can_be_shapes(make_llm, mesh):
    llm = make_llm(mesh=mesh)
    dtype = jnp.dtype(jnp.float32)
    graph, weights = abstract_weights(
        lambda: Kimi(llm.cfg, dtype=dtype, rngs=nnx.Rngs(0)), llm.mesh
    )
    loaded = llm.engine.target_weights
    assert jax.tree.structure(weights) == jax.tree.structure(loaded)
    for shape, array in zip(jax.tree.leaves(weights), jax.tree.leaves(loaded), strict=True):
        assert shape.shape == array.shape
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
    engine = Engine(llm.cfg, graph, weights, llm.mesh, max_length=256, max_batch=2)
    assert "while" in engine.lower_decode(2, 256, None).as_text()


def test_a_verification_gives_the_most_likely_tokens(make_llm):
    llm = make_llm()
    ids = [5, 6, 7, 8, 9]
    run = llm.engine.lower_verify(1, 256, len(ids)).compile()
    cache = llm.engine.new_state([], batch=1, capacity=256).cache
    first = np.ones((1,), np.int32)
    chosen, taps, _ = run(llm.engine.target_weights, cache, np.asarray([ids], np.int32), first)
    assert taps == () and chosen.tolist() == [llm.logits(ids).argmax(-1).tolist()]
