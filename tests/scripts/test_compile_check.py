"""What the compile check refuses before it compiles anything; no CUDA plugin is needed for that."""

import importlib.util
import json
import sys

import compile_check
import pytest

from kimi_jax import published
from kimi_jax.config import ModelConfig


@pytest.fixture
def fail(monkeypatch, capsys):
    """Runs the script with arguments it refuses; the status and what it says."""

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compile_check.py", *args])
        with pytest.raises(SystemExit) as stop:
            compile_check.main()
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--config", "kimi-k9"], "'kimi-k9', expected kimi-k2.5, tiny, or a model's folder"),
        (["--hardware", "rtx-9000"], "invalid choice: 'rtx-9000'"),
        (["--hardware", "h100", "h200"], "programs are compiled for one"),
        (["--ops", "--layers", "3", "--batch", "2"], "it takes no --batch, --layers"),
        (["--ops", "--shapes", "kimi-k9"], "'kimi-k9': no named shape begins so"),
        (["--programs", "train"], "invalid choice: 'train'"),
        (["--devices", "0"], "--devices is 0, expected 1..64"),
        (["--devices", "7"], "does not divide this model: num_attention_heads 64 over 7"),
        (["--config", "tiny", "--devices", "16"], "does not divide this model"),
        (["--draft-tokens", "9"], "--draft-tokens is 9, expected 1..8"),
        (["--draft-tokens", "0"], "--draft-tokens is 0, expected 1..8"),
        (["--batch", "0"], "--batch is 0, expected 1..64"),
        (["--capacity", "256"], "--capacity is 256, expected 512..262144"),
        (["--capacity", "262400"], "--capacity is 262400, expected 512..262144"),
        (["--capacity", "8200"], "expected a multiple of 256"),
        (["--layers", "1"], "--layers is 1, expected 2..61"),
        (["--layers", "62"], "--layers is 62, expected 2..61"),
        (["--ops", "softmax"], "invalid choice: 'softmax'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(fail, args, said):
    status, err = fail(*args)
    assert status == 2 and said in err


def test_a_folder_that_is_no_model_is_refused(fail, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, err = fail("--config", str(tmp_path))
    assert status == 2 and "model_type is None" in err


@pytest.mark.parametrize("args", [[], ["--ops"]])
def test_without_the_plugin_it_names_the_extra(fail, monkeypatch, args):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    status, err = fail(*args)
    assert status == 1 and "kimi-jax[cuda12]" in err


def test_models_are_found_by_name_and_by_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published.K25))
    folder = compile_check.model_config(str(tmp_path))
    assert folder == compile_check.model_config("kimi-k2.5") == ModelConfig.from_dict(published.K25)
    assert compile_check.model_config("tiny").quantization is not None
