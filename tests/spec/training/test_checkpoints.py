import gc
import logging
import os
import resource
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.axes import pytree_dataclass
from spec.training.checkpoints import Checkpoints, ResumeError

# A read that fails leaves orbax's other reads unfinished, and Python complains of those later.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)

RUN = {"recipe": {"learning_rate": 1e-4, "depth": 7}, "data": "5f3a", "taps": (2, 30, 58)}
SIZE = 1000


@pytree_dataclass
class State:
    weights: nnx.State
    optimizer: optax.OptState
    step: jax.Array


def small(step=0):
    """A state whose values tell the step; `w` is too large to be stored in the manifest."""
    w = np.random.default_rng(step).normal(size=SIZE).astype(np.float32)
    return {"w": jnp.asarray(w), "step": jnp.int32(step)}


def fill(folder, steps, **options):
    with Checkpoints(folder, fingerprint=RUN, **options) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, small(step), {"position": 10 * step})


def restore(folder, like=None):
    with Checkpoints(folder, fingerprint=RUN) as checkpoints:
        return checkpoints.restore(small() if like is None else like)


def assert_restored(restored, step):
    assert restored is not None
    number, state, extra = restored
    assert number == step
    assert extra == {"position": 10 * step}
    assert_equal(state, small(step))


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def step_folders(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


def sharding(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    weights = nnx.state(nnx.Linear(3, 5, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {
        "train": State(
            weights=weights, optimizer=optimizer.init(weights), step=jnp.asarray(7, jnp.int32)
        ),
        "key": jax.random.key(3),
        "nan/inf": jnp.asarray([jnp.nan, jnp.inf, -0.0], jnp.float32),
        "mask": jnp.asarray([True, False]),
    }
    extra = {"seed": 2**40, "order": [3, 1, 2], "names": {"a": None}}
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        assert checkpoints.restore(state) is None
        assert checkpoints.latest is None
        assert checkpoints.save(7, state, extra)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    for how in (state, like):
        restored = restore(tmp_path, how)
        assert restored is not None
        step, back, told = restored
        assert (step, told) == (7, extra)
        assert_equal(back, state)


def test_a_saved_array_may_be_donated_at_once(tmp_path):
    change = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    saved = np.array(x)
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        checkpoints.save(1, {"x": x}, {})
        for _ in range(5):
            x = change(x)
        x.block_until_ready()
        restored = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
    assert restored is not None
    np.testing.assert_array_equal(restored[1]["x"], saved)


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (8, 2)])
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, before, after):
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(x, sharding(before))}, {})
    like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(after))}
    restored = restore(tmp_path, like)
    assert restored is not None
    back = restored[1]["x"]
    assert back.sharding == sharding(after)
    assert len(back.sharding.device_set) == after
    np.testing.assert_array_equal(back, x)


def test_the_newest_steps_stay(tmp_path):
    fill(tmp_path, [1, 2, 3], keep=2)
    assert step_folders(tmp_path) == ["2", "3"]
    assert_restored(restore(tmp_path), 3)


def test_saves_by_interval_and_when_forced(tmp_path):
    with Checkpoints(tmp_path, fingerprint=RUN, every=10) as checkpoints:
        assert not checkpoints.save(9, small(9), {})
        assert checkpoints.latest is None
        assert checkpoints.save(10, small(10), {})
        assert checkpoints.latest == 10
        assert checkpoints.save(13, small(13), {}, force=True)
    assert step_folders(tmp_path) == ["10", "13"]


def test_saving_a_step_again_changes_nothing(tmp_path):
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        assert checkpoints.save(1, small(1), {"position": 10})
        assert not checkpoints.save(1, small(5), {"position": 50})
        checkpoints.wait()
        assert not checkpoints.save(1, small(5), {"position": 50}, force=True)
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        assert not checkpoints.save(1, small(5), {"position": 50}, force=True)
        assert_restored(checkpoints.restore(small()), 1)


def test_a_run_that_did_not_go_on_from_the_newest_step_cannot_save(tmp_path):
    fill(tmp_path, [5])
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        with pytest.raises(ResumeError, match="step 1 is to be saved, step 5 is stored already"):
            checkpoints.save(1, small(1), {})


def empty_folder(step):
    step.mkdir()


def missing_file(name):
    def damage(step):
        shutil.copytree(step.parent / "2", step)
        path = step / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut_short(pattern):
    def damage(step):
        shutil.copytree(step.parent / "2", step)
        for path in step.glob(pattern):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)

    return damage


DAMAGES = {
    "empty": empty_folder,
    "no metadata": missing_file("_CHECKPOINT_METADATA"),
    "no state": missing_file("state"),
    "no extra": missing_file("about"),
    "empty extra": missing_file("about/metadata"),
    "no manifest": missing_file("state/manifest.ocdbt"),
    "no data": missing_file("state/ocdbt.process_0/d"),
    "data cut short": cut_short("state/ocdbt.process_0/d/*"),
    "extra cut short": cut_short("about/metadata"),
    "everything cut short": cut_short("**/*"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_newer_step_that_is_not_whole_is_passed_over(tmp_path, caplog, damage):
    fill(tmp_path, [1, 2])
    damage(tmp_path / "3")
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        with caplog.at_level(logging.WARNING, "spec.training.checkpoints"):
            assert_restored(checkpoints.restore(small()), 2)
        assert f"{tmp_path}: step 3 " in caplog.text
        assert "passed over" in caplog.text
        assert checkpoints.latest == 2
        # The run comes to the same step again, and goes on.
        for step in (3, 4):
            assert checkpoints.save(step, small(step), {"position": 10 * step})
    assert step_folders(tmp_path) == ["3", "3.unusable", "4"]
    assert_restored(restore(tmp_path), 4)


def test_a_changed_bit_of_a_value_is_noticed(tmp_path, caplog):
    fill(tmp_path, [1, 2])
    path = max((tmp_path / "2" / "state").glob("*/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert_restored(restore(tmp_path), 1)
    assert "step 2 cannot be read (ValueError: ['w'] is not what was saved)" in caplog.text


def test_what_a_killed_save_leaves_under_a_temporary_name_goes(tmp_path):
    fill(tmp_path, [1])
    left = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", left)
    assert_restored(restore(tmp_path), 1)
    assert left.exists()
    fill(tmp_path, [2])
    assert step_folders(tmp_path) == ["1", "2"]


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_the_step_before(tmp_path):
    script = f"""
        import os
        import jax.numpy as jnp
        import numpy as np
        from spec.training.checkpoints import Checkpoints
        checkpoints = Checkpoints({str(tmp_path)!r}, fingerprint={RUN!r})
        for step in (1, 2):
            w = np.random.default_rng(step).normal(size={SIZE}).astype(np.float32)
            state = {{"w": jnp.asarray(w), "step": jnp.int32(step)}}
            if step == 2:
                state["big"] = jnp.zeros((64, 1 << 18))
            checkpoints.save(step, state, {{"position": 10 * step}})
            if step == 1:
                checkpoints.wait()
        os._exit(9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert done.returncode == 9
    assert_restored(restore(tmp_path), 1)
    fill(tmp_path, [2])
    assert_restored(restore(tmp_path), 2)


def test_only_a_first_save_that_was_killed_is_nothing_saved(tmp_path, caplog):
    fill(tmp_path, [])
    (tmp_path / "1").mkdir()
    assert restore(tmp_path) is None
    assert "step 1 is not whole (no _CHECKPOINT_METADATA, state, about)" in caplog.text


def test_a_run_does_not_start_anew_because_nothing_can_be_read(tmp_path):
    fill(tmp_path, [1, 2])
    for step in ("1", "2"):
        os.truncate(tmp_path / step / "state" / "manifest.ocdbt", 5)
    with pytest.raises(ResumeError, match=r"no step can be read; step 2: .*; step 1: "):
        restore(tmp_path)


def test_another_structure_is_refused_and_named(tmp_path):
    fill(tmp_path, [1])
    like = {"w": jnp.zeros((2, 2)), "more": [jnp.zeros(3)]}
    with pytest.raises(ResumeError) as caught:
        restore(tmp_path, like)
    text = str(caught.value)
    assert "step 1: the stored state has other leaves (there, here)" in text
    assert "['more'][0]: none, 'float32 [3]'" in text
    assert "['step']: 'int32 []', none" in text
    assert "['w']: 'float32 [1000]', 'float32 [2, 2]'" in text


def test_another_dtype_is_refused_not_converted(tmp_path):
    fill(tmp_path, [1])
    like = {**small(), "w": jnp.zeros(SIZE, jnp.bfloat16)}
    with pytest.raises(ResumeError, match=r"\['w'\]: 'float32 \[1000\]', 'bfloat16 \[1000\]'"):
        restore(tmp_path, like)


def test_another_run_is_refused_and_every_difference_named(tmp_path):
    fill(tmp_path, [1])
    other = {"recipe": {"learning_rate": 2e-4, "depth": 7}, "data": "77", "taps": [2, 30, 58]}
    with pytest.raises(ResumeError) as caught:
        Checkpoints(tmp_path, fingerprint={**other, "seed": 0})
    text = str(caught.value)
    assert str(tmp_path) in text
    for difference in (
        "data: '5f3a', '77'",
        "recipe.learning_rate: 0.0001, 0.0002",
        "seed: none, 0",
    ):
        assert difference in text
    assert "depth" not in text and "taps" not in text
    assert_restored(restore(tmp_path), 1)


def test_a_run_that_saved_nothing_binds_no_later_one(tmp_path):
    for rate in (1, 2):
        Checkpoints(tmp_path, fingerprint={"rate": rate}).close()
    with Checkpoints(tmp_path, fingerprint={"rate": 2}) as checkpoints:
        checkpoints.save(1, small(), {})
    with pytest.raises(ResumeError, match=r"rate: 2, 1; give the options of that run"):
        Checkpoints(tmp_path, fingerprint={"rate": 1})


def test_a_fingerprint_that_cannot_be_read_is_refused(tmp_path):
    fill(tmp_path, [1])
    (tmp_path / "fingerprint.json").write_text("{")
    with pytest.raises(ResumeError, match="fingerprint.json: not readable"):
        restore(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "17").mkdir()
    with pytest.raises(ResumeError, match=r"holds 17 but no fingerprint.json"):
        Checkpoints(tmp_path, fingerprint=RUN)


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="fingerprint is not JSON"):
        Checkpoints(tmp_path, fingerprint={"a": np.zeros(2)})
    with Checkpoints(tmp_path, fingerprint=RUN) as checkpoints:
        with pytest.raises(TypeError, match="extra is not JSON"):
            checkpoints.save(1, small(), {"a": np.zeros(2)})
        with pytest.raises(TypeError, match=r"\['w'\] of the state is a ndarray, not a JAX array"):
            checkpoints.save(1, {"w": np.zeros(2)}, {})
    assert step_folders(tmp_path) == []


def test_a_save_that_fails_is_told_and_leaves_the_step_before(tmp_path):
    fill(tmp_path, [1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    w = np.random.default_rng(2).normal(size=1 << 20).astype(np.float32)
    checkpoints = Checkpoints(tmp_path, fingerprint=RUN)
    # As a full disk: no file may grow past this.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with pytest.raises(Exception, match="File too large"):
            checkpoints.save(2, {"w": jnp.asarray(w), "step": jnp.int32(2)}, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with checkpoints:
        assert checkpoints.latest == 1
        assert_restored(checkpoints.restore(small()), 1)
        assert checkpoints.save(2, small(2), {"position": 20})
    assert_restored(restore(tmp_path), 2)


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}])
def test_at_least_one_is_kept(tmp_path, options):
    with pytest.raises(ValueError, match="both must be at least 1"):
        Checkpoints(tmp_path, fingerprint=RUN, **options)
