"""The INT4 expert kernels, interpreted, against the plain form and a float64 loop over experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.grouped_matmul import expert_ffn, pallas_triton, reference
from kernels_pallas.grouped_matmul.arg_specs import SPECS, ExpertSpec
from kernels_pallas.grouped_matmul.layout import Int4Weight, nibble_planes
from kernels_pallas.grouped_matmul.reference import ExpertWeights
from kernels_pallas.tiles import ExpertTiles

# float32: three chained sums of at most 7168 terms in another order. bfloat16 keeps 8 bits: the
# hidden values are rounded once, weights as in the reference.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

run = jax.jit(expert_ffn, static_argnames="implementation")


def dense(weight: Int4Weight, dtype) -> np.ndarray:
    """float64 [E, in, out], each weight rounded to the tokens' dtype as the op says."""
    low, high = (np.asarray(q, np.float32) for q in nibble_planes(jnp.asarray(weight.packed)))
    q = np.stack([low, high], axis=2).reshape(low.shape[0], -1, low.shape[-1])
    scale = np.repeat(np.asarray(weight.scale).astype(np.float32), 32, axis=1)
    return (q * scale).astype(dtype).astype(np.float64)


def oracle(x, experts, ids, combine, shared=None) -> np.ndarray:
    E = experts.down_proj.packed.shape[0]
    used = sorted({int(e) for e in ids.reshape(-1) if 0 <= e < E})
    rows = np.asarray(x).astype(np.float64)
    out = np.zeros(x.shape)
    for e in used:
        gate, up, down = (
            dense(Int4Weight(w.packed[e : e + 1], w.scale[e : e + 1]), x.dtype)[0] for w in experts
        )
        share = np.where(ids == e, combine, 0.0).astype(np.float64).sum(1)
        g = rows @ gate
        out += share[:, None] * ((g / (1 + np.exp(-g)) * (rows @ up)) @ down)
    if shared is not None:
        g, up, down = (np.asarray(a).astype(np.float64) for a in shared)
        out += (g / (1 + np.exp(-g)) * up) @ down
    return out


def check(arrays, assert_close_to_scale):
    dtype = str(arrays[0].dtype)
    out = run(*arrays, implementation="interpret")
    assert out.dtype == dtype
    exact = oracle(*arrays)
    assert_close_to_scale(out, exact, TOLERANCE[dtype])
    plain = np.asarray(run(*arrays, implementation="xla"), np.float64)
    assert_close_to_scale(out, plain, TOLERANCE[dtype])


# Interpreted, every block copies its operands: the real width is run with few experts.
INTERPRETED = {
    **{name: spec for name, spec in SPECS.items() if name.startswith("tiny")},
    "kimi-verify": dataclasses.replace(SPECS["kimi-verify"], E=4, A=2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("kimi") else [])
        for name in INTERPRETED
    ],
)
def test_named_shapes(name, assert_close_to_scale):
    check(INTERPRETED[name].operands(), assert_close_to_scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("kimi")])
def test_named_shapes_of_kimi(name, assert_close_to_scale):
    """With 24 experts of the 384, a matter of memory; more than 4 tokens choose one each."""
    spec = SPECS[name]
    cut = dataclasses.replace(spec, E=24, A=spec.A if spec.T <= 4 else 1)
    check(cut.operands(), assert_close_to_scale)


SMALL = ExpertSpec(T=6, E=5, D=64, F=32, A=3, dtype="float32")
"""Sizes at which a call costs little, for what depends on ids and weights alone."""

TILES = ExpertTiles(columns=16, inputs=32, num_warps=4, num_stages=1, rows=16)
FORMS = [
    pytest.param(functools.partial(form, gate_up=TILES, down=TILES, interpret=True), id=name)
    for name, form in (("few", pallas_triton.few_tokens), ("many", pallas_triton.many_tokens))
]


@pytest.mark.parametrize("form", FORMS)
def test_choices_of_every_kind(form, assert_close_to_scale):
    x, experts, ids, combine, _ = SMALL.operands()
    absent = ids.copy()
    absent[0], absent[1, 0], absent[2, 2] = -1, 5, 10**6
    twice = ids.copy()
    twice[:, 1] = twice[:, 0]
    for case in (ids, absent, twice, np.full_like(ids, 4), np.full_like(ids, 0)):
        exact = oracle(x, experts, case, combine)
        assert_close_to_scale(form(x, experts, case, combine), exact, 1e-5)
    none = form(x, experts, np.full_like(ids, -1), combine)
    np.testing.assert_array_equal(none, np.zeros(x.shape))


@pytest.mark.parametrize("form", FORMS)
def test_experts_no_token_chose_are_never_read(form):
    """Their scales are nan, which no weight of zero would hide."""
    x, experts, _, combine, _ = SMALL.operands()
    ids = np.resize(np.array([1, 2, 4, -1, 5], np.int32), combine.shape)
    spoilt = []
    for packed, scale in experts:
        bad = np.array(scale)
        bad[[0, 3]] = np.nan
        spoilt.append(Int4Weight(packed, bad))
    expected = form(x, experts, ids, combine)
    np.testing.assert_array_equal(form(x, ExpertWeights(*spoilt), ids, combine), expected)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_nibbles_and_zero_scales(form, assert_close_to_scale):
    x, experts, ids, combine, _ = SMALL.operands()
    for byte in (0x00, 0xFF, 0x0F, 0xF0):
        extreme = ExpertWeights(*(Int4Weight(np.full_like(p, byte), s) for p, s in experts))
        exact = oracle(x, extreme, ids, combine)
        assert_close_to_scale(form(x, extreme, ids, combine), exact, 1e-5)
    zero = ExpertWeights(*(Int4Weight(p, np.zeros_like(s)) for p, s in experts))
    np.testing.assert_array_equal(form(x, zero, ids, combine), np.zeros(x.shape))


@pytest.mark.slow
def test_many_tokens_equal_few_at_tile_ends(assert_close_to_scale):
    """Groups of one tile, of one row more, of one row, and of none."""
    spec = dataclasses.replace(SMALL, T=40)
    x, experts, ids, combine, _ = spec.operands()
    ids = np.full_like(ids, -1)
    ids[:16, 0], ids[:17, 1], ids[0, 2] = 1, 2, 4
    exact = oracle(x, experts, ids, combine)
    for form in FORMS:
        assert_close_to_scale(form.values[0](x, experts, ids, combine), exact, 1e-5)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_drawn_shapes(data):
    T, E, A = (data.draw(st.integers(1, most), label=x) for x, most in zip("TEA", (20, 6, 5)))  # noqa: B905
    D, F = (32 * data.draw(st.integers(1, 3), label=x) for x in "DF")
    spec = ExpertSpec(T=T, E=max(E, A), D=D, F=F, A=A, dtype="float32")
    x, experts, ids, combine, _ = spec.operands(data.draw(st.integers(0, 1000), label="seed"))
    ids = np.where(np.random.default_rng(0).random(ids.shape) < 0.3, -1, ids).astype(np.int32)
    exact = oracle(x, experts, ids, combine)
    form = data.draw(st.sampled_from([f.values[0] for f in FORMS]), label="form")
    out = form(x, experts, ids, combine)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5 * max(np.abs(exact).max(), 1e-3))


def test_what_the_kernels_cannot_take_is_said():
    x, experts, ids, _, _ = SMALL.shapes()

    def reason(x, experts, ids=ids, shared=None):
        found = []
        operands = x, experts, ids, shared
        jax.eval_shape(lambda *args: found.append(pallas_triton.obstacle(*args)), *operands)
        return found[0]

    assert reason(x, experts) is None
    floats = ExpertWeights(*(jax.ShapeDtypeStruct((5, 64, 32), x.dtype),) * 3)  # type: ignore[arg-type]
    assert "floating point" in reason(x, floats)
    assert "float16" in reason(jax.ShapeDtypeStruct(x.shape, jnp.float16), experts)
    narrow = dataclasses.replace(SMALL, shared=24).shapes()
    assert "shared expert 24 wide" in reason(*narrow[:3], narrow[4])
    many = dataclasses.replace(SMALL, T=1 << 24).shapes()
    assert "16777216 tokens at once" in reason(*many[:3])
    large = dataclasses.replace(SMALL, E=384, D=7168, F=2048).shapes()
    assert "32-bit offsets" in reason(large[0], large[1])


def test_off_a_gpu_the_op_is_its_reference():
    """The same operations, so that a CPU pays nothing for the kernels' existence."""
    shapes = SPECS["tiny-verify"].shapes()
    ours, theirs = (jax.make_jaxpr(op)(*shapes) for op in (expert_ffn, reference.expert_ffn))
    assert str(ours) == str(theirs)
