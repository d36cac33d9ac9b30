"""The model on interpreted kernels: what it is on the plain forms, and no kernel in a gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from make_random_checkpoint import preset_config
from pieces import quick_compiles

from kernels_pallas import dispatch
from kernels_pallas.dispatch import Target
from kimi_jax.axes import WHOLE
from kimi_jax.model import transformer
from kimi_jax.model.attention import TreeRows
from kimi_jax.model.cache import LatentCache
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.engine import weight_pspecs
from kimi_jax.runtime.mesh import make_mesh, rules_for

B, S = 2, 48
F32 = jnp.dtype("float32")
KERNELS = ("norm_linear", "mla_inputs", "mla_attention", "choose_experts", "experts_gate_up")


@pytest.fixture(scope="module")
def cfg():
    """Two layers, INT4 experts, and widths the kernels take."""
    sizes = {"qk_rope_head_dim": 16, "moe_intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16}
    return preset_config("tiny", **sizes)


@pytest.fixture(scope="module")
def split_model(cfg):
    """Random weights, the experts' in every nibble."""
    model = Kimi(cfg, dtype=F32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    experts = model.layers[1].mlp.experts
    for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
        packed, scale = linear.packed[...], linear.scale[...]
        linear.packed[...] = jnp.asarray(rng.integers(0, 256, packed.shape, np.uint8))
        usual = 1 / (4.6 * np.sqrt(2 * packed.shape[1]))
        linear.scale[...] = jnp.asarray(usual * (0.5 + rng.random(scale.shape, np.float32)))
    return nnx.split(model)


@pytest.fixture(scope="module")
def run(cfg, split_model):
    graph, weights = split_model
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((B * S, cfg.latent_width), np.float32) for _ in range(2)]
    cache = LatentCache(layers=tuple(map(jnp.asarray, rows)))
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (B, 4)), jnp.int32)

    def run(implementation, T, mask=None, mesh=None):
        # The second row's tokens are padding but for the first, and end where the cache does.
        start = jnp.asarray([7, S - (T if mask is None else mask.shape[2])], jnp.int32)
        place = jnp.arange(T, dtype=jnp.int32)
        tree = None if mask is None else TreeRows(first=start, mask=mask)
        is_real = jnp.asarray([[True] * T, [True] + [False] * (T - 1)])
        rules = WHOLE if mesh is None else rules_for(mesh)

        def forward(weights, cache):
            out = transformer.forward(
                nnx.merge(graph, weights),
                tokens[:, :T],
                start[:, None] + (place if mask is None else jnp.minimum(place, 2)),
                cache,
                is_real=is_real,
                taps=(0, 1, 2),
                tree=tree,
                rules=rules,
            )
            return out.hidden, out.taps, out.cache.layers, [r.expert_ids for r in out.routing]

        if mesh is not None:
            specs = (weight_pspecs(weights, rules), PartitionSpec())
            forward = jax.shard_map(
                forward, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
            )
        with dispatch.using(implementation):
            traced = jax.jit(forward).trace(weights, cache)
        has_kernels = [name in str(traced.jaxpr) for name in KERNELS]
        assert all(has_kernels) if implementation == "interpret" else not any(has_kernels)
        with quick_compiles():
            return traced.lower().compile()(weights, cache)

    return run


def compare(ours, plain, assert_close_to_scale):
    hidden, taps, layers, ids = ours
    for one, other in zip((hidden, *taps), (plain[0], *plain[1]), strict=True):
        # Padding's rows mean nothing. Float32 sums in another order, two layers deep.
        assert_close_to_scale(one[0], other[0], 1e-5)
        assert_close_to_scale(one[1, :1], other[1, :1], 1e-5)
    for one, other in zip(layers, plain[2], strict=True):
        assert_close_to_scale(one, other, 1e-5)
    for one, other in zip(ids, plain[3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_verification(run, assert_close_to_scale):
    compare(run("interpret", 3), run("xla", 3), assert_close_to_scale)


@pytest.mark.slow
def test_a_plain_step(run, assert_close_to_scale):
    compare(run("interpret", 1), run("xla", 1), assert_close_to_scale)


@pytest.mark.slow
def test_a_tree(run, assert_close_to_scale):
    """Four nodes in the last four of six slots, each seeing the first slot and itself."""
    mask = np.zeros((B, 4, 6), bool)
    mask[:, :, 0] = True
    mask[:, np.arange(4), 2 + np.arange(4)] = True
    mask = jnp.asarray(mask)
    compare(run("interpret", 4, mask), run("xla", 4, mask), assert_close_to_scale)


@pytest.mark.slow
def test_a_mesh(run, assert_close_to_scale):
    mesh = make_mesh({"expert": 2, "tensor": 2})
    compare(run("interpret", 3, mesh=mesh), run("xla", 3), assert_close_to_scale)


def pallas_calls(function, *args) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("pallas_call[")


def test_nothing_that_is_differentiated_is_a_kernel(cfg):
    """Without a cache, for a GPU: no kernel, but the INT4 experts', which have no gradient."""

    def loss(weights, tokens, graph):
        positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
        model = nnx.merge(graph, weights)
        out = transformer.forward(model, tokens, positions, remat=True)
        return jnp.mean(transformer.logits(model, out.hidden))

    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    for quantization, expected in ((None, 0), (cfg.quantization, 2)):
        kind = dataclasses.replace(cfg, quantization=quantization)
        model = nnx.eval_shape(lambda kind=kind: Kimi(kind, dtype=F32, rngs=nnx.Rngs(0)))
        graph, weights = nnx.split(model)

        def run(weights, tokens, graph=graph):
            return loss(weights, tokens, graph)

        with dispatch.compile_for(Target("gpu", (9, 0))):
            assert pallas_calls(run, weights, tokens) == expected
            if quantization is None:
                assert pallas_calls(jax.grad(run), weights, tokens) == 0
