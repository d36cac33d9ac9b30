"""The kernel before attention, interpreted, against the plain form and against float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.mla_inputs import mla_inputs
from kernels_pallas.mla_inputs.arg_specs import SPECS, MlaInputsSpec
from kernels_pallas.slots import Share

# float32: sums of at most 512 terms in another order. bfloat16 keeps 8 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

run = jax.jit(mla_inputs, static_argnames=("eps", "implementation"))


@functools.partial(jax.jit, static_argnames=("count", "implementation"))
def run_share(operands, index, *, count, implementation):
    share = Share(index, count)
    return mla_inputs(*operands, eps=1e-6, share=share, implementation=implementation)


def rotated(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def oracle(q, kv, gain, w_uk, cos, sin, cache, start, *, eps):
    q, kv, gain, w_uk, cos, sin = (
        np.asarray(a).astype(np.float64) for a in (q, kv, gain, w_uk, cos, sin)
    )
    B, T = q.shape[:2]
    U, C = w_uk.shape[1:]
    c = kv[..., :C]
    latent = c / np.sqrt((c**2).mean(-1, keepdims=True) + eps) * gain
    rows = np.concatenate([latent, rotated(kv[..., C:], cos, sin)], axis=-1)
    S = cache.shape[0] // B
    new = np.array(cache).astype(np.float64)
    for b in range(B):
        new[b * S + start[b] : b * S + start[b] + T] = rows[b]
    q_latent = np.einsum("btnu,nuc->btnc", q[..., :U], w_uk)
    return q_latent, rotated(q[..., U:], cos[:, :, None], sin[:, :, None]), new


def check(spec, operands, assert_close_to_scale, implementation="interpret"):
    out = run(*operands, **spec.options, implementation=implementation)
    for ours, exact in zip(out, oracle(*operands, **spec.options), strict=True):
        assert_close_to_scale(ours, exact, TOLERANCE[spec.dtype])
    B, T, cache, start = spec.B, spec.T, operands[-2], operands[-1]
    is_new = np.zeros((B, spec.S), bool)
    for b in range(B):
        is_new[b, start[b] : start[b] + T] = True
    # Everybody else's slots are as they were, bit for bit.
    old = ~is_new.reshape(-1)
    np.testing.assert_array_equal(np.asarray(out.cache)[old], cache[old])


# Interpreted, every block copies its operands: the real widths are run with few slots.
INTERPRETED = {
    **{name: spec for name, spec in SPECS.items() if name.startswith("tiny")},
    "kimi-verify": dataclasses.replace(SPECS["kimi-verify"], N=2, S=32),
}


@pytest.mark.parametrize("name", INTERPRETED)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_named_shapes(name, implementation, assert_close_to_scale):
    spec = INTERPRETED[name]
    check(spec, spec.operands(), assert_close_to_scale, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("kimi")])
def test_named_shapes_of_kimi(name, assert_close_to_scale):
    spec = dataclasses.replace(SPECS[name], S=64)
    check(spec, spec.operands(), assert_close_to_scale)


@pytest.mark.parametrize("start", [(0, 0), (11, 0), (0, 11), (11, 11)])
def test_first_and_last_slots(start, assert_close_to_scale):
    """Up to the last slot, and no further."""
    spec = MlaInputsSpec(B=2, T=3, N=1, S=14, C=32, R=16, U=16, dtype="float32")
    spec = dataclasses.replace(spec, cache_dtype="float32")
    check(spec, spec.operands(start=start), assert_close_to_scale)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("start", [(0, 3), (13, 8)])
def test_a_share_of_the_slots(implementation, start, assert_close_to_scale):
    """Four caches of which each holds every fourth slot are the whole one, cut."""
    spec = MlaInputsSpec(B=2, T=3, N=1, S=16, C=32, R=16, U=16, dtype="float32")
    spec = dataclasses.replace(spec, cache_dtype="float32")
    *operands, cache, first = spec.operands(start=start)
    whole = oracle(*operands, cache, first, eps=1e-6)[2].reshape(2, 16, -1)
    for index in range(4):
        own = cache.reshape(2, 16, -1)[:, index::4].reshape(8, -1)
        all_operands = (*operands, own, first)
        out = run_share(all_operands, index, count=4, implementation=implementation)
        wanted = whole[:, index::4].reshape(8, -1)
        assert_close_to_scale(out.cache, wanted, TOLERANCE["float32"])
        is_old = np.isclose(wanted, own, rtol=0, atol=0).all(axis=1)
        np.testing.assert_array_equal(np.asarray(out.cache)[is_old], own[is_old])


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 9),
    N=st.integers(1, 3),
    spare=st.integers(0, 9),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 9),
)
def test_any_size(assert_close_to_scale, B, T, N, spare, dtype, seed):
    spec = MlaInputsSpec(B, T, N, T + spare, 32, 16, 16, dtype, dtype)
    check(spec, spec.operands(seed), assert_close_to_scale)


def test_what_the_kernel_does_not_take_is_named():
    many = dataclasses.replace(SPECS["tiny-verify"], B=13)
    odd = dataclasses.replace(SPECS["tiny-verify"], U=24)
    half = dataclasses.replace(SPECS["tiny-verify"], cache_dtype="float16")
    for spec, words in ((many, "65 rows"), (odd, "widths 24"), (half, "cache are float16")):
        with pytest.raises(ValueError, match=words):
            run(*spec.operands(), **spec.options, implementation="interpret")
