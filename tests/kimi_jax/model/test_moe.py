"""The router against the numpy oracle, and the layer it feeds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from kernels_pallas.norm_linear.reference import product
from kernels_pallas.router import choose_experts
from kimi_jax.axes import WHOLE
from kimi_jax.model.moe import Moe, MoeInputs, choosing, input_kernels, moe_layer

F32 = jnp.dtype("float32")


def route(x, gate, bias, cfg):
    return choose_experts(product(x, gate, F32), bias, None, choosing(cfg))


jit_route = jax.jit(route, static_argnames="cfg")


def inputs_of(moe: Moe, x) -> MoeInputs:
    """What the layer takes of tokens that are normalised already."""
    kernels = input_kernels(moe, x.dtype)
    return MoeInputs(x, *(product(x, *each) for each in zip(*kernels, strict=True)))


@functools.partial(jax.jit, static_argnums=1)
def run_layer(moe, cfg, x, is_real):
    return moe_layer(moe, cfg, inputs_of(moe, x), is_real, WHOLE)


@pytest.fixture
def route_logits(tiny, assert_close):
    """Routes tokens with these logits, here and in the oracle; ids must agree to the order."""

    def route_logits(logits, bias, **changes):
        E = logits.shape[1]
        cfg = dataclasses.replace(tiny, hidden_size=E, n_routed_experts=E, **changes)
        logits, bias = np.asarray(logits, np.float32), np.asarray(bias, np.float32)
        out = jit_route(logits, np.eye(E, dtype=np.float32), bias, cfg)
        ids, shares = oracles.route(
            logits,
            bias.astype(np.float64),
            cfg.num_experts_per_tok,
            n_group=cfg.n_group,
            topk_group=cfg.topk_group,
            norm_topk_prob=cfg.norm_topk_prob,
            scaling=cfg.routed_scaling_factor,
        )
        np.testing.assert_array_equal(out.expert_ids, ids)
        # A float32 sigmoid, a sum of a few and one division.
        assert_close(out.combine_f32, shares, rtol=2e-6)
        return np.asarray(out.expert_ids), np.asarray(out.combine_f32)

    return route_logits


def random_logits(T: int, E: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(T, E)).astype(np.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
        {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": False},
        {"num_experts_per_tok": 16},
    ],
)
def test_equals_the_oracle(route_logits, changes):
    bias = 0.3 * random_logits(1, 16, seed=1)[0]
    _, shares = route_logits(random_logits(50, 16), bias, **changes)
    if changes.get("norm_topk_prob", True):
        np.testing.assert_allclose(shares.sum(axis=1), 2.827, rtol=1e-6)


def test_moe_1_the_bias_chooses_and_does_nothing_else(route_logits):
    scores = np.array([[0.75, 0.5, 0.25, 0.5]])
    logits = np.log(scores / (1 - scores))
    ids, shares = route_logits(
        logits, [-0.6, 0.0, 0.3, 0.0], num_experts_per_tok=2, routed_scaling_factor=3.0
    )
    # Choices 0.15, 0.5, 0.55, 0.5; shares from 0.25 and 0.5 (expert 1 comes before its equal, 3).
    np.testing.assert_array_equal(ids, [[2, 1]])
    np.testing.assert_allclose(shares, [[1.0, 2.0]], rtol=1e-6)


def test_moe_1_groups_of_negative_choices(route_logits):
    """An expert outside the kept groups must not win with a masking value of 0."""
    logits = np.full((1, 8), -3.0)
    logits[0, [4, 5]] = -2.0
    ids, _ = route_logits(logits, np.full(8, -2.0), n_group=2, topk_group=1, num_experts_per_tok=3)
    # Group 1 is kept: its two best, then the lowest of its equals.
    np.testing.assert_array_equal(ids, [[4, 5, 6]])


def test_moe_1_biases_near_7_that_differ_by_a_hundredth(route_logits):
    # bfloat16 has steps of 1/32 there: all of these biases would be equal.
    bias = 7 + 0.01 * np.array([0, 3, 1, 2, 7, 5, 4, 6])
    ids, shares = route_logits(np.zeros((1, 8)), bias)
    np.testing.assert_array_equal(ids, [[4, 7, 5]])
    np.testing.assert_allclose(shares, np.full((1, 3), 2.827 / 3), rtol=1e-6)


def test_moe_2_ties_go_to_the_lower_id_in_any_batch(route_logits):
    logits = np.zeros((7, 8))
    # Two equal experts at the edge of the choice, in some rows; no difference at all in others.
    logits[3:, [6, 2]] = 2.0
    logits[3:, [7, 4]] = 1.0
    ids, _ = route_logits(logits, np.zeros(8))
    np.testing.assert_array_equal(ids[:3], [[0, 1, 2]] * 3)
    np.testing.assert_array_equal(ids[3:], [[2, 6, 4]] * 4)
    for t in (0, 6):
        np.testing.assert_array_equal(
            route_logits(logits[t : t + 1], np.zeros(8))[0], ids[t : t + 1]
        )
    # Equal groups: the lower one.
    ids, _ = route_logits(np.zeros((7, 8)), np.zeros(8), n_group=4, topk_group=2)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 7)


def test_logits_are_float32_of_bfloat16_inputs(tiny):
    """Products of rounded inputs, but neither logits nor scores are rounded again."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(20, 64))).astype(jnp.bfloat16)
    gate = jnp.asarray(rng.normal(size=(64, 8))).astype(jnp.bfloat16)
    bias = np.zeros(8, np.float32)
    out = jit_route(x, gate, bias, tiny)
    wide = jit_route(x.astype(F32), gate.astype(F32), bias, tiny)
    assert out.combine_f32.dtype == F32 and out.expert_ids.dtype == jnp.int32
    for a, b in zip(out, wide, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_router_learns_through_its_scores_only(tiny):
    x, gate = random_logits(20, 64), random_logits(64, 8)

    def total(x, gate, bias):
        out = route(x, gate, bias, dataclasses.replace(tiny, norm_topk_prob=False))
        return jnp.sum(out.combine_f32)

    d_x, d_gate, d_bias = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(x, gate, np.zeros(8, "f4"))
    assert np.asarray(d_x).any() and np.asarray(d_gate).any() and not np.asarray(d_bias).any()


@pytest.fixture(scope="module")
def moe(tiny, fill_module, shape_rngs) -> Moe:
    return fill_module(lambda: Moe(tiny, dtype=F32, rngs=shape_rngs()), seed=3)


def layer_input(B: int, T: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).normal(size=(B, T, 64)).astype(np.float32))


# One token, few, and enough to be sorted by expert.
SHAPES = pytest.mark.parametrize("B, T", [(1, 1), (2, 5), (2, 10)])


@SHAPES
def test_layer_is_the_sum_of_shared_and_weighted_routed_experts(
    tiny, moe, B, T, assert_close_to_scale
):
    x = layer_input(B, T)
    out, routing = run_layer(moe, tiny, x, jnp.ones((B, T), bool))
    flat = np.asarray(x, np.float64).reshape(-1, 64)

    def mlp(x, gate, up, down):
        return (oracles.silu(x @ gate) * (x @ up)) @ down

    def arrays(module):
        return [
            np.asarray(getattr(module, name)[...], np.float64)
            for name in ("gate_proj", "up_proj", "down_proj")
        ]

    expected, experts = mlp(flat, *arrays(moe.shared_experts)), arrays(moe.experts)
    ids, shares = (np.asarray(a) for a in routing)
    for t, a in np.ndindex(ids.shape):
        expected[t] += float(shares[t, a]) * mlp(flat[t], *(w[ids[t, a]] for w in experts))
    # Float32 sums of 64 terms, three deep, then four experts.
    assert_close_to_scale(out.reshape(B * T, 64), expected, 1e-5)


@SHAPES
def test_padding_chooses_no_expert(tiny, moe, B, T, assert_close):
    """Experts only padding would choose are not read, and real tokens do not change."""
    x = layer_input(B, T)
    whole, routing = run_layer(moe, tiny, x, jnp.ones((B, T), bool))
    ids = np.asarray(routing.expert_ids)
    assert (ids >= 0).all()
    is_real = np.isin(np.arange(B * T), (1, 2))
    unused = np.setdiff1d(np.arange(8), ids[is_real])
    assert B * T == 1 or len(np.intersect1d(unused, ids))
    poisoned = nnx.clone(moe)
    for weight in (poisoned.experts.gate_proj, poisoned.experts.down_proj):
        weight[...] = weight[...].at[unused].set(jnp.nan)
    masked, routing = run_layer(poisoned, tiny, x, jnp.asarray(is_real.reshape(B, T)))
    np.testing.assert_array_equal(np.asarray(routing.expert_ids)[~is_real], -1)
    masked, whole = (np.asarray(y).reshape(B * T, 64) for y in (masked, whole))
    assert np.isfinite(masked).all()
    # The same products; sums may be ordered otherwise.
    assert_close(masked[is_real], whole[is_real], atol=1e-5)
