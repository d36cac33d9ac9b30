import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kimi_jax.checkpoint.reader import CheckpointError
from spec.training import states
from spec.training.samples import Sample
from spec.training.states import (
    DTYPES,
    StatesError,
    StatesHeader,
    StatesWriter,
    StoredStates,
    check_space,
    states_bytes,
)

WIDTH, TAPS, VOCAB = 6, (2, 5, 9), 100
HEADER = StatesHeader(
    fingerprint="a1",
    taps=TAPS,
    hidden_size=WIDTH,
    dtype="bfloat16",
    samples_sha256="b2",
    num_samples=7,
)
# Of 6 to 12 tokens, 48 bytes each: two or three samples a shard.
SHARD = 1300


def made(index, header=HEADER):
    """A sample and its states, told by the index alone."""
    rng = np.random.default_rng(index)
    length = 6 + index
    sample = Sample(
        id=f"sample {index}",
        input_ids=rng.integers(0, VOCAB, length, dtype=np.int32),
        loss_mask=rng.random(length) < 0.5,
    )
    dtype, width = DTYPES[header.dtype], header.hidden_size
    hidden = rng.normal(size=(length, width)).astype(dtype)
    return sample, hidden, rng.normal(size=(length, len(header.taps) * width)).astype(dtype)


def fill(folder, indices=range(7), header=HEADER):
    with StatesWriter(folder, header, max_shard_bytes=SHARD) as writer:
        for index in indices:
            if made(index)[0].id not in writer.done:
                writer.add(*made(index, header))


def open_stored(folder, **options):
    wanted = {"hidden_size": WIDTH, "taps": TAPS, "vocab_size": VOCAB}
    return StoredStates.open(folder, **(wanted | options))


def assert_stored(folder, indices=range(7), header=HEADER):
    stored = open_stored(folder, taps=header.taps)
    assert [sample.id for sample in stored.samples] == [made(index)[0].id for index in indices]
    for place, index in enumerate(indices):
        sample, hidden, aux = made(index, header)
        np.testing.assert_array_equal(stored.samples[place].input_ids, sample.input_ids)
        np.testing.assert_array_equal(stored.samples[place].loss_mask, sample.loss_mask)
        for ours, theirs in zip(stored.read(place), (hidden, aux), strict=True):
            assert ours.dtype == theirs.dtype == DTYPES[header.dtype]
            assert ours.shape == theirs.shape
            assert ours.tobytes() == theirs.tobytes()


def shard(folder, number=0):
    return folder / f"states-{number:05d}.safetensors"


def change(path, **tensors):
    """Replaces tensors of a shard, or takes them out."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    kept = {name: value for name, value in {**load_file(path), **tensors}.items()}
    save_file({k: v for k, v in kept.items() if v is not None}, path, metadata=metadata)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [TAPS, ()])
def test_what_was_added_is_read_back_bit_for_bit(tmp_path, dtype, taps):
    header = dataclasses.replace(HEADER, dtype=dtype, taps=taps)
    fill(tmp_path, header=header)
    assert_stored(tmp_path, header=header)
    assert not list(tmp_path.glob("*.partial"))


def test_shards_are_plain_safetensors_of_the_names_announced(tmp_path):
    fill(tmp_path)
    assert len(list(tmp_path.glob("states-*.safetensors"))) == 3
    tensors = load_file(shard(tmp_path))
    assert {name: (value.dtype, value.shape) for name, value in tensors.items()} == {
        "input_ids": (np.int32, (21,)),
        "loss_mask": (np.bool_, (21,)),
        "hidden_state": (ml_dtypes.bfloat16, (21, WIDTH)),
        "aux_hidden_state": (ml_dtypes.bfloat16, (21, 3 * WIDTH)),
        "lengths": (np.int32, (3,)),
    }
    header = json.loads((tmp_path / "states.json").read_text())
    assert header["taps"] == [2, 5, 9]
    assert "input" in header["conventions"]["taps"]
    assert "after its final norm" in header["conventions"]["hidden_state"]
    assert "ascending layer order" in header["conventions"]["aux_hidden_state"]


def test_a_sample_over_a_shard_has_one_of_its_own(tmp_path):
    with StatesWriter(tmp_path, HEADER, max_shard_bytes=1) as writer:
        for index in range(2):
            writer.add(*made(index))
    assert [sample.id for sample in open_stored(tmp_path).samples] == ["sample 0", "sample 1"]
    assert shard(tmp_path, 1).exists()


def test_arrays_may_be_used_again_after_they_were_added(tmp_path):
    sample, hidden, aux = made(0)
    with StatesWriter(tmp_path, HEADER) as writer:
        writer.add(sample, hidden, aux)
        hidden[:], aux[:] = 0, 0
    assert_stored(tmp_path, range(1))


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6, 7])
def test_a_resumed_run_is_as_an_unbroken_one(tmp_path, stop):
    fill(tmp_path, range(stop))
    fill(tmp_path, range(7))
    assert_stored(tmp_path)


def test_a_killed_writer_leaves_whole_shards_and_is_gone_on_from(tmp_path):
    script = f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import numpy as np
        import test_states as t
        from spec.training import states
        writer = t.StatesWriter({str(tmp_path)!r}, t.HEADER, max_shard_bytes=t.SHARD)
        written = []
        def fsync(descriptor):
            written.append(descriptor)
            if len(written) == 3:  # the first shard's file, its folder's entry, the second's file
                os._exit(9)
        states.os.fsync = fsync
        for index in range(7):
            writer.add(*t.made(index))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert done.returncode == 9
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["states-00000.safetensors", "states-00001.safetensors.partial", "states.json"]
    with StatesWriter(tmp_path, HEADER) as writer:
        assert writer.done == {"sample 0", "sample 1", "sample 2"}
    assert not shard(tmp_path, 1).with_name("states-00001.safetensors.partial").exists()
    assert_stored(tmp_path, range(3))
    fill(tmp_path)
    assert_stored(tmp_path)


def test_a_full_disk_leaves_whole_shards(tmp_path, monkeypatch):
    calls = []

    def fsync(_):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = StatesWriter(tmp_path, HEADER, max_shard_bytes=SHARD)
    monkeypatch.setattr(states.os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"), writer:
        for index in range(7):
            writer.add(*made(index))
    monkeypatch.undo()
    assert writer.done == {"sample 0", "sample 1", "sample 2"}
    assert_stored(tmp_path, range(3))
    assert not list(tmp_path.glob("*.partial"))
    fill(tmp_path)
    assert_stored(tmp_path)


def test_an_error_of_the_caller_keeps_what_was_added(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), StatesWriter(tmp_path, HEADER) as writer:
        writer.add(*made(0))
        raise KeyboardInterrupt
    assert_stored(tmp_path, range(1))


def test_an_unfinished_folder_is_usable_and_told(tmp_path, caplog):
    fill(tmp_path, range(2))
    assert_stored(tmp_path, range(2))
    assert "states of 2 of 7 samples" in caplog.text


def test_a_header_that_differs_is_refused_and_named(tmp_path):
    fill(tmp_path, range(2))
    other = dataclasses.replace(HEADER, taps=(2, 5, 8), dtype="float32", samples_sha256="c")
    with pytest.raises(StatesError) as caught:
        StatesWriter(tmp_path, other)
    text = str(caught.value)
    assert "made with another header (there, here)" in text
    assert "taps: (2, 5, 9), (2, 5, 8)" in text
    assert "dtype: 'bfloat16', 'float32'" in text
    assert "samples_sha256: 'b2', 'c'" in text
    assert "hidden_size" not in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taps": (5, 2)}, "taps are .5, 2., expected ascending"),
        ({"taps": (2, 2)}, "expected ascending"),
        ({"taps": (-1, 2)}, "expected ascending"),
        ({"dtype": "float16"}, "dtype is 'float16', expected one of bfloat16, float32"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_a_header_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HEADER, **fields)


def infinite(array):
    array = array.copy()
    array[1, 2] = np.inf
    return array


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda s, h, a: (s, h[1:], a), r"hidden is bfloat16 \[5, 6\], expected bfloat16 \[6, 6\]"),
        (lambda s, h, a: (s, h, a[:, 1:]), r"aux is bfloat16 \[6, 17\], .* \[6, 18\]"),
        (lambda s, h, a: (s, h.astype(np.float32), a), r"hidden is float32 \[6, 6\], expected bf"),
        (lambda s, h, a: (s, infinite(h), a), "hidden holds values that are not finite"),
        (lambda s, h, a: (s, h, infinite(a)), "aux holds values that are not finite"),
        (lambda s, h, a: (s.cut(0), h[:0], a[:0]), "no tokens"),
    ],
)
def test_states_that_are_not_the_headers_are_refused(tmp_path, alter, message):
    with StatesWriter(tmp_path, HEADER) as writer:
        with pytest.raises(ValueError, match=f"sample 'sample 0'.*{message}"):
            writer.add(*alter(*made(0)))
        writer.add(*made(0))
        with pytest.raises(ValueError, match="sample 'sample 0' is stored already"):
            writer.add(*made(0))
    assert_stored(tmp_path, range(1))


def test_everything_that_is_wrong_is_in_one_error(tmp_path):
    fill(tmp_path)
    os.truncate(shard(tmp_path, 0), 700)
    shard(tmp_path, 1).unlink()
    change(shard(tmp_path, 2), loss_mask=None, more=np.zeros(2))
    with pytest.raises(StatesError) as caught:
        open_stored(tmp_path, hidden_size=7, taps=(1, 2, 3), fingerprint="zz")
    problems = caught.value.problems
    assert isinstance(caught.value, CheckpointError)
    assert problems[:3] == (
        "hidden_size is 6, expected 7",
        "taps is (2, 5, 9), expected (1, 2, 3)",
        "fingerprint is 'a1', expected 'zz'",
    )
    assert problems[3] == "states-00001.safetensors: missing"
    assert problems[4].startswith("states-00000.safetensors: not readable (")
    assert problems[5:] == (
        "states-00002.safetensors: loss_mask: missing",
        "states-00002.safetensors: more: not a tensor of stored states",
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"input_ids": np.full(21, VOCAB, np.int32)}, "outside the vocabulary of 100: 100 to 100"),
        ({"input_ids": np.full(21, -1, np.int32)}, "outside the vocabulary of 100: -1 to -1"),
        ({"input_ids": np.zeros(21, np.int64)}, r"input_ids is I64 \[21\], expected I32 \[21\]"),
        ({"loss_mask": np.zeros(20, np.bool_)}, r"loss_mask is BOOL \[20\], expected BOOL \[21\]"),
        ({"lengths": np.array([6, 7, 7], np.int32)}, "lengths do not add up to its 21 tokens"),
        ({"lengths": np.array([0, 13, 8], np.int32)}, "lengths do not add up to its 21 tokens"),
        ({"lengths": np.array([6, 15], np.int32)}, "does not hold an id for each sample"),
        ({"lengths": np.array(3, np.int32)}, r"lengths is I32 \[\], expected"),
        (
            {"hidden_state": np.zeros((21, 5), ml_dtypes.bfloat16)},
            r"hidden_state is BF16 \[21, 5\], expected BF16 \[21, 6\]",
        ),
        (
            {"aux_hidden_state": np.zeros((21, 18), np.float32)},
            r"aux_hidden_state is F32 \[21, 18\], expected BF16 \[21, 18\]",
        ),
    ],
)
def test_a_shard_of_something_else_is_named(tmp_path, tensors, message):
    fill(tmp_path)
    change(shard(tmp_path), **tensors)
    with pytest.raises(StatesError, match=f"states-00000.safetensors: .*{message}"):
        open_stored(tmp_path)


def test_a_shard_that_is_there_twice_is_named(tmp_path):
    fill(tmp_path)
    shutil.copy(shard(tmp_path, 0), shard(tmp_path, 3))
    both = "states-00000.safetensors and states-00003.safetensors"
    with pytest.raises(StatesError, match=f"sample 'sample 0' is stored twice, in {both}"):
        open_stored(tmp_path)


def test_a_corrupted_shard_is_not_added_to(tmp_path):
    fill(tmp_path)
    os.truncate(shard(tmp_path, 2), 700)
    with pytest.raises(StatesError, match="states-00002.safetensors: not readable"):
        StatesWriter(tmp_path, HEADER)


def test_a_second_writer_is_noticed(tmp_path):
    first = StatesWriter(tmp_path, HEADER)
    first.add(*made(0))
    fill(tmp_path, [1])
    with pytest.raises(StatesError, match="states-00000.safetensors was written by another"):
        first.close()
    assert_stored(tmp_path, [1])


@pytest.mark.parametrize(
    ("change_header", "message"),
    [
        (lambda h: None, "states.json: No such file"),
        (lambda h: "{", "states.json: not JSON"),
        (lambda h: "[]", 'expected "format": "kimi_jax hidden states"'),
        (lambda h: h | {"version": 2}, "version 2 of the format, this reads 1"),
        (lambda h: h | {"taps": [2, "5"]}, r"taps is \[2, '5'\]"),
        (lambda h: h | {"taps": [5, 2]}, "expected ascending layer ids"),
        (lambda h: h | {"hidden_size": True}, "hidden_size is True"),
        (lambda h: h | {"more": 1}, "more: not a field of the header"),
        (lambda h: {k: v for k, v in h.items() if k != "dtype"}, "dtype: missing"),
        (lambda h: h | {"conventions": {"taps": "outputs"}}, "conventions are"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path, change_header, message):
    fill(tmp_path, range(1))
    path = tmp_path / "states.json"
    header = change_header(json.loads(path.read_text()))
    if header is None:
        path.unlink()
    else:
        path.write_text(header if isinstance(header, str) else json.dumps(header))
    with pytest.raises(StatesError, match=message):
        open_stored(tmp_path)
    # Nor does a writer add to it.
    with pytest.raises(StatesError):
        StatesWriter(tmp_path, HEADER)


def test_a_folder_without_states_is_refused(tmp_path):
    with pytest.raises(StatesError, match="states.json: No such file"):
        open_stored(tmp_path / "nowhere")
    fill(tmp_path, [])
    with pytest.raises(StatesError, match="no states in it"):
        open_stored(tmp_path)


def test_states_of_a_token_of_the_published_model_take_57344_bytes():
    assert states_bytes(1, 7168, 3, 2) == 57_344
    assert states_bytes(2048, 7168, 3, 2) == 112 * 2**20


def test_what_the_files_take_is_what_was_said(tmp_path):
    with StatesWriter(tmp_path, HEADER) as writer:
        for index in range(7):
            writer.add(*made(index))
    num_tokens = sum(len(made(index)[0].input_ids) for index in range(7))
    tensors = load_file(shard(tmp_path))
    stored = sum(tensors[name].nbytes for name in ("hidden_state", "aux_hidden_state"))
    assert stored == states_bytes(num_tokens, WIDTH, 3, 2)


def test_a_disk_too_small_is_said_before_starting(tmp_path):
    check_space(tmp_path / "not" / "yet", 1)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(StatesError, match=rf"the states take .*{free * 2} bytes.* GB are free"):
        check_space(tmp_path / "not" / "yet", free * 2)
