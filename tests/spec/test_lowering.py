"""Programs of a cycle lowered from shapes alone, for a drafter as published."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from make_random_checkpoint import preset_config

from kernels_pallas.compile_only import device_bytes
from kimi_jax import published
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.engine import Engine, abstract_weights
from kimi_jax.runtime.mesh import MeshError, make_mesh
from spec.drafter import abstract_drafter
from spec.eagle3.config import DrafterConfig, DrafterError
from spec.training.drafters import new_config
from spec.tree import Chain

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
CAPACITY, LONGEST = 256, 262144
TINY = preset_config("tiny", num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine():
    mesh = make_mesh({"tensor": 8})
    graph, weights = abstract_weights(lambda: Kimi(TINY, dtype=F32, rngs=nnx.Rngs(0)), mesh)
    drafter = abstract_drafter(new_config(TINY, "llama"), TINY, mesh, F32, (Chain(3),))
    return Engine(TINY, graph, weights, mesh, max_length=CAPACITY, max_batch=1, drafter=drafter)


def test_cycle_and_prefill_lower_without_weights(engine):
    assert "while" in engine.lower_decode(1, CAPACITY, Chain(3)).as_text()
    engine.lower_prefill(1, CAPACITY, 16)


def test_a_verification_gives_the_drafters_taps(engine):
    chosen, taps, cache = engine.lower_verify(1, CAPACITY, 4).out_info
    assert chosen.shape == (1, 4) and chosen.dtype == jnp.int32
    assert [tap.shape for tap in taps] == [(1, 4, TINY.hidden_size)] * len(engine.drafter.taps)
    state = engine.abstract_state(1, CAPACITY)
    assert [x.shape for x in jax.tree.leaves(cache)] == [
        x.shape for x in jax.tree.leaves(state.cache)
    ]


@pytest.fixture(scope="module")
def make_full_engine():
    """Kimi-K2.5 over 8 devices with its longest context, as shapes."""
    cfg = ModelConfig.from_dict(published.K25)
    mesh = make_mesh({"tensor": 8})
    graph, weights = abstract_weights(lambda: Kimi(cfg, dtype=BF16, rngs=nnx.Rngs(0)), mesh)
    own = DrafterConfig.from_dict(published.K25_EAGLE3, num_target_layers=61)
    drafter = abstract_drafter(own, cfg, mesh, BF16, (Chain(3),))
    sizes = {"max_length": LONGEST, "max_batch": 1, "drafter": drafter}
    return lambda cache: Engine(cfg, graph, weights, mesh, cache=cache, **sizes)


def test_262144_tokens_fit_beside_the_weights_where_slots_are_shared_out(make_full_engine):
    """With more than 15 GB of an RTX PRO 6000 to spare; whole, the cache alone is 18.4 GB."""
    held = {}
    for cache in ("replicated", "sequence"):
        engine = make_full_engine(cache)
        state = engine.abstract_state(1, LONGEST)
        held[cache] = device_bytes(state.cache)
        total = device_bytes((engine.target_weights, engine.drafter.weights, state))
    assert held == {"replicated": LONGEST * 61 * 576 * 2, "sequence": LONGEST * 61 * 576 // 4}
    assert total < 96 * 2**30 - 15e9


def test_a_shared_out_cache_lowers(engine):
    sizes = {"max_length": CAPACITY, "max_batch": 1, "drafter": engine.drafter}
    shared = Engine(
        TINY, engine.graph, engine.target_weights, engine.mesh, cache="sequence", **sizes
    )
    text = shared.lower_decode(1, CAPACITY, Chain(3)).as_text()
    # Of each layer, queries and parts.
    assert text.count("all_to_all") >= TINY.num_hidden_layers
    assert "all_to_all" not in engine.lower_decode(1, CAPACITY, Chain(3)).as_text()


def test_a_drafter_of_another_target_or_mesh_is_refused():
    mesh = make_mesh({"tensor": 8})
    other = new_config(TINY, "llama")
    with pytest.raises(DrafterError):
        abstract_drafter(other, ModelConfig.from_dict(published.K25), mesh, F32, (Chain(3),))
    uneven = new_config(TINY, "llama", num_key_value_heads=4)
    with pytest.raises(MeshError, match="num_key_value_heads 4"):
        abstract_drafter(uneven, TINY, mesh, F32, (Chain(3),))


def test_the_published_drafter_is_what_a_new_one_would_be():
    target = ModelConfig.from_dict(published.K25)
    cfg = DrafterConfig.from_dict(published.K25_EAGLE3, num_target_layers=61)
    assert cfg == new_config(target, "llama")
