"""The routed experts' products against a float64 loop over tokens and choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul.layout import Int4Weight, nibble_planes
from kernels_pallas.grouped_matmul.reference import ExpertWeights, expert_ffn

E, D, F, A = 5, 64, 32, 3
COUNTS = (1, 2, reference.FEW_TOKENS, reference.FEW_TOKENS + 1, 300)

run = jax.jit(expert_ffn)


@pytest.fixture(scope="module", autouse=True)
def no_matrix_is_small():
    # Small ones take the form that many tokens take.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SMALL_MATRIX", 0)
        yield


@functools.cache
def float_experts() -> ExpertWeights:
    rng = np.random.default_rng(1)
    shapes = (E, D, F), (E, D, F), (E, F, D)
    return ExpertWeights(*(jnp.asarray(_normal(rng, s) / np.sqrt(s[1])) for s in shapes))


@functools.cache
def int4_experts() -> ExpertWeights:
    rng = np.random.default_rng(2)

    def one(width: int, out: int) -> Int4Weight:
        packed = rng.integers(0, 256, (E, width // 2, out), np.uint8)
        scale = 0.02 + 0.02 * rng.random((E, width // 32, out))
        return Int4Weight(jnp.asarray(packed), jnp.asarray(scale).astype(jnp.bfloat16))

    return ExpertWeights(one(D, F), one(D, F), one(F, D))


def _normal(rng, shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def dense(weight) -> np.ndarray:
    """float64 [E, in, out]: input i of a column is nibble i, times the scale of its 32 inputs."""
    if not isinstance(weight, Int4Weight):
        return np.asarray(weight, np.float64)
    low, high = (np.asarray(q, np.float64) for q in nibble_planes(weight.packed))
    q = np.stack([low, high], axis=2).reshape(E, -1, low.shape[-1])
    return q * np.repeat(np.asarray(weight.scale).astype(np.float64), 32, axis=1)


def by_loop(x, experts, ids, combine) -> np.ndarray:
    gate, up, down = map(dense, experts)
    out = np.zeros(x.shape)
    for t, a in np.ndindex(ids.shape):
        e = ids[t, a]
        if 0 <= e < E:
            row = x[t].astype(np.float64)
            g = row @ gate[e]
            out[t] += combine[t, a] * ((g / (1 + np.exp(-g)) * (row @ up[e])) @ down[e])
    return out


def case(T: int, seed: int = 0):
    rng = np.random.default_rng(T + seed)
    ids = np.stack([rng.permutation(E)[:A] for _ in range(T)]).astype(np.int32)
    return _normal(rng, (T, D)), ids, rng.random((T, A)).astype(np.float32)


@pytest.fixture(params=["float", "int4"])
def experts(request):
    return float_experts() if request.param == "float" else int4_experts()


@pytest.mark.parametrize("T", COUNTS)
def test_equals_the_loop(T, experts, assert_close_to_scale):
    # Three chained float32 sums of at most 64 terms; every case shares one program per count.
    check = functools.partial(assert_close_to_scale, tolerance=2e-6)
    x, ids, combine = case(T)
    out = run(x, experts, ids, combine)
    assert out.dtype == jnp.float32
    check(out, by_loop(x, experts, ids, combine))

    # Ids outside 0..E-1 add nothing, whatever their share.
    rng = np.random.default_rng(9)
    absent = rng.random(ids.shape) < 0.5
    absent[0, 0], absent[0, 1] = True, False
    some = np.where(absent, rng.choice([-E, -1, E, E + 1, 10**6], ids.shape), ids).astype(np.int32)
    check(run(x, experts, some, combine), by_loop(x, experts, some, combine))

    none = np.full_like(ids, -1)
    none[:, 1] = E
    np.testing.assert_array_equal(run(x, experts, none, combine), np.zeros((T, D)))

    # Every token's every choice is one expert: a group of 3 T rows, the same id twice in a row.
    one = np.full_like(ids, E - 1)
    check(run(x, experts, one, combine), by_loop(x, experts, one, combine))


@pytest.mark.parametrize("T", COUNTS)
def test_experts_no_token_chose_are_never_read(T):
    """Weights that would poison any product they enter."""
    experts = jax.tree.map(lambda w: w.at[jnp.array([0, 3])].set(jnp.nan), float_experts())
    x, _, combine = case(T)
    ids = np.resize(np.array([1, 2, 4, -1, 5, 8], np.int32), (T, A))
    np.testing.assert_array_equal(
        run(x, experts, ids, combine), run(x, float_experts(), ids, combine)
    )
    # With none chosen, not one expert is read.
    all_bad = jax.tree.map(lambda w: w * jnp.nan, float_experts())
    none = np.full_like(ids, -1)
    np.testing.assert_array_equal(run(x, all_bad, none, combine), np.zeros((T, D)))


@pytest.mark.parametrize("T", [3, reference.FEW_TOKENS + 1, 300])
def test_a_token_does_not_depend_on_its_neighbours(T, experts, assert_close):
    x, ids, combine = case(T)
    whole = run(x, experts, ids, combine)
    others = case(T, seed=100)
    others = [
        np.concatenate([a[:1], b[1:]]) for a, b in zip((x, ids, combine), others, strict=True)
    ]
    np.testing.assert_array_equal(run(others[0], experts, *others[1:])[0], whole[0])
    alone = run(x[:1], experts, ids[:1], combine[:1])[0]
    # Where tokens are sorted, their sums are in another order.
    assert_close(alone, whole[0], atol=2e-6 if T > reference.FEW_TOKENS else 0.0)


def test_group_ends_that_meet_block_ends(assert_close_to_scale):
    """Groups of one block, of one row more, of one row, and of none."""
    T, block = 300, reference.BLOCK_ROWS
    x, _, combine = case(T)
    ids = np.full((T, A), -1, np.int32)
    ids[:block, 0] = 1
    ids[: block + 1, 1] = 2
    ids[0, 2] = 4
    expected = by_loop(x, float_experts(), ids, combine)
    assert_close_to_scale(run(x, float_experts(), ids, combine), expected, 2e-6)


@jax.jit
def dense_formula(x, experts, ids, combine):
    """Every expert over every token, weighted by the shares; plain enough to be differentiated."""
    gate, up, down = experts
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    y = jnp.einsum("tef,efd->ted", hidden, down)
    chosen = ids[:, :, None] == jnp.arange(E, dtype=ids.dtype)
    return jnp.einsum("te,ted->td", jnp.sum(jnp.where(chosen, combine[..., None], 0.0), 1), y)


@functools.cache
def gradients(function):
    def loss(x, experts, combine, ids, target):
        return jnp.sum(function(x, experts, ids, combine) * target)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def test_gradients_of_many_tokens(assert_close_to_scale):
    ours, theirs = gradients(expert_ffn), gradients(dense_formula)
    for seed in range(2):
        x, ids, combine = case(300, seed)
        target = case(300, seed + 50)[0]
        if seed:  # absent pairs, an expert nobody chose, a token without any
            ids = np.where(np.random.default_rng(3).random(ids.shape) < 0.3, -1, ids)
            ids = np.where(ids == 2, E + 3, ids).astype(np.int32)
            ids[5] = -1
        args = x, float_experts(), combine, ids, target
        # Weights' gradients sum up to 300 tokens in float32, in another order.
        for a, b in zip(*map(jax.tree.leaves, (ours(*args), theirs(*args))), strict=True):
            assert a.dtype == b.dtype
            assert_close_to_scale(a, b, 1e-5)
        if seed:
            d_x, d_experts, d_combine = ours(*args)
            assert not np.asarray(d_x[5]).any()
            assert not np.asarray(d_combine)[(ids < 0) | (ids >= E)].any()
            assert not any(np.asarray(d)[2].any() for d in d_experts)


def test_gradients_when_every_choice_is_absent():
    x, ids, combine = case(300)
    args = x, float_experts(), combine, np.full_like(ids, -1), x
    for gradient in jax.tree.leaves(gradients(expert_ffn)(*args)):
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("T", [1, 16])
def test_gradients_of_few_tokens(T, assert_close_to_scale):
    """A short sequence trains as a long one does."""
    x, ids, combine = case(T)
    args = x, float_experts(), combine, ids, case(T, 50)[0]
    results = (gradients(expert_ffn)(*args), gradients(dense_formula)(*args))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close_to_scale(a, b, 1e-5)
