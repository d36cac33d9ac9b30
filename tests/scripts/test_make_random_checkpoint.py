"""scripts/make_random_checkpoint.py: what it writes, what it refuses, and that names decide."""

import json

import make_random_checkpoint as maker
import numpy as np
import pytest

from kimi_jax.checkpoint.reader import CheckpointFiles
from kimi_jax.checkpoint.table import check
from kimi_jax.config import ModelConfig
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import Tokenizer

# What the docstring says of each preset, in bytes.
SIZES = {"tiny": 1.2e6, "mini": 0.88e9, "kimi-k2.5-layer": 9.9e9, "kimi-k2.5-layer-16th": 76e6}


def test_command_line(script, tmp_path):
    out = tmp_path / "new" / "folder"
    last, _ = script.json(
        *("make_random_checkpoint.py", out, "--preset", "tiny", "--experts", "bf16"),
        *("--dtype", "float32", "--no-prefix", "--shards", 3, "--seed", 9),
    )
    assert (last["path"], last["preset"], last["seed"]) == (str(out), "tiny", 9)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) == 3
    files = CheckpointFiles.open(out)
    assert last["tensors"] == len(files.tensors)
    assert last["bytes"] == sum(info.num_bytes for info in files.tensors.values())
    cfg = ModelConfig.from_folder(out)
    assert cfg.quantization is None
    check(cfg, files)
    tokenizer = Tokenizer.from_folder(out)
    assert tokenizer.vocab_size == cfg.vocab_size
    ids = ChatTemplate.from_folder(out, tokenizer).render([{"role": "user", "content": "a"}])
    assert max(ids) < cfg.vocab_size


def test_tensors_depend_on_seed_and_name_alone():
    cfg = maker.preset_config("tiny")
    named = maker.random_arrays(cfg, seed=5)
    flat = maker.random_arrays(cfg, seed=5, prefix=False)
    other = maker.random_arrays(cfg, seed=6)
    assert list(named) == [maker.TEXT_PREFIX + name for name in flat]
    for name, value in flat.items():
        np.testing.assert_array_equal(named[maker.TEXT_PREFIX + name], value)
        if not name.endswith("weight_shape"):
            assert not np.array_equal(other[maker.TEXT_PREFIX + name], value)
    wide = maker.random_arrays(cfg, seed=5, prefix=False, dtype="float32")
    for name, value in flat.items():
        np.testing.assert_array_equal(wide[name].astype(value.dtype), value)


@pytest.mark.parametrize("preset", maker.PRESETS)
def test_presets_have_the_size_they_say(preset):
    total = sum(maker.num_bytes(t) for _, t in maker.random_tensors(maker.preset_config(preset)))
    assert total == pytest.approx(SIZES[preset], rel=0.02)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--shards", "0"], "--shards must be at least 1"),
        (["--seed", "-1"], "--seed at least 0"),
        (["--preset", "huge"], "argument --preset"),
        (["--dtype", "int8"], "argument --dtype"),
    ],
)
def test_wrong_options(args, message, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        maker.main([str(out), *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_in_use_is_refused_unless_forced(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        maker.main([str(tmp_path)])
    assert stop.value.code == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert maker.main([str(tmp_path), "--force"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["path"] == str(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_refused(tmp_path, monkeypatch, capsys):
    usage = maker.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(maker.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    with pytest.raises(SystemExit) as stop:
        maker.main([str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "0.001 GB free on that disk, not enough" in capsys.readouterr().err
