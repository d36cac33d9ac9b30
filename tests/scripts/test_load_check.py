"""scripts/load_check.py at the published layout, a sixteenth as wide: each fault of a download is
named, before a byte of weights is read; and what only reading everything can find."""

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import load_check
import make_random_checkpoint as maker
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint import table
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.reader import INDEX_NAME, CheckpointError, CheckpointFiles
from kimi_jax.checkpoint.table import check
from kimi_jax.checkpoint.verify import known_hashes
from kimi_jax.config import ModelConfig
from kimi_jax.published import K25
from kimi_jax.runtime.mesh import make_mesh
from kimi_jax.runtime.placement import abstract_model, bytes_per_device

PRESET = "kimi-k2.5-layer-16th"
EXPERTS = "language_model.model.layers.0.mlp.experts."
SCALE = f"{EXPERTS}7.up_proj.weight_scale"
BIAS = "language_model.model.layers.0.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def layer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layer") / "model"
    maker.make_random_checkpoint(folder, PRESET, shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.fixture
def copy(layer, tmp_path) -> Path:
    """A folder to be spoilt: its files are links, so replace them, never write into them."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in layer.iterdir():
        os.link(path, folder / path.name)
    return folder


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number - 1]


def own(path: Path) -> Path:
    """The file, no longer a link."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    return path


def edit_header(path: Path, change) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def edit_index(folder: Path, change) -> None:
    path = folder / INDEX_NAME
    data = json.loads(path.read_text())
    change(data["weight_map"])
    path.unlink()
    path.write_text(json.dumps(data))


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data["text_config"])
    path.unlink()
    path.write_text(json.dumps(data))


def patch(folder: Path, name: str, place: int, value: bytes) -> None:
    """Overwrites bytes of a tensor."""
    info = CheckpointFiles.open(folder).tensors[name]
    with own(folder / info.shard).open("r+b") as file:
        file.seek(info.offset + place)
        file.write(value)


def holder(folder: Path, name: str) -> Path:
    return folder / CheckpointFiles.open(folder).tensors[name].shard


def run(capsys, *args) -> tuple[int, dict, str]:
    status = load_check.main([str(arg) for arg in args])
    before, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return status, json.loads(last), before


# A right one.


def test_a_right_checkpoint(layer, script):
    last, text = script.json("load_check.py", layer, "--devices", 8)
    assert last["ok"] and last["problems"] == [] and last["download_again"] == []
    assert last["tensors"] == len(CheckpointFiles.open(layer).tensors)
    assert "nothing is wrong" in text
    assert last["placement"]["mesh"] == "tensor=8" and last["placement"]["devices"] == 8
    assert last["placement"]["cache_bytes_per_token"] == (32 + 4) * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"expert": 4, "tensor": 2}, None])
def test_it_loads_onto_8_devices_with_the_bytes_it_says(layer, capsys, sizes):
    plan = check(ModelConfig.from_folder(layer), CheckpointFiles.open(layer))
    mesh = make_mesh(sizes)
    wanted = abstract_model(plan.cfg, mesh, jnp.dtype("bfloat16")).wanted
    params = load_params(plan, wanted, progress=False)
    held = {device: 0 for device in mesh.devices.flat}
    for array in params.values():
        for part in array.addressable_shards:
            held[part.device] += part.data.nbytes
    assert set(held.values()) == {bytes_per_device(wanted)}
    mesh_text = ",".join(f"{k}={v}" for k, v in (sizes or {"tensor": 1}).items())
    status, last, _ = run(capsys, layer, "--mesh", mesh_text)
    assert status == 0 and set(held.values()) == {last["placement"]["bytes_per_device"]}
    made = dict(maker.random_tensors(plan.cfg))
    for part in ("gate_proj", "down_proj"):
        packed = np.asarray(params[f"layers.0.mlp.experts.{part}.packed"])
        scale = np.asarray(params[f"layers.0.mlp.experts.{part}.scale"])
        for e in (0, 200, 383):
            words = made[f"{EXPERTS}{e}.{part}.weight_packed"].make()
            assert np.array_equal(packed[e], words.view(np.uint8).T)
            assert np.array_equal(scale[e], made[f"{EXPERTS}{e}.{part}.weight_scale"].make().T)
    o_proj = made["language_model.model.layers.0.self_attn.o_proj.weight"].make()
    assert np.array_equal(
        np.asarray(params["layers.0.self_attn.o_proj"]).reshape(o_proj.T.shape), o_proj.T
    )


def test_mesh_that_does_not_divide(layer, capsys):
    status, last, _ = run(capsys, layer, "--devices", 7)
    assert status == 1 and "Meshes that work: " in last["problems"][0]
    for args in (["--devices", "0"], ["--devices", "8", "--mesh", "tensor=8"], ["--mesh", "x=2"]):
        with pytest.raises(SystemExit):
            load_check.main([str(layer), *args])
    status, last, _ = run(capsys, layer / "absent")
    assert status == 1 and not last["ok"] and "no such folder" in last["problems"][0]


# Faults of a download (CKP-1, -3, -4, -5): what is done, what is said, which files are named.


def drop_expert(folder: Path) -> None:
    """The last tensor of the last shard, and its data."""
    path = shard(folder, 3)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
    begin, _ = header.pop(name)["data_offsets"]
    text = json.dumps(header).encode()
    path.unlink()
    data = len(text).to_bytes(8, "little") + text + data[8 + size : 8 + size + begin]
    path.write_bytes(data)
    edit_index(folder, lambda weights: weights.pop(name))


def truncate(folder: Path, size: int) -> None:
    os.truncate(own(shard(folder, 2)), size)


def twice(folder: Path) -> None:
    shutil.copy(shard(folder, 1), folder / "other.safetensors")
    edit_index(folder, lambda weights: weights.update({"extra": "other.safetensors"}))


def dtype_of(name: str, spelling: str, *, factor: float = 1.0):
    def change(folder: Path) -> None:
        def edit(header):
            header[name]["dtype"] = spelling
            if factor != 1:
                header[name]["shape"][-1] = int(header[name]["shape"][-1] * factor)

        edit_header(holder(folder, name), edit)

    return change


def shape_of(name: str):
    def edit(header):
        header[name]["shape"].reverse()

    return lambda folder: edit_header(holder(folder, name), edit)


def renamed(folder: Path) -> None:
    def edit(header):
        header[SCALE + "_x"] = header.pop(SCALE)

    edit_header(holder(folder, SCALE), edit)
    edit_index(folder, lambda weights: weights.update({SCALE + "_x": weights.pop(SCALE)}))


def moved(folder: Path) -> None:
    place = CheckpointFiles.open(folder).tensors[SCALE].shard
    other = next(path.name for path in folder.glob("*.safetensors") if path.name != place)
    edit_index(folder, lambda weights: weights.update({SCALE: other}))


def dangling(folder: Path) -> None:
    shard(folder, 2).rename(folder / "away")
    (folder / "model-00002-of-00003.safetensors").symlink_to("../blobs/gone")
    (folder / "away").unlink()


SECOND = "model-00002-of-00003.safetensors"
FAULTS = {
    "CKP-1 shard gone": (lambda f: shard(f, 2).unlink(), [SECOND, "missing"], [SECOND]),
    "CKP-1 index gone": (lambda f: (f / INDEX_NAME).unlink(), [f"no {INDEX_NAME}"], [INDEX_NAME]),
    "CKP-1 index and shard gone": (
        lambda f: ((f / INDEX_NAME).unlink(), shard(f, 2).unlink()),
        ["missing by the numbers"],
        [INDEX_NAME, SECOND],
    ),
    "CKP-1 index is no JSON": (
        lambda f: own(f / INDEX_NAME).write_text("{"),
        ["not readable as JSON"],
        [INDEX_NAME],
    ),
    "CKP-1 cut short": (lambda f: truncate(f, 5_000_000), ["truncated: 5000000"], [SECOND]),
    "CKP-1 cut inside the header": (lambda f: truncate(f, 100), ["truncated: a header"], [SECOND]),
    "CKP-1 empty": (lambda f: truncate(f, 0), ["truncated: 0 bytes"], [SECOND]),
    "CKP-1 bytes too many": (
        lambda f: truncate(f, shard(f, 2).stat().st_size + 8),
        ["8 bytes after the last tensor"],
        [SECOND],
    ),
    "CKP-1 an error page": (
        lambda f: own(shard(f, 2)).write_text("<html>not found</html>" * 9),
        ["not a safetensors file"],
        [SECOND],
    ),
    "CKP-3 in the wrong shard": (moved, [f"{SCALE} is in ", "the index says"], []),
    "CKP-3 one tensor less": (drop_expert, ["missing: language_model."], []),
    "CKP-3 one more layer": (
        lambda f: edit_config(f, lambda c: c.update(num_hidden_layers=2)),
        ["missing: language_model.model.layers.1.", "more ("],
        [],
    ),
    "CKP-3 unknown tensor": (renamed, [f"missing: {SCALE}", f"model: {SCALE}_x"], []),
    "CKP-3 twice": (twice, ["is in two shards"], []),
    "CKP-3 wrong shape": (shape_of(SCALE), [f"shape: {SCALE} [14, 256], expected [256, 14]"], []),
    "CKP-4 unknown dtype": (
        dtype_of(SCALE, "F4"),
        [f"{SCALE}: unknown dtype 'F4'"],
        ["the shard of it"],
    ),
    "CKP-4 integers for scales": (
        dtype_of(SCALE, "I16"),
        [f"{SCALE} is I16, supported: BF16 or F16 or F32"],
        [],
    ),
    "CKP-4 a bias of integers": (dtype_of(BIAS, "I32"), [f"{BIAS} is I32, supported"], []),
    "CKP-5 dangling link": (dangling, ["a dangling link to ../blobs/gone"], [SECOND]),
    "no configuration": (lambda f: (f / "config.json").unlink(), ["missing"], ["config.json"]),
    "no tokenizer": (lambda f: (f / "tiktoken.model").unlink(), ["missing"], ["tiktoken.model"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_the_files_to_get_again(copy, capsys, fault):
    spoil, said, again = FAULTS[fault]
    again = [holder(copy, SCALE).name if name == "the shard of it" else name for name in again]
    spoil(copy)
    status, last, text = run(capsys, copy)
    assert status == 1 and not last["ok"]
    told = "\n".join(last["problems"])
    for part in said:
        assert part in told
    assert last["download_again"] == sorted(again)
    assert all(problem in text for problem in last["problems"])
    assert not again or "hf download" in text
    # What was told is not told again as thousands of missing tensors.
    if again and again != [INDEX_NAME, SECOND]:
        assert "missing: language_model" not in told
    # Loading stops at the same faults.
    if not fault.startswith("no "):
        with pytest.raises(CheckpointError):
            check(ModelConfig.from_folder(copy), CheckpointFiles.open(copy))


def test_all_faults_come_at_once(copy, capsys):
    name = f"{EXPERTS}0.up_proj.weight_scale"
    shape_of(name)(copy)
    (copy / "tiktoken.model").unlink()
    third = shard(copy, 3)
    os.truncate(own(third), 1000)
    _, last, _ = run(capsys, copy)
    told = "\n".join(last["problems"])
    assert "truncated" in told and f"shape: {name}" in told and "tiktoken.model" in told
    assert last["download_again"] == [third.name, "tiktoken.model"]


def test_ckp_4_wide_floats_are_exact(layer, tmp_path, capsys):
    """F32 and F16 where BF16 is usual, and a bias that lost its precision."""
    wide = tmp_path / "wide"
    maker.make_random_checkpoint(wide, PRESET, dtype="float32", n_routed_experts=8)
    assert run(capsys, wide)[0] == 0
    plan = check(ModelConfig.from_folder(wide), CheckpointFiles.open(wide))
    wanted = abstract_model(plan.cfg, make_mesh({"tensor": 8}), jnp.dtype("float32")).wanted
    params = load_params(plan, wanted, progress=False)
    name = "language_model.model.layers.0.self_attn.q_a_proj.weight"
    made = dict(maker.random_tensors(plan.cfg, dtype="float32"))[name].make()
    assert np.array_equal(np.asarray(params["layers.0.self_attn.q_a_proj"]), made.T)
    bias = params["layers.0.mlp.e_score_correction_bias"]
    assert bias.dtype == jnp.float32
    assert np.array_equal(np.asarray(bias), plan.files.read(BIAS))


# Every byte.


def test_verify_names_what_is_no_number(copy, capsys):
    bf16 = ml_dtypes.bfloat16
    patch(copy, SCALE, 40, np.array([np.nan, np.inf], bf16).tobytes())
    patch(copy, f"{EXPERTS}9.down_proj.weight_scale", 0, np.array([-np.inf], bf16).tobytes())
    norm = "language_model.model.norm.weight"
    patch(copy, norm, 2, np.array([np.nan], bf16).tobytes())
    patch(copy, BIAS, 4, np.array([np.nan], np.float32).tobytes())
    shape = f"{EXPERTS}3.gate_proj.weight_shape"
    patch(copy, shape, 0, np.array([1], np.int32).tobytes())
    assert run(capsys, copy)[0] == 0
    status, last, _ = run(capsys, copy, "--verify")
    assert status == 1
    told = "\n".join(last["problems"])
    assert re.search(re.escape(SCALE) + r" \(.*\): 1 NaN and 1 infinite values", told)
    assert re.search(r"9\.down_proj\.weight_scale \(.*\): 1 infinite values", told)
    assert re.search(re.escape(norm) + r" \(.*\): 1 NaN values", told)
    assert re.search(re.escape(BIAS) + r" \(.*\): 1 NaN values", told)
    assert f"{shape} says [1, 448]" in told
    assert len(last["problems"]) == 5 and last["download_again"] == []


def write_metadata(folder: Path) -> None:
    """What `hf download --local-dir` leaves."""
    where = folder / ".cache" / "huggingface" / "download"
    where.mkdir(parents=True)
    for path in folder.iterdir():
        if not path.is_file():
            continue
        data = path.read_bytes()
        etag = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        if path.suffix == ".safetensors":
            etag = hashlib.sha256(data).hexdigest()
        (where / f"{path.name}.metadata").write_text(f"{'a' * 40}\n{etag}\n1.0\n")


def test_verify_compares_with_the_hubs_hashes(copy, capsys, monkeypatch):
    monkeypatch.setattr("kimi_jax.checkpoint.verify._CHUNK", 1 << 16)
    write_metadata(copy)
    (copy / ".cache/huggingface/download/x.incomplete").touch()
    status, last, text = run(capsys, copy, "--verify")
    assert status == 0, last["problems"]
    assert last["verified"]["shards_without_hash"] == 0
    assert len(last["verified"]["hashed"]) == len([p for p in copy.iterdir() if p.is_file()])
    assert last["verified"]["bytes"] == sum(
        p.stat().st_size for p in copy.glob("*.*") if p.is_file()
    )
    assert "1 unfinished download(s), such as x.incomplete" in text
    words = f"{EXPERTS}0.up_proj.weight_packed"
    patch(copy, words, 11, b"\x5a\xa5\x5a")
    own(copy / "tokenizer_config.json").write_text("{}")
    spoilt = holder(copy, words).name
    status, last, text = run(capsys, copy, "--verify")
    assert status == 1 and last["download_again"] == sorted([spoilt, "tokenizer_config.json"])
    assert f"{spoilt}: its bytes are not those of the hub: sha256" in text
    assert "tokenizer_config.json: its bytes are not those of the hub: git hash" in text


def test_verify_knows_the_blobs_of_the_cache(layer, tmp_path, capsys):
    repo = tmp_path / "models--owner--kimi"
    snapshot = repo / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in layer.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        os.link(path, repo / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    assert known_hashes(snapshot).keys() == {path.name for path in layer.iterdir()}
    assert run(capsys, snapshot, "--verify")[0] == 0
    blob = shard(snapshot, 1).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.unlink()
    blob.write_bytes(data)
    status, last, text = run(capsys, snapshot, "--verify")
    assert status == 1 and last["download_again"] == [shard(snapshot, 1).name]
    assert "hf download owner/kimi --force-download model-00001-of-00003" in text


# The published size, as headers of sparse files, two layers of it.


def test_published_shapes_as_sparse_files(tmp_path, capsys):
    config = K25 | {"text_config": K25["text_config"] | {"num_hidden_layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    cfg = ModelConfig.from_folder(tmp_path)
    spellings = {"float": "BF16", "float32": "F32", "words": "I32", "shape": "I32"}
    header, at = {}, 0
    for name, tensor in table.expected(cfg, is_int4=True).items():
        spelling = spellings[tensor.kind]
        end = at + math.prod(tensor.shape) * (2 if spelling == "BF16" else 4)
        header[f"language_model.{name}"] = {
            "dtype": spelling,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    status, last, _ = run(capsys, tmp_path)
    assert status == 0, last["problems"]
    assert last["tensors"] == len(header) and last["bytes"] == at > 15e9
    assert last["notes"] == ["generation_config.json: not there", "chat_template.jinja: not there"]
    per_device = last["placement"]["bytes_per_device"]
    assert at / 8 < per_device < at / 8 * 1.05
    assert jax.devices()[0].platform == "cpu"
