"""The published layout on disk: shards, index, atomic renames; refusals of the export."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint import table
from kimi_jax.checkpoint.reader import CheckpointFiles
from kimi_jax.checkpoint.writer import LazyTensor, export_params, write_checkpoint

INDEX = "model.safetensors.index.json"


def lazy(value, log=None):
    def make():
        if log is not None:
            log.append(value.shape)
        return value

    return LazyTensor(value.shape, value.dtype, make)


def test_one_shard_needs_no_index(tmp_path):
    write_checkpoint(tmp_path / "a" / "b", [("x", np.zeros(3, np.float16))], {"k": 1})
    folder = tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {"k": 1}


def test_shards_and_index_have_the_published_names(tmp_path):
    tensors = [(f"t{i}", np.full(10, i, np.int32)) for i in range(5)]
    write_checkpoint(tmp_path, tensors, {}, max_shard_bytes=80)
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {f"t{i}": names[i // 2] for i in range(5)}
    files = CheckpointFiles.open(tmp_path)
    assert [files.read(f"t{i}")[0] for i in range(5)] == list(range(5))


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    tensors = [(name, np.zeros(size, np.uint8)) for name, size in (("a", 5), ("b", 90), ("c", 5))]
    write_checkpoint(tmp_path, tensors, {}, max_shard_bytes=10)
    assert len({info.shard for info in CheckpointFiles.open(tmp_path).tensors.values()}) == 3


def test_lazy_tensors_are_made_shard_by_shard(tmp_path):
    log: list = []

    def produce():
        for i in range(4):
            # Only what fills one shard has been asked for when its tensors are made.
            assert len(log) >= i - 2
            yield f"t{i}", lazy(np.full((2, i + 1), i, ml_dtypes.bfloat16), log)

    write_checkpoint(tmp_path, produce(), {}, max_shard_bytes=1)
    assert log == [(2, 1), (2, 2), (2, 3), (2, 4)]


def test_mixed_dtypes_are_aligned_and_not_contiguous_arrays_are_written_right(tmp_path):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = [("u8", np.ones(3, np.uint8)), ("t", value.T), ("b", np.zeros(1, np.bool_))]
    write_checkpoint(tmp_path, tensors, {})
    files = CheckpointFiles.open(tmp_path)
    assert np.array_equal(files.read("t"), value.T)
    assert files.tensors["t"].offset % 8 == 0


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "no tensors"),
        ([("a", np.zeros(1, np.uint8)), ("a", np.zeros(1, np.uint8))], "a is given twice"),
        ([("a", np.zeros(1, np.complex64))], "a: safetensors has no complex64"),
        ([("a", LazyTensor((2,), np.dtype(np.uint8), lambda: np.zeros(3, np.uint8)))], "announced"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path, tensors, {}, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_write_cut_short_leaves_no_checkpoint(tmp_path):
    def broken():
        yield "a", np.zeros(4, np.uint8)
        yield "b", np.zeros(4, np.uint8)
        # A killed process could not tidy up: this is what it would leave.
        assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_checkpoint(tmp_path, broken(), {}, max_shard_bytes=4)
    assert list(tmp_path.iterdir()) == []


def test_existing_weights_are_replaced_only_when_asked(tmp_path):
    tensors = [(name, np.zeros(4, np.uint8)) for name in "abc"]
    write_checkpoint(tmp_path, tensors, {}, max_shard_bytes=4)
    (tmp_path / "tiktoken.model").write_text("kept")
    with pytest.raises(FileExistsError, match="already holds"):
        write_checkpoint(tmp_path, tensors, {})
    write_checkpoint(tmp_path, [("x", np.ones(1, np.uint8))], {"new": 1}, overwrite=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.json", "model.safetensors", "tiktoken.model"]
    assert CheckpointFiles.open(tmp_path).read("x").tolist() == [1]


def test_export_takes_sharded_arrays_and_another_dtype(cfg, make_params, tmp_path):
    params = make_params(cfg, dtype=np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    on_devices = {
        path: jax.device_put(value, rows if value.shape[0] % 8 == 0 else jax.devices()[0])
        for path, value in params.items()
    }
    from_numpy = dict(export_params(params, cfg, dtype=ml_dtypes.bfloat16))
    for name, tensor in export_params(on_devices, cfg, dtype=ml_dtypes.bfloat16):
        assert tensor.make().tobytes() == from_numpy[name].make().tobytes(), name
    assert from_numpy["lm_head.weight"].dtype == ml_dtypes.bfloat16
    bias = from_numpy["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == np.float32
    shape = from_numpy["model.layers.1.mlp.experts.3.down_proj.weight_shape"].make()
    assert shape.dtype == np.int32 and shape.tolist() == [64, 256]


def test_export_refuses_what_is_not_the_model(cfg, make_params):
    params = make_params(cfg)
    with pytest.raises(ValueError, match="prefix"):
        export_params(params, cfg, prefix="model.")
    with pytest.raises(ValueError, match="norm is"):
        export_params(params | {"norm": params["norm"][:3]}, cfg)
    del params["norm"]
    with pytest.raises(ValueError, match="not the parameters of this model: norm"):
        export_params(params, cfg)


def test_exported_names_and_shapes_are_those_of_the_table(cfg, plain_cfg, make_params):
    for one in (cfg, plain_cfg):
        exported = dict(export_params(make_params(one), one))
        expected = table.expected(one, is_int4=one.quantization is not None)
        assert {n: t.shape for n, t in exported.items()} == {
            n: t.shape for n, t in expected.items()
        }
