"""Converted checkpoints: restored onto any mesh bit for bit, resumed after any failure to the same
bytes, and refused by name when anything is missing, damaged or of another kind."""

import argparse
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import convert_checkpoint
import jax
import jax.numpy as jnp
import make_random_checkpoint as maker
import numpy as np
import pytest
import tensorstore as ts

from kernels_pallas.grouped_matmul.layout import pack_words, words_to_kernel
from kimi_jax.checkpoint import convert, converted, load, table
from kimi_jax.checkpoint.converted import (
    PIECES,
    RECORD_NAME,
    Converted,
    group,
    holds,
    read_record,
    verify_files,
)
from kimi_jax.checkpoint.fingerprint import checkpoint_fingerprint
from kimi_jax.checkpoint.load import load_params, open_checkpoint
from kimi_jax.checkpoint.reader import CheckpointError
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.mesh import make_mesh, parse_mesh
from kimi_jax.runtime.placement import abstract_model, kept_dtypes

EXPERTS = "layers.1.mlp.experts.gate_proj"


def run(source: Path, out: Path, **options) -> dict:
    """The script's job, in this process."""
    given = {"mesh": "tensor=8", "dtype": None, "quiet": True} | options
    return convert_checkpoint.run(argparse.Namespace(source=str(source), out=out, **given))


def opened(folder: Path):
    return open_checkpoint(ModelConfig.from_folder(folder), folder)


def wanted_of(plan, mesh: str, dtype: str = "bfloat16") -> dict[str, jax.ShapeDtypeStruct]:
    kept = kept_dtypes(plan, jnp.dtype(dtype), platform="cpu")
    return abstract_model(
        plan.cfg, make_mesh(parse_mesh(mesh)), jnp.dtype(dtype), dtypes=kept
    ).wanted


def assert_same(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    assert list(found) == list(expected)
    for path, value in expected.items():
        assert found[path].dtype == value.dtype and found[path].sharding == value.sharding, path
        assert np.asarray(found[path]).tobytes() == np.asarray(value).tobytes(), path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "tiny"
    maker.make_random_checkpoint(folder, "tiny", num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """A conversion nothing happened to; not to be touched."""
    out = tmp_path_factory.mktemp("converted") / "whole"
    run(source, out)
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """One to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


# Restoring.


def bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


@pytest.mark.parametrize("mesh", ["tensor=1", "tensor=2", "tensor=4", "tensor=8"])
def test_each_device_reads_its_own_share_alone_and_gets_the_same_bits(source, whole, mesh):
    plan, published = opened(whole), opened(source)
    expected = load_params(published, wanted_of(published, mesh), progress=False)
    before = bytes_read()
    assert_same(load_params(plan, wanted_of(plan, mesh), progress=False), expected)
    stored = sum(own.num_bytes for own in plan.stored.values())
    # Every device reads at least its share, and what all read together is each array once.
    metadata = sum(
        size
        for piece in plan.pieces.values()
        for name, (size, _) in piece.files.items()
        if name.rpartition("/")[2].startswith((".z", "_"))
    )
    assert stored <= bytes_read() - before <= stored + metadata


@pytest.mark.parametrize("mesh", ["expert=8", "expert=4,tensor=2"])
def test_another_kind_of_mesh_reads_more_and_is_told(source, whole, caplog, mesh):
    plan, published = opened(whole), opened(source)
    expected = load_params(published, wanted_of(published, mesh), progress=False)
    before = bytes_read()
    assert_same(load_params(plan, wanted_of(plan, mesh), progress=False), expected)
    stored = sum(own.num_bytes for own in plan.stored.values())
    assert bytes_read() - before > stored
    assert "is cut as expert=1,tensor=8: on this mesh up to" in caplog.text


def test_a_conversion_for_both_axes_serves_both(source, tmp_path, caplog):
    out = tmp_path / "out"
    run(source, out, mesh="expert=2,tensor=4")
    plan, published = opened(out), opened(source)
    for mesh in ("expert=2,tensor=4", "expert=2,tensor=2", "tensor=4", "tensor=1"):
        expected = load_params(published, wanted_of(published, mesh), progress=False)
        assert_same(load_params(plan, wanted_of(plan, mesh), progress=False), expected)
    assert "are read for" not in caplog.text


def test_bfloat16_widens_exactly_and_float32_is_not_rounded(source, whole, tmp_path):
    plan, published = opened(whole), opened(source)
    expected = load_params(published, wanted_of(published, "tensor=2", "float32"), progress=False)
    assert_same(load_params(plan, wanted_of(plan, "tensor=2", "float32"), progress=False), expected)
    run(source, tmp_path / "wide", dtype="float32")
    wide = opened(tmp_path / "wide")
    # The embedding stays as narrow as it is in the files.
    assert wide.stored["embed_tokens"].dtype == "bfloat16"
    assert_same(load_params(wide, wanted_of(wide, "tensor=2", "float32"), progress=False), expected)
    with pytest.raises(ValueError, match="is stored in float32, and bfloat16 would round") as error:
        load_params(wide, wanted_of(wide, "tensor=2"), progress=False)
    assert "ask for dtype 'float32', or convert" in str(error.value)


def test_the_default_dtype_keeps_every_value(tmp_path, caplog):
    published = tmp_path / "published"
    maker.make_random_checkpoint(published, "tiny", num_hidden_layers=1, dtype="float32")
    assert run(published, tmp_path / "kept")["dtype"] == "float32"
    assert not caplog.records
    rounded = run(published, tmp_path / "rounded", dtype="bfloat16")["rounded"]
    assert rounded == len(
        [row for row in opened(published).parameters.values() if row.kind == "float"]
    )
    assert "bfloat16 rounds embed_tokens" in caplog.text
    plan, half = opened(published), opened(tmp_path / "rounded")
    wanted = wanted_of(half, "tensor=1")
    # To nearest even, as loading does.
    assert_same(
        load_params(half, wanted, progress=False), load_params(plan, wanted, progress=False)
    )


@pytest.mark.parametrize(
    "wanted, stored, expected",
    [
        ("float32", "bfloat16", True),
        ("float32", "float16", True),
        ("bfloat16", "float32", False),
        # Three bits more of mantissa, and eight of exponent.
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("uint8", "uint8", True),
        ("float32", "uint8", False),
    ],
)
def test_which_dtype_holds_which(wanted, stored, expected):
    assert holds(jnp.dtype(wanted), jnp.dtype(stored)) is expected


def test_experts_that_are_not_int4(tmp_path):
    published = tmp_path / "published"
    maker.make_random_checkpoint(published, "tiny", num_hidden_layers=2, experts="bfloat16")
    run(published, tmp_path / "out")
    plan = opened(tmp_path / "out")
    assert plan.cfg.quantization is None
    expected = load_params(opened(published), wanted_of(plan, "tensor=8"), progress=False)
    assert_same(load_params(plan, wanted_of(plan, "tensor=8"), progress=False), expected)


def test_pieces_are_a_projection_of_the_experts_or_the_rest_of_a_layer(source):
    pieces = group(opened(source).parameters)
    assert list(pieces) == [
        "embed_tokens",
        "norm",
        "layers.0",
        "layers.1",
        *(f"layers.1.mlp.experts.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    ]
    assert pieces[EXPERTS] == [f"{EXPERTS}.packed", f"{EXPERTS}.scale"]


def test_the_folder_has_what_the_published_one_has_and_its_fingerprint(source, whole):
    small = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    small -= {"model.safetensors.index.json"}
    assert {path.name for path in whole.iterdir()} == {*small, RECORD_NAME, PIECES}
    for name in small:
        assert (whole / name).read_bytes() == (source / name).read_bytes()
    assert checkpoint_fingerprint(whole) == checkpoint_fingerprint(source)


# The layout's version.


def test_a_change_of_the_layout_raises_its_version():
    """What a stored array holds, in short: a change of this digest is a new LAYOUT_VERSION."""
    rows = [table._TOP, table._HEAD, table._LAYER, table._MLP, table._ROUTER]
    rows += [table._EXPERTS, table._EXPERTS_INT4]
    words = pack_words(np.resize(np.arange(-8, 8, dtype=np.int8), (3, 64)))
    digest = hashlib.sha256(repr(rows).encode())
    digest.update(np.ascontiguousarray(words_to_kernel(words)).tobytes())
    assert (table.LAYOUT_VERSION, digest.hexdigest()[:16]) == (1, "59b3a501fd33a875")


def edit(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def test_another_layout_is_refused_with_who_wrote_it(copy, source):
    edit(copy / RECORD_NAME, layout_version=2, written_by={"kimi_jax": "9.1", "orbax": "1.0"})
    with pytest.raises(CheckpointError, match=r"holds layout 2 \(written by kimi_jax 9.1") as error:
        opened(copy)
    assert "reads layout 1: convert the published checkpoint again" in str(error.value)
    with pytest.raises(CheckpointError, match="holds layout 2"):
        run(source, copy)


# What is missing or spoilt.


def first_file(folder: Path, piece: str = EXPERTS) -> Path:
    return folder / PIECES / piece / f"{piece}.packed" / "0.0.0"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


SPOILT: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a piece is missing": (
        lambda f: shutil.rmtree(f / PIECES / EXPERTS),
        [f"{PIECES}/{EXPERTS}: missing; write what is missing with scripts/convert_checkpoint.py"],
    ),
    "a piece and its record are missing": (
        lambda f: (shutil.rmtree(f / PIECES / EXPERTS), (f / PIECES / f"{EXPERTS}.json").unlink()),
        [f"missing: {EXPERTS}.packed, {EXPERTS}.scale"],
    ),
    "a file is missing": (
        lambda f: first_file(f).unlink(),
        [f"{PIECES}/{EXPERTS}/{EXPERTS}.packed/0.0.0: missing"],
    ),
    "a file is cut short": (
        lambda f: os.truncate(first_file(f), 10),
        [f"{EXPERTS}.packed/0.0.0: 10 bytes of 8192"],
    ),
    "a piece's record is no JSON": (
        lambda f: (f / PIECES / "norm.json").write_text("{"),
        [f"{PIECES}/norm.json: not readable as JSON"],
    ),
    "a piece's record is another's": (
        lambda f: edit(f / PIECES / "norm.json", more=1),
        ["norm.json: not a record of this layout: more"],
    ),
    "the record is no JSON": (
        lambda f: (f / RECORD_NAME).write_text("nothing"),
        [f"{RECORD_NAME}: not readable as JSON"],
    ),
    "the record is a list": (
        lambda f: (f / RECORD_NAME).write_text("[]"),
        ["a JSON list, not an object"],
    ),
    "the record lacks a field": (
        lambda f: (f / RECORD_NAME).write_text('{"layout_version": 1}'),
        ["not a record of this layout"],
    ),
    "the record's source is none": (
        lambda f: edit(f / RECORD_NAME, source=None),
        [f"{RECORD_NAME}: not a record of this layout: source"],
    ),
    "the record's source lacks its folder": (
        lambda f: edit(f / RECORD_NAME, source={"weights_sha256": "1", "hashes": {}}),
        [f"{RECORD_NAME}: not a record of this layout: source.folder"],
    ),
    "the record's mesh is a text": (
        lambda f: edit(f / RECORD_NAME, mesh="tensor=8"),
        [f"{RECORD_NAME}: not a record of this layout: mesh"],
    ),
    "the conversion was not finished": (
        lambda f: (edit(f / RECORD_NAME, is_complete=False), (f / PIECES / "norm.json").unlink()),
        ["its conversion stopped at 7 of 8 pieces; go on with scripts/convert_checkpoint.py"],
    ),
    "more layers": (
        lambda f: edit_text_config(f, num_hidden_layers=3),
        ["missing: layers.2."],
    ),
    "fewer layers": (
        lambda f: edit_text_config(f, num_hidden_layers=1),
        ["not part of the model of config.json: layers.1."],
    ),
    "another width": (
        lambda f: edit_text_config(f, q_lora_rank=32),
        ["shape: layers.0.self_attn.q_a_proj [64, 64], expected [64, 32]"],
    ),
    "no quantization": (
        lambda f: edit_text_config(f, quantization_config=None),
        ["INT4 experts, but config.json has no quantization_config"],
    ),
}


def edit_text_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["text_config"] |= changes
    if "quantization_config" in changes:
        data.pop("quantization_config", None)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("fault", SPOILT)
def test_what_is_wrong_is_named_before_anything_is_read(copy, fault, monkeypatch):
    spoil, said = SPOILT[fault]
    spoil(copy)
    monkeypatch.setattr(converted, "read_arrays", None)
    with pytest.raises(CheckpointError) as error:
        opened(copy)
    for part in said:
        assert part in str(error.value)


def test_everything_wrong_comes_at_once(copy):
    first_file(copy).unlink()
    os.truncate(copy / PIECES / "norm" / "norm" / "0", 3)
    (copy / PIECES / "lm_head.json").write_text("")
    with pytest.raises(CheckpointError) as error:
        opened(copy)
    for part in ("0.0.0: missing", "norm/norm/0: 3 bytes of 128", "lm_head.json: not readable"):
        assert part in str(error.value)


def test_flipped_bits_are_found_and_written_again(source, whole, copy):
    flip(first_file(copy))
    flip(copy / PIECES / "norm" / "norm" / "0")
    plan = opened(copy)
    found = verify_files(plan, progress=False)
    with pytest.raises(CheckpointError) as error:
        load_params(plan, wanted_of(plan, "tensor=8"), progress=False)
    assert list(error.value.problems) == found
    assert found == [
        f"{PIECES}/norm/norm/0: its bytes are not those written",
        f"{PIECES}/{EXPERTS}/{EXPERTS}.packed/0.0.0: its bytes are not those written",
        f"remove {PIECES}/norm, {PIECES}/{EXPERTS} and run scripts/convert_checkpoint.py {source} "
        f"{copy} again: it writes what is missing",
    ]
    shutil.rmtree(copy / PIECES / "norm")
    shutil.rmtree(copy / PIECES / EXPERTS)
    assert run(source, copy)["pieces_written"] == 2
    assert_bit_equal(copy, whole)
    assert verify_files(opened(copy), progress=False) == []


def test_a_piece_orbax_cannot_read_is_named(copy, monkeypatch):
    def fail(folder, wanted):
        raise RuntimeError("DATA_LOSS\nwith pages of details")

    plan = opened(copy)
    monkeypatch.setattr(converted, "read_arrays", fail)
    with pytest.raises(CheckpointError, match=f"{PIECES}/norm: cannot be read .*DATA_LOSS"):
        load_params(plan, wanted_of(plan, "tensor=1"), progress=False)


# Going on after a failure.


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those in which orbax writes times and the folder's own name."""
    out = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or path.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            continue
        out[name] = path.read_bytes()
        if path.parent.name == PIECES:
            record = json.loads(out[name])
            own = {k: v for k, v in record["files"].items() if not k.startswith(("_C", "commit"))}
            out[name] = json.dumps(record | {"files": own}).encode()
    return out


def assert_bit_equal(found: Path, expected: Path) -> None:
    ours, theirs = contents(found), contents(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


class Killed(BaseException):
    """What a kill looks like from inside: nothing may catch it."""


MOMENTS = ("before", "inside", "after", "at the record")
BY_DEFAULT = ((0, "before"), (4, "inside"), (7, "after"), (3, "at the record"))


@pytest.mark.parametrize(
    "number, moment",
    [
        case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(range(8), MOMENTS)
    ],
)
def test_stopped_at_any_piece_it_goes_on_to_the_same_bytes(
    source, whole, tmp_path, monkeypatch, number, moment
):
    out, calls = tmp_path / "out", []
    real_write, real_json = convert.write_arrays, convert.write_json

    def write(folder, arrays):
        calls.append(folder.name)
        is_last = len(calls) == number + 1
        if is_last and moment == "before":
            raise Killed
        if is_last and moment == "inside":
            # What orbax leaves: a folder under a temporary name, half written.
            partial = folder.with_name(f"{folder.name}.orbax-checkpoint-tmp") / "norm"
            partial.mkdir(parents=True)
            (partial / "0").write_bytes(b"half")
            raise Killed
        real_write(folder, arrays)
        if is_last and moment == "after":
            raise Killed

    def write_json(path, value):
        if moment == "at the record" and len(calls) == number + 1 and path.name != RECORD_NAME:
            path.with_name(f"{path.name}.partial").write_text("{")
            raise Killed
        real_json(path, value)

    monkeypatch.setattr(convert, "write_arrays", write)
    monkeypatch.setattr(convert, "write_json", write_json)
    with pytest.raises(Killed):
        run(source, out)
    with pytest.raises(CheckpointError, match=f"stopped at {number} of 8 pieces"):
        opened(out)
    monkeypatch.undo()
    assert run(source, out)["pieces_written"] == 8 - number
    assert_bit_equal(out, whole)


def test_stopped_before_the_first_record_or_before_the_last(source, whole, tmp_path, monkeypatch):
    out, real = tmp_path / "out", convert.write_json
    for number in range(2):
        records = []

        def write_json(path, value, records=records, number=number):
            records += [path.name] * (path.name == RECORD_NAME)
            if len(records) == number + 1:
                path.with_name(f"{path.name}.partial").write_text("{")
                raise Killed
            real(path, value)

        monkeypatch.setattr(convert, "write_json", write_json)
        with pytest.raises(Killed):
            run(source, out)
        monkeypatch.undo()
    assert not read_record(out).is_complete
    assert run(source, out)["pieces_written"] == 0
    assert_bit_equal(out, whole)
    # Once more, and nothing is left to do.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(source, out)["pieces_written"] == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_two_pieces_at_most_are_held(source, tmp_path, monkeypatch):
    loaded, written, most = [], [], []
    real_load, real_write = convert.load_params, convert.write_arrays

    def load_piece(plan, wanted, progress):
        loaded.append(plan)
        most.append(len(loaded) - len(written))
        return real_load(plan, wanted, progress=progress)

    def write(folder, arrays):
        real_write(folder, arrays)
        written.append(folder)

    monkeypatch.setattr(convert, "load_params", load_piece)
    monkeypatch.setattr(convert, "write_arrays", write)
    run(source, tmp_path / "out")
    assert len(loaded) == 8 and max(most) <= 2


# What a conversion refuses.


def refused(source: Path, out: Path, *said: str, **options) -> None:
    before = contents(out) if out.is_dir() else None
    with pytest.raises(ValueError) as error:
        run(source, out, **options)
    for part in said:
        assert part in str(error.value)
    assert (contents(out) if out.is_dir() else None) == before


def test_folders_of_something_else(source, whole, copy, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("all of it")
    refused(source, other, "holds something else (thesis.tex)")
    refused(source, other / "thesis.tex", "is a file")
    refused(source, source, "is the source")
    refused(source, Path(f"{source}/../{source.name}"), "is the source")
    refused(whole, tmp_path / "out", "is a converted checkpoint; give the published one")
    refused(whole, whole, "is a converted checkpoint")
    refused(
        source,
        copy,
        "with other options (there, here): dtype: 'bfloat16', 'float32'",
        "mesh.tensor: 8, 4",
        dtype="float32",
        mesh="tensor=4",
    )
    refused(source, tmp_path / "out", "mesh 'tensor=x'", mesh="tensor=x")
    refused(source, tmp_path / "out", "does not divide this model", mesh="tensor=3")


def test_a_full_disk_is_told_before_the_first_byte(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000_000))
    refused(source, tmp_path / "deep" / "out", "the disk is too small: this takes 0.1 GB (50")
    assert not (tmp_path / "deep").exists()


def test_everything_that_is_refused_comes_at_once(copy, tmp_path, monkeypatch):
    published = tmp_path / "another"
    maker.make_random_checkpoint(published, "tiny", num_hidden_layers=2, seed=9)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    first_file(copy).unlink()
    refused(
        published,
        copy,
        "from another source (there, here): weights_sha256",
        "with other options (there, here): mesh.tensor: 8, 4",
        "too small",
        mesh="tensor=4",
    )


def test_a_disk_that_fills_up_meanwhile(source, whole, tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []
    real = convert.write_arrays

    def write(folder, arrays):
        calls.append(folder)
        if len(calls) == 4:
            raise ValueError("RESOURCE_EXHAUSTED: Error writing file: No space left on device")
        real(folder, arrays)

    monkeypatch.setattr(convert, "write_arrays", write)
    with pytest.raises(
        CheckpointError, match="not written .*No space left on device.* GB are free"
    ):
        run(source, out)
    monkeypatch.undo()
    assert run(source, out)["pieces_written"] == 5
    assert_bit_equal(out, whole)


def test_a_source_that_changes(source, tmp_path, monkeypatch):
    published = Path(shutil.copytree(source, tmp_path / "published"))
    out, real = tmp_path / "out", convert.write_arrays
    (weights,) = published.glob("*.safetensors")

    def change(folder, arrays):
        real(folder, arrays)
        if folder.name == "lm_head":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)

    monkeypatch.setattr(convert, "write_arrays", change)
    with pytest.raises(CheckpointError, match="changed meanwhile .weights_sha256.* remove"):
        run(published, out)
    monkeypatch.undo()
    refused(published, out, "was begun from another source (there, here): weights_sha256")
    edit(published / "config.json", architectures=["another"])
    refused(published, out, "config_sha256", "weights_sha256")


def test_the_hub_s_hashes_tell_sources_apart(source, tmp_path, monkeypatch):
    """Of two copies that differ in the middle of a shard only they, or reading it all, can."""
    monkeypatch.setattr(convert, "known_hashes", lambda folder: {"model.safetensors": "1" * 64})
    out = tmp_path / "out"
    run(source, out)
    assert read_record(out).source["hashes"] == {"model.safetensors": "1" * 64}
    monkeypatch.setattr(convert, "known_hashes", lambda folder: {"model.safetensors": "2" * 64})
    refused(source, out, "was begun from another source", "model.safetensors: '111")
    # A copy without hashes is not another one.
    monkeypatch.setattr(convert, "known_hashes", lambda folder: {})
    assert run(source, out)["pieces_written"] == 0


def test_a_page_of_the_hub_that_is_written_anew_is_not_another_model(source, tmp_path, monkeypatch):
    weights, out = {"model.safetensors": "1" * 64}, tmp_path / "out"
    monkeypatch.setattr(convert, "known_hashes", lambda _: weights | {"README.md": "3" * 40})
    run(source, out)
    monkeypatch.setattr(convert, "known_hashes", lambda _: weights | {"README.md": "4" * 40})
    assert run(source, out)["pieces_written"] == 0


def test_one_process_at_a_time(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with convert._alone(out):
        refused(source, out, "another process is converting into it")


def test_pieces_another_process_wrote_meanwhile_stay(source, whole, tmp_path, monkeypatch):
    out, written = tmp_path / "out", []
    real = convert_checkpoint.prepare

    def prepare_slowly(*args, **options):
        job = real(*args, **options)
        monkeypatch.undo()
        run(source, out, **others)
        monkeypatch.setattr(convert, "write_arrays", lambda where, arrays: written.append(where))
        return job

    others: dict[str, str] = {}
    monkeypatch.setattr(convert_checkpoint, "prepare", prepare_slowly)
    run(source, out)
    assert written == []
    assert_bit_equal(out, whole)
    # One of other options is refused as if it had been there before.
    shutil.rmtree(out)
    others = {"mesh": "tensor=4"}
    monkeypatch.setattr(convert_checkpoint, "prepare", prepare_slowly)
    with pytest.raises(CheckpointError, match="was begun with other options .*mesh.tensor: 4, 8"):
        run(source, out)
    assert run(source, out, **others)["pieces_written"] == 0


def test_a_wanted_set_that_is_not_the_model_s(whole):
    plan = opened(whole)
    assert isinstance(plan, Converted)
    wanted = wanted_of(plan, "tensor=1")
    del wanted["norm"]
    with pytest.raises(ValueError, match="the model has no norm"):
        load.load_params(plan, wanted)
