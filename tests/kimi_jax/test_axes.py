"""Placement by axis letters, sums over devices, and the frozen pytree dataclass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from kimi_jax.axes import WHOLE, Rules, pytree_dataclass, replace, static_field

RULES = Rules.of(
    {
        "N": ("expert", "tensor"),
        "V": ("expert", "tensor"),
        "F": ("expert", "tensor"),
        "E": ("expert",),
    }
)


@pytest.mark.parametrize(
    "letters, expected",
    [
        ("B T D", (None, None, None)),
        ("D F", (None, ("expert", "tensor"))),
        ("V D", (("expert", "tensor"), None)),
        # A mesh axis an earlier letter took is not taken again, whichever comes first.
        ("E D F", (("expert",), None, ("tensor",))),
        ("F E", (("expert", "tensor"), None)),
        ("Q N UR", (None, ("expert", "tensor"), None)),
        # Not the letter E: the router scores every expert on every device.
        ("D E_all", (None, None)),
        ("", ()),
    ],
)
def test_pspec(letters, expected):
    assert RULES.pspec(letters) == PartitionSpec(*expected)


def test_whole_cuts_nothing():
    assert WHOLE.pspec("E D F") == PartitionSpec(None, None, None)
    assert WHOLE.mesh_axes("E") == ()
    assert WHOLE.shard_index("E") == 0
    x = jnp.ones(3)
    assert WHOLE.sum(x, "E F") is x


def test_rules_are_hashable_and_compare_by_value():
    assert hash(Rules.of({"N": ("tensor",)})) == hash(Rules.of({"N": ("tensor",)}))
    assert Rules.of({"N": ("tensor",)}) == Rules((("N", ("tensor",)),)) != RULES


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("letters", ["F", "E", "E F", "F E N", "D"])
def test_sum_adds_every_device_once(mesh, letters):
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    summed = jax.jit(
        jax.shard_map(
            lambda x: RULES.sum(x, letters),
            mesh=mesh,
            in_specs=PartitionSpec("expert", "tensor"),
            out_specs=PartitionSpec("expert", "tensor"),
            check_vma=False,
        )
    )(x)
    axes = {"E": 0, "D": ()}.get(letters, (0, 1))
    np.testing.assert_array_equal(summed, np.broadcast_to(x.sum(axes, keepdims=True), (2, 4)))


def test_shard_index_counts_along_the_cut_of_pspec(mesh):
    def local(x):
        index = RULES.shard_index("V")
        return x * 0 + jnp.asarray(index, jnp.int32)

    run = jax.shard_map(local, mesh=mesh, in_specs=RULES.pspec("V"), out_specs=RULES.pspec("V"))
    np.testing.assert_array_equal(run(np.zeros(16, np.int32)), np.repeat(np.arange(8), 2))


@pytree_dataclass
class Inner:
    values: tuple[Float[Array, " B"], ...]


@pytree_dataclass
class State:
    matrix: Float[Array, "B D"]
    inner: Inner
    name: str = static_field(default="state")
    missing: Float[Array, " B"] | None = None


@pytest.fixture
def state():
    return State(
        matrix=jnp.ones((2, 3)), inner=Inner(values=(jnp.zeros(2), jnp.ones(2))), name="one"
    )


def test_round_trip_through_jit_keeps_structure_and_static_fields(state):
    traces = []

    @jax.jit
    def double(state):
        traces.append(state.name)
        return jax.tree.map(lambda x: 2 * x, state)

    out = double(state)
    assert isinstance(out, State) and isinstance(out.inner, Inner)
    assert out.name == "one" and out.missing is None
    np.testing.assert_array_equal(out.matrix, 2 * np.ones((2, 3)))
    np.testing.assert_array_equal(out.inner.values[1], 2 * np.ones(2))
    double(out)
    assert traces == ["one"]
    # A static field is part of the program, so another value is another trace.
    double(replace(state, name="two"))
    assert traces == ["one", "two"]


def test_leaves_may_be_placeholders_and_are_named(state):
    pspecs = jax.tree.map(lambda _: PartitionSpec(), state)
    assert pspecs.inner.values == (PartitionSpec(), PartitionSpec())
    shapes = jax.eval_shape(lambda s: s, state)
    assert shapes.matrix == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == [".matrix", ".inner.values[0]", ".inner.values[1]"]


def test_survives_loops_and_conditions(state):
    def body(_, s):
        return replace(s, matrix=s.matrix + 1)

    out = jax.jit(lambda s: jax.lax.fori_loop(0, 3, body, s))(state)
    np.testing.assert_array_equal(out.matrix, np.full((2, 3), 4.0))


def test_fields_are_frozen_and_keyword_only(state):
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.matrix = jnp.zeros((2, 3))
    with pytest.raises(TypeError):
        Inner((jnp.zeros(2),))


def test_replace_changes_the_named_fields_only(state):
    # Placeholders are allowed: specs and shapes are trees of the same class.
    new = replace(state, matrix=PartitionSpec("data"))
    assert new.matrix == PartitionSpec("data") and new.inner is state.inner
    assert state.matrix.shape == (2, 3) and new.name == "one"


def test_replace_refuses_unknown_fields(state):
    with pytest.raises(TypeError, match=r"State has no field \['matrx', 'nam'\]"):
        replace(state, matrx=1, nam=2)
