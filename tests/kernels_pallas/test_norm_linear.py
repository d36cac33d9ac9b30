"""The norm-and-products kernel, interpreted, against the plain form and against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.norm_linear import norm_linear, pallas_triton, reference
from kernels_pallas.norm_linear.arg_specs import SPECS, NormLinearSpec
from kernels_pallas.norm_linear.reference import is_exact
from kernels_pallas.tiles import LinearTiles

# float32: sums of at most 7168 terms in another order. bfloat16 keeps 8 bits: the kernel rounds
# x' * gain where the reference rounds the norm and its product with the gain.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

run = jax.jit(norm_linear, static_argnames=("eps", "dtypes", "implementation"))


def oracle(x, delta, gain, kernels, *, eps, dtypes):
    """The stream as it is kept, the norm and the products in float64."""
    del dtypes
    x = x if delta is None else (x.astype(np.float32) + delta.astype(np.float32)).astype(x.dtype)
    wide = np.asarray(x).astype(np.float64)
    h = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * gain.astype(np.float64)
    return x, h, [h @ kernel.astype(np.float64) for kernel in kernels]


def check(out, operands, options, assert_close_to_scale, is_kernel=True):
    dtype = str(operands[0].dtype)
    x, h, products = oracle(*operands, **options)
    np.testing.assert_array_equal(out.x, x)
    assert_close_to_scale(out.h, h, TOLERANCE[dtype])
    assert out.x.dtype == out.h.dtype == operands[0].dtype
    exact_kernels, seen = [np.asarray(k).astype(np.float64) for k in operands[3]], []
    for ours, exact, wanted in zip(out.products, products, options["dtypes"], strict=True):
        assert ours.dtype == wanted
        if is_exact(x.dtype, wanted) and is_kernel:
            # Of h as it is rounded, but for its last bit where two sums of squares differ in
            # theirs. (XLA leaves out the rounding of what it never writes.)
            exact = np.asarray(out.h).astype(np.float64) @ exact_kernels[len(seen)]
            assert_close_to_scale(ours, exact, 5e-4)
        else:
            assert_close_to_scale(ours, exact, TOLERANCE[dtype])
        seen.append(wanted)


# Interpreted, every block copies its operands: real widths are run with fewer columns.
INTERPRETED = {
    **{name: spec for name, spec in SPECS.items() if name.startswith("tiny")},
    "kimi-moe": NormLinearSpec(T=4, D=7168, widths=(64, 32, 32), exact=1),
    "kimi-queries": NormLinearSpec(T=1, D=1536, widths=(192,), has_delta=False),
}


@pytest.mark.parametrize("name", INTERPRETED)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_named_shapes(name, implementation, assert_close_to_scale):
    spec = INTERPRETED[name]
    operands = spec.operands()
    out = run(*operands, **spec.options, implementation=implementation)
    check(out, operands, spec.options, assert_close_to_scale, implementation != "xla")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("kimi")])
def test_named_shapes_of_kimi(name, assert_close_to_scale):
    spec = SPECS[name]
    operands = spec.operands()
    out = run(*operands, **spec.options, implementation="interpret")
    check(out, operands, spec.options, assert_close_to_scale)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    T=st.integers(1, 64),
    D=st.sampled_from([16, 48, 96, 256]),
    widths=st.lists(st.sampled_from([16, 32, 48, 80]), min_size=1, max_size=3),
    has_delta=st.booleans(),
    exact=st.integers(0, 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 9),
)
def test_any_size(assert_close_to_scale, T, D, widths, has_delta, exact, dtype, seed):
    spec = NormLinearSpec(T, D, tuple(widths), has_delta, exact, dtype)
    operands = spec.operands(seed)
    out = run(*operands, **spec.options, implementation="interpret")
    check(out, operands, spec.options, assert_close_to_scale)


def test_rows_do_not_depend_on_one_another():
    """Up to 16 rows, a tile's least: then a verification's rows are those of the plain step."""
    spec = SPECS["tiny-moe"]
    operands = spec.operands()
    tiles = LinearTiles(columns=16, inputs=32, num_warps=4, num_stages=1)
    form = functools.partial(pallas_triton.norm_linear, **spec.options, tiles=tiles, interpret=True)
    together = form(*operands)
    x, delta, gain, kernels = operands
    for t in range(spec.T):
        alone = form(x[t : t + 1], delta[t : t + 1], gain, kernels)
        for one, all_ in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], all_[t])


def test_what_the_kernel_does_not_take_is_named():
    gain, kernel = jnp.ones(64), jnp.ones((64, 32))
    for x, width, words in [
        (jnp.ones((65, 64)), kernel, "65 rows"),
        (jnp.ones((2, 64), jnp.float16), kernel, "float16"),
        (jnp.ones((2, 64)), jnp.ones((64, 24)), "24 wide"),
    ]:
        with pytest.raises(ValueError, match=words):
            norm_linear(x, None, gain, (width,), eps=1e-5, implementation="interpret")


# (D, F) of several blocks, of one that is not full, and of widths the loop does not divide.
@pytest.mark.parametrize("shape", [(256, 4096), (40, 24), (20, 24)])
@pytest.mark.parametrize("T", [1, 3, reference.FEW_ROWS, reference.FEW_ROWS + 1])
def test_a_narrower_matrix_is_multiplied_exactly(T, shape, assert_close_to_scale):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((T, shape[0]), np.float32)
    kernel = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    out = jax.jit(reference.matmul_f32)(x, kernel)
    # float32: sums of at most 256 terms in another order.
    assert_close_to_scale(out, x.astype(np.float64) @ np.asarray(kernel).astype(np.float64), 1e-6)


@pytest.mark.parametrize("T", [1, reference.FEW_ROWS, reference.FEW_ROWS + 1])
@pytest.mark.parametrize("repeats", [1, 8])
def test_narrower_matrices_are_not_copied_as_a_whole(T, repeats):
    x = jnp.ones((T, 512))
    kernels = [jnp.full((512, 2048), i + 1, jnp.bfloat16) for i in range(4)]

    def run(x, kernels):
        def body(_, x):
            for kernel in kernels:
                x = x + jnp.tanh(reference.matmul_f32(x, kernel)[:, :512])
            return x

        return jax.lax.fori_loop(0, repeats, body, x)

    memory = jax.jit(run).lower(x, kernels).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * kernels[0].nbytes


@pytest.mark.parametrize("T", [4, reference.FEW_ROWS + 1])
def test_gradients_of_a_product_with_a_narrower_matrix(T, assert_close_to_scale):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((T, 64)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((64, 24)), jnp.bfloat16)

    def loss(product, x, kernel):
        return jnp.sum(jnp.tanh(product(x, kernel)))

    plain = functools.partial(loss, lambda x, kernel: x @ kernel.astype(jnp.float32))
    expected = jax.grad(plain, (0, 1))(x, kernel)
    found = jax.grad(functools.partial(loss, reference.matmul_f32), (0, 1))(x, kernel)
    assert_close_to_scale(found[0], expected[0], 1e-5)
    # Of the matrix it is rounded to its dtype.
    assert_close_to_scale(found[1], expected[1], 1e-2)


def test_interpreted_kernels_take_narrower_matrices(assert_close_to_scale):
    spec = SPECS["tiny-attention"]
    x, delta, gain, kernels = spec.operands()
    narrow = tuple(jnp.asarray(kernel, jnp.bfloat16) for kernel in kernels)
    out, plain = (
        run(x, delta, gain, narrow, **spec.options, implementation=name)
        for name in ("interpret", "xla")
    )
    for ours, expected in zip(out.products, plain.products, strict=True):
        assert_close_to_scale(ours, expected, TOLERANCE["float32"])
