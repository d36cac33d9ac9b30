"""Which implementation is chosen, and what is said where one cannot run."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.dispatch import ImplementationError, Target, choose
from kernels_pallas.tiles import CHIPS, chip_tiles, mla_tiles

H100 = Target("gpu", (9, 0))


def nothing() -> None:
    return None


def too_wide() -> str:
    return "the width 48 is no power of two"


def test_a_cpu_gets_the_reference_and_one_line(caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        choice = choose("an op of this test", None, nothing)
        assert (choice.implementation, choice.is_kernel) == ("xla", False)
    (line,) = [r.message for r in caplog.records if "of this test" in r.message]
    assert line == (
        "an op of this test runs as plain XLA: the Triton lowering needs an NVIDIA GPU, and the "
        "device is a cpu"
    )


def test_a_gpu_gets_the_kernel_unless_the_operands_forbid_it():
    with dispatch.compile_for(H100):
        choice = choose("op", None, nothing)
        assert (choice.implementation, choice.interpret, choice.target) == ("triton", False, H100)
        assert choose("op", None, too_wide).implementation == "xla"
        assert choose("op", "xla", nothing).implementation == "xla"
    assert dispatch.current_target() == Target("cpu")


@pytest.mark.parametrize(
    "target, name, obstacle, reason",
    [
        (Target("cpu"), "triton", nothing, "needs an NVIDIA GPU, and the device is a cpu"),
        (Target("gpu", (7, 5)), "triton", nothing, "compute capability 7.5 is below 8.0"),
        (Target("gpu"), "triton", nothing, "needs an NVIDIA GPU"),
        (H100, "triton", too_wide, "the width 48 is no power of two"),
        (Target("cpu"), "interpret", too_wide, "the width 48 is no power of two"),
    ],
)
def test_a_named_one_that_cannot_run_says_why(target, name, obstacle, reason):
    with dispatch.compile_for(target), pytest.raises(ImplementationError, match=reason):
        choose("op", name, obstacle)
    with dispatch.compile_for(target), dispatch.using(name):
        with pytest.raises(ImplementationError, match=f"op cannot run as '{name}'"):
            choose("op", None, obstacle)


def test_using_names_it_for_ops_that_name_none():
    with dispatch.using("interpret"):
        assert choose("op", None, nothing).interpret
        assert choose("op", "xla", nothing).implementation == "xla"
    assert choose("op", None, nothing).implementation == "xla"


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ImplementationError, match="'cuda': there are 'xla', 'triton', 'interpret'"):
        dispatch._checked("cuda")


@dataclasses.dataclass
class FakeDevice:
    platform: str
    compute_capability: str


def test_targets_of_devices():
    assert Target.of(jax.devices()[0]) == Target("cpu")
    assert Target.of(FakeDevice("gpu", "12.0")) == Target("gpu", (12, 0))
    assert Target.of(FakeDevice("gpu", "gfx90a")) == Target("gpu")


def test_inside_shard_map_the_mesh_decides():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    seen = []

    def body(x):
        seen.append(dispatch.current_target())
        return x

    spec = jax.sharding.PartitionSpec("x")
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec), jnp.ones(2))
    assert seen == [Target("cpu")]


def test_tiles_of_a_chip_not_listed_are_the_last_one_before_it():
    assert chip_tiles(Target("gpu", (8, 9))) is CHIPS[8, 0]
    assert chip_tiles(Target("gpu", (12, 1))) is CHIPS[12, 0]
    assert chip_tiles(Target("cpu")) is CHIPS[8, 0]


def test_query_rows_take_the_first_tile_that_holds_them():
    rows = [mla_tiles(H100, n, jnp.dtype(jnp.bfloat16)).rows for n in (1, 16, 17, 32, 33, 64, 512)]
    assert rows == [16, 16, 32, 32, 64, 64, 64]
    assert mla_tiles(H100, 64, jnp.dtype(jnp.float32)).rows == 16
