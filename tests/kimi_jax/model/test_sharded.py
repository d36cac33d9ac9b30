"""Eight devices compute what one does, however the mesh divides them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from kernels_pallas.norm_linear.reference import product
from kimi_jax.axes import WHOLE
from kimi_jax.config import QuantizationConfig
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.moe import Moe, MoeInputs, input_kernels, moe_layer
from kimi_jax.model.transformer import forward, logits
from kimi_jax.runtime.mesh import RULES, make_mesh

F32 = jnp.dtype("float32")
# Of the largest value: sums over devices come in another order.
TOLERANCE = 1e-5
MESHES = [{"tensor": 8}, {"expert": 8}, {"expert": 2, "tensor": 4}]
EVERYWHERE = PartitionSpec()


def pspecs(state):
    """Placement of every parameter, from its axis string."""
    return jax.tree.map(
        lambda p: RULES.pspec(p.get_metadata("axes")),
        state,
        is_leaf=lambda p: isinstance(p, nnx.Variable),
    )


def sharded(function, state, mesh, out_specs):
    """`function(state, *whole arrays, rules)` over the mesh, jitted."""

    def local(state, *args):
        return function(state, *args, RULES)

    def run(state, *args):
        in_specs = (pspecs(state), *(EVERYWHERE for _ in args))
        return jax.shard_map(
            local, mesh=make_mesh(mesh), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(state, *args)

    return jax.jit(run)


@pytest.fixture(scope="module")
def cfg(tiny):
    return dataclasses.replace(tiny, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(cfg, model_of):
    return model_of(cfg)


def run_model(graph, is_prefill, state, tokens, positions, cache, rules):
    """Logits, streams, cache and experts."""
    model = nnx.merge(graph, state)
    taps = tuple(range(model.cfg.num_hidden_layers + 1))
    out = forward(model, tokens, positions, cache, taps=taps, rules=rules, is_prefill=is_prefill)
    return logits(model, out.hidden), out.taps, out.cache, out.routing


@pytest.fixture(scope="module")
def step(model):
    """One step of the model, on a mesh or (None) on one device."""
    graph, state = nnx.split(model)

    def step(mesh, is_prefill, *args):
        function = functools.partial(run_model, graph, is_prefill)
        if mesh is None:
            return jax.jit(lambda *args: function(*args, WHOLE))(state, *args)
        out_specs = (RULES.pspec("B T V"), EVERYWHERE, EVERYWHERE, EVERYWHERE)
        return sharded(function, state, mesh, out_specs)(state, *args)

    return step


@pytest.fixture(scope="module")
def prefill(cfg, step):
    """Inputs of a prefill of two rows, and what one device computes of them."""
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 64, (2, 12)), jnp.int32)
    positions = jnp.tile(jnp.arange(12, dtype=jnp.int32), (2, 1))
    args = tokens, positions, LatentCache.empty(cfg, 2, 24, F32)
    return args, step(None, True, *args)


def compare(ours, theirs, assert_close_to_scale):
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        if b.dtype == jnp.int32:
            np.testing.assert_array_equal(a, b)
        else:
            assert_close_to_scale(a, b, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_prefill(step, prefill, mesh, assert_close_to_scale):
    args, one_device = prefill
    compare(step(mesh, True, *args), one_device, assert_close_to_scale)


@pytest.mark.slow
def test_decoding_step(step, prefill, assert_close_to_scale):
    """Absorbed attention and the experts' path for few tokens."""
    cache = prefill[1][2]
    args = jnp.asarray([[5], [60]], jnp.int32), jnp.full((2, 1), 12, jnp.int32), cache
    one_device = step(None, False, *args)
    compare(step({"expert": 2, "tensor": 4}, False, *args), one_device, assert_close_to_scale)


def compare_layers(cfg, moe, mesh, x, assert_close_to_scale):
    graph, state = nnx.split(moe)

    def run(state, x, is_real, rules):
        moe = nnx.merge(graph, state)
        products = [product(x, *each) for each in zip(*input_kernels(moe, x.dtype), strict=True)]
        return moe_layer(moe, cfg, MoeInputs(x, *products), is_real, rules)

    is_real = jnp.arange(x.shape[1])[None] < jnp.full((x.shape[0], 1), x.shape[1] - 1)
    one, routing = jax.jit(lambda *args: run(*args, WHOLE))(state, x, is_real)
    many, many_routing = sharded(run, state, mesh, EVERYWHERE)(state, x, is_real)
    np.testing.assert_array_equal(many_routing.expert_ids, routing.expert_ids)
    assert_close_to_scale(many, one, TOLERANCE)
    return routing


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"expert": 2, "tensor": 4}], ids=str)
def test_int4_experts(tiny, fill_module, shape_rngs, mesh, assert_close_to_scale):
    """Widths cut between groups of 32 inputs; padding stays outside on every device."""
    cfg = dataclasses.replace(tiny, quantization=QuantizationConfig(), moe_intermediate_size=256)
    moe = fill_module(lambda: Moe(cfg, dtype=F32, rngs=shape_rngs()), seed=5)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(2, 10, 64)).astype(np.float32))
    compare_layers(cfg, moe, mesh, x, assert_close_to_scale)


def test_moe_2_ties_choose_the_lower_experts_on_eight_devices(
    tiny, fill_module, shape_rngs, assert_close_to_scale
):
    moe = fill_module(lambda: Moe(tiny, dtype=F32, rngs=shape_rngs()), seed=5)
    moe.gate[...] = jnp.zeros_like(moe.gate[...])
    moe.e_score_correction_bias[...] = jnp.asarray([0, 1, 0, 0, 0, 0, 1, 0], jnp.float32)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(7, 2, 64)).astype(np.float32))
    routing = compare_layers(tiny, moe, {"expert": 8}, x, assert_close_to_scale)
    # The second of each row is padding.
    np.testing.assert_array_equal(routing.expert_ids, [[1, 6, 0], [-1, -1, -1]] * 7)
