"""The expert-choosing kernel, interpreted: the very ids of the plain form, and its shares."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.router import choose_experts
from kernels_pallas.router.arg_specs import KIMI, SPECS, RouterSpec

run = jax.jit(choose_experts, static_argnames=("choosing", "implementation"))


def check(operands, choosing):
    ours = run(*operands, choosing=choosing, implementation="interpret")
    plain = run(*operands, choosing=choosing, implementation="xla")
    np.testing.assert_array_equal(ours.expert_ids, plain.expert_ids)
    # The sum that normalises shares runs in another order.
    np.testing.assert_allclose(ours.combine_f32, plain.combine_f32, rtol=1e-6)


@pytest.mark.parametrize(
    "name", [n if n != "kimi-prefill" else pytest.param(n, marks=pytest.mark.slow) for n in SPECS]
)
def test_named_shapes(name):
    check(SPECS[name].operands(), SPECS[name].choosing)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    T=st.integers(1, 9),
    E=st.integers(2, 40),
    normalises=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_size(T, E, normalises, seed, data):
    choosing = dataclasses.replace(
        KIMI, num_experts_per_tok=data.draw(st.integers(1, E)), norm_topk_prob=normalises
    )
    logits, bias, is_real = RouterSpec(T, E, choosing).operands(seed)
    # Few distinct values: the lower id has to win among many equals.
    check((np.round(logits), np.round(bias), is_real), choosing)
    check((logits, bias, None), choosing)


def test_a_bias_decides_and_does_not_count():
    logits, bias = np.zeros((1, 8), np.float32), np.zeros((8,), np.float32)
    bias[5], logits[0, 2] = 10.0, 3.0
    choosing = dataclasses.replace(KIMI, num_experts_per_tok=2, routed_scaling_factor=1.0)
    ids, shares = run(logits, bias, None, choosing=choosing, implementation="interpret")
    assert ids.tolist() == [[5, 2]]
    of_2 = 1 / (1 + np.exp(-3.0))
    np.testing.assert_allclose(shares, [[0.5 / (0.5 + of_2), of_2 / (0.5 + of_2)]], rtol=1e-6)


def test_groups_are_left_to_the_plain_form():
    grouped = dataclasses.replace(KIMI, n_group=2)
    with pytest.raises(ValueError, match="2 groups"):
        run(*SPECS["kimi-step"].operands(), choosing=grouped, implementation="interpret")
