"""Folders and headers: what is right is read exactly, what is wrong is named (CKP-*)."""

import json
import os
import shutil
import struct
import sys

import huggingface_hub.constants
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from kimi_jax.checkpoint.reader import CheckpointError, CheckpointFiles, resolve, summarise
from kimi_jax.checkpoint.writer import write_checkpoint

SHAPE = (300, 1201)


def problems_of(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.open(folder)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


def shard_bytes(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), begin=0, end=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def three_shards(tmp_path):
    tensors = {name: np.full((4,), i, np.float32) for i, name in enumerate("abc")}
    folder = write_checkpoint(tmp_path / "three", tensors.items(), {}, max_shard_bytes=16)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


SHARD_2, SHARD_3 = (f"model-{i:05d}-of-00003.safetensors" for i in (2, 3))
INDEX = "model.safetensors.index.json"


# CKP-1: incomplete downloads.


def test_ckp_1_every_missing_shard_is_named(three_shards):
    (three_shards / SHARD_2).unlink()
    assert SHARD_2 in problems_of(three_shards)
    (three_shards / SHARD_3).unlink()
    text = problems_of(three_shards)
    assert SHARD_2 in text and SHARD_3 in text


def test_ckp_1_several_shards_need_an_index(three_shards):
    (three_shards / INDEX).unlink()
    text = problems_of(three_shards)
    assert INDEX in text and SHARD_2 in text
    (three_shards / SHARD_3).unlink()
    (three_shards / SHARD_2).unlink()
    assert INDEX in problems_of(three_shards)


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_ckp_1_index_that_is_no_index(three_shards, text):
    (three_shards / INDEX).write_text(text)
    assert INDEX in problems_of(three_shards)


def test_ckp_1_truncated_shard(three_shards):
    data = (three_shards / SHARD_2).read_bytes()
    (three_shards / SHARD_2).write_bytes(data[:-3])
    text = problems_of(three_shards)
    assert SHARD_2 in text and "truncated" in text and "b" in text


def test_ckp_1_folder_without_weights(tmp_path):
    assert "model.safetensors" in problems_of(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointFiles.open(tmp_path / "absent")


def test_all_problems_come_at_once(three_shards, rewrite_index):
    (three_shards / SHARD_2).unlink()
    (three_shards / SHARD_3).write_bytes(b"\0")
    rewrite_index(three_shards, lambda m: m.update(z="model-00009.safetensors"))
    text = problems_of(three_shards)
    assert SHARD_2 in text and SHARD_3 in text and "model-00009" in text


# CKP-3: index against shards.


def test_ckp_3_tensor_mapped_to_the_wrong_shard(three_shards, rewrite_index):
    rewrite_index(three_shards, lambda m: m.update(a=SHARD_2))
    # Shard 1 is then named by nothing.
    text = problems_of(three_shards)
    assert "model-00001" in text and "a (" in text
    rewrite_index(three_shards, lambda m: m.update(b="model-00001-of-00003.safetensors", a=SHARD_2))
    text = problems_of(three_shards)
    assert f"b is in {SHARD_2}, the index says model-00001" in text


def test_ckp_3_index_names_an_absent_tensor_and_lacks_a_present_one(three_shards, rewrite_index):
    rewrite_index(three_shards, lambda m: m.update(ghost=SHARD_3))
    assert f"ghost ({SHARD_3})" in problems_of(three_shards)
    write_checkpoint(
        three_shards,
        [("a", np.zeros(4, np.float32)), ("b", np.zeros(4, np.float32))],
        {},
        overwrite=True,
        max_shard_bytes=16,
    )
    rewrite_index(three_shards, lambda m: m.pop("b"))
    assert "model-00002-of-00002.safetensors: not in" in problems_of(three_shards)


def test_ckp_3_tensor_of_a_named_shard_missing_from_the_index(tmp_path, rewrite_index):
    tensors = {name: np.zeros((4,), np.float32) for name in "abcd"}
    folder = write_checkpoint(tmp_path / "m", tensors.items(), {}, max_shard_bytes=32)
    rewrite_index(folder, lambda m: m.pop("b"))
    assert "in a shard but not in the index: b" in problems_of(folder)


def test_ckp_3_same_tensor_in_two_shards(three_shards):
    shutil.copy(three_shards / SHARD_2, three_shards / SHARD_3)
    text = problems_of(three_shards)
    assert "b is in two shards" in text and SHARD_2 in text and SHARD_3 in text


def test_ckp_3_shard_the_index_does_not_know(three_shards):
    shutil.copy(three_shards / SHARD_2, three_shards / "old.safetensors")
    assert "old.safetensors: not in" in problems_of(three_shards)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\\b", 7, None])
def test_index_may_not_point_outside(three_shards, rewrite_index, name):
    rewrite_index(three_shards, lambda m: m.update(a=name))
    assert "not the name of a file in this folder" in problems_of(three_shards)


# Headers.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\x10\0\0", "truncated"),
        (struct.pack("<Q", 2**62) + b"{}", "header of"),
        (struct.pack("<Q", 0), "header of 0"),
        (struct.pack("<Q", 99) + b"{}", "truncated"),
        (b"<html>not a tensor file</html>", "header of"),
        (shard_bytes(b"{]", b""), "not JSON"),
        (shard_bytes(b'{"\xff": 1}', b""), "not JSON"),
        (shard_bytes([1], b""), "not an object"),
        (shard_bytes({"a": 3}, b""), "a: described by"),
        (shard_bytes({"a": entry(end=16)}, bytes(8)), "takes 8"),
        (shard_bytes({"a": entry(begin=0, end=8)}, bytes(7)), "truncated"),
        (shard_bytes({"a": entry()}, bytes(9)), "belong to none"),
        (shard_bytes({"a": entry(begin=4, end=12)}, bytes(12)), "unused after the header"),
        (
            shard_bytes({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)),
            "b leaves 4 bytes unused after a",
        ),
        (shard_bytes({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "b overlaps a"),
        (shard_bytes({"a": entry(begin=8, end=0)}, bytes(8)), "data_offsets"),
        (shard_bytes({"a": entry(begin=-8, end=0)}, bytes(8)), "data_offsets"),
        (shard_bytes({"a": entry(begin=False, end=8)}, bytes(8)), "data_offsets"),
        (shard_bytes({"a": entry(shape=(2.0,))}, bytes(8)), "shape is"),
        (shard_bytes({"a": entry(shape=(-2,))}, bytes(8)), "shape is"),
        (shard_bytes({"a": entry(shape=(2**62, 2**62))}, bytes(8)), "takes"),
        (shard_bytes({"a": entry(dtype="F4")}, bytes(8)), "unknown dtype 'F4'"),
        (shard_bytes({"a": entry(dtype=None)}, bytes(8)), "unknown dtype None"),
        (
            shard_bytes(
                b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
                b"\0",
            ),
            "twice: a",
        ),
    ],
)
def test_bad_shards_are_named(tmp_path, content, reason):
    (tmp_path / "model.safetensors").write_bytes(content)
    text = problems_of(tmp_path)
    assert "model.safetensors: " in text and reason in text


def test_folder_named_like_a_shard(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors: not readable" in problems_of(tmp_path)


def test_scalars_empty_tensors_and_odd_alignment(tmp_path):
    header = {
        "__metadata__": {"format": "np"},
        "byte": entry("U8", (1,), 0, 1),
        "empty": entry("F32", (0, 3), 1, 1),
        "scalar": entry("F32", (), 1, 5),
        "last": entry("I64", (0,), 5, 5),
    }
    data = b"\7" + struct.pack("<f", 1.5)
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(header, data))
    files = CheckpointFiles.open(tmp_path)
    assert files.read("byte").tolist() == [7]
    assert files.read("scalar") == np.float32(1.5)
    assert files.read("empty").shape == (0, 3)
    assert files.read("last").dtype == np.int64


# CKP-4: dtypes.


def values_of(dtype, shape) -> np.ndarray:
    raw = np.random.default_rng(1).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array = np.frombuffer(raw, np.uint8)
    return (array % 2 if dtype is np.bool_ else array).view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(3, 5), SHAPE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("dtype", "spelling"),
    [
        (ml_dtypes.bfloat16, "BF16"),
        (np.float16, "F16"),
        (np.float32, "F32"),
        (np.int32, "I32"),
        (np.int64, "I64"),
        (np.uint8, "U8"),
        (np.bool_, "BOOL"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
    ],
)
def test_ckp_4_bits_survive_without_torch(tmp_path, dtype, spelling, shape):
    value = values_of(dtype, shape)
    write_checkpoint(tmp_path, [("x", value)], {})
    files = CheckpointFiles.open(tmp_path)
    assert files.tensors["x"].dtype == spelling
    read = files.read("x")
    assert read.dtype == np.dtype(dtype) and not read.flags.writeable
    assert read.tobytes() == value.tobytes()
    part = files.read("x", (slice(1, 3), slice(2, 4)))
    assert part.tobytes() == value[1:3, 2:4].tobytes()
    assert "torch" not in sys.modules


def test_ckp_4_agrees_with_the_safetensors_library(tmp_path):
    value = values_of(np.int32, (7, 9))
    (tmp_path / "theirs").mkdir()
    safetensors.numpy.save_file({"x": value}, tmp_path / "theirs" / "model.safetensors")
    assert np.array_equal(CheckpointFiles.open(tmp_path / "theirs").read("x"), value)
    write_checkpoint(tmp_path / "ours", [("x", value), ("y", value[:0])], {})
    with safetensors.safe_open(tmp_path / "ours" / "model.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == ["x", "y"]
        assert np.array_equal(file.get_tensor("x"), value)
        assert file.metadata() == {"format": "pt"}


def test_reading_reinterprets_words_as_bytes(tmp_path):
    value = values_of(np.int32, (6, 4))
    write_checkpoint(tmp_path, [("x", value)], {})
    read = CheckpointFiles.open(tmp_path).read(
        "x", (slice(2, 4), slice(3, 9)), dtype=np.uint8, shape=(6, 16)
    )
    assert np.array_equal(read, value.view(np.uint8)[2:4, 3:9])


# CKP-5: paths, links, the hub's cache.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, three_shards):
    """The folder as the hub's cache keeps it: relative links from a snapshot to blobs."""
    repo = tmp_path / "hub" / "models--owner--kimi"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for i, path in enumerate(sorted(three_shards.iterdir())):
        shutil.copy(path, repo / "blobs" / f"blob{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{i}")
    return snapshot


def test_ckp_5_linked_snapshot_by_relative_path(cached, tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(cached.parent)
    files = CheckpointFiles.open(resolve(cached.name))
    monkeypatch.chdir(tmp_path)
    assert files.read("b").tolist() == [1.0] * 4
    (tmp_path / "parent").symlink_to(cached.parents[1], target_is_directory=True)
    files = CheckpointFiles.open(resolve(os.path.join("parent", "snapshots", COMMIT)))
    assert files.read("c").tolist() == [2.0] * 4


def test_ckp_5_dangling_links_are_named(cached, three_shards):
    (cached / SHARD_2).resolve().unlink()
    text = problems_of(cached)
    assert SHARD_2 in text and "dangling link to ../../blobs/blob" in text
    (cached / INDEX).resolve().unlink()
    assert f"{INDEX}: a dangling link" in problems_of(cached)


def test_ckp_5_single_dangling_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("../blobs/x")
    assert "dangling link to ../blobs/x" in problems_of(tmp_path)


def test_ckp_5_cached_hub_id_with_the_network_off(cached, tmp_path, monkeypatch, no_network):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    folder = resolve("owner/kimi")
    assert folder == cached
    assert CheckpointFiles.open(folder).read("a").tolist() == [0.0] * 4
    with pytest.raises(CheckpointError, match="owner/other.*did not give it"):
        resolve("owner/other")


@pytest.mark.parametrize(
    "path",
    ["./models/kimi", "/no/such/folder", "~/no-such-folder-here", "kimi", "a/b/c", "here/kimi", ""],
)
def test_ckp_5_local_looking_paths_never_reach_the_hub(path, tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: 1 / 0)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(tmp_path / "owner" / "kimi")


def test_resolve_refuses_a_file_and_a_dangling_link(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(CheckpointError, match="dangling link to gone"):
        resolve(tmp_path / "link")


def test_resolve_asks_only_for_what_a_model_needs(tmp_path, monkeypatch):
    asked = {}

    def download(repo, **kwargs):
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/kimi-x", revision="v1") == tmp_path
    assert asked["repo"] == "owner/kimi-x" and asked["revision"] == "v1"
    assert not any(pattern.endswith((".py", ".bin")) for pattern in asked["allow_patterns"])


def test_summarise_counts_long_lists():
    assert summarise(["a", "b"]) == "a, b"
    assert summarise(map(str, range(20)), 3) == "0, 1, 2 and 17 more (20 in all)"
