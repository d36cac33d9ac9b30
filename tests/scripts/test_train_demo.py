"""scripts/train_demo.py: a toy run, cut short and resumed, and what it wrote."""

import json
import math

import pytest
import train_demo

from kimi_jax.checkpoint.reader import CheckpointFiles
from kimi_jax.checkpoint.table import check
from kimi_jax.config import ModelConfig

FACTS = {"parameters", "bytes", "held_out_loss", "held_out_bits_per_byte", "steps", "seed"}


@pytest.mark.slow
def test_smoke_run_resumes_and_its_checkpoint_generates(script, tmp_path):
    out, work = tmp_path / "demo", tmp_path / "work"
    options = ("train_demo.py", "--smoke", "--out", out, "--work", work)
    first, _ = script.json(*options, "--steps", 6)
    # What a save leaves that was killed half-way.
    (work / "steps" / "9.orbax-checkpoint-tmp-0").mkdir()
    last, _ = script.json(*options, "--steps", 12)
    assert last.keys() >= FACTS
    assert (first["steps"], last["steps"]) == (6, 12)
    assert last["held_out_loss"] < first["held_out_loss"] < 1.1 * math.log(768)

    # The second run went on where the first ended.
    log = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [6, 10, 12]
    assert log[-1]["loss"] < log[0]["loss"]

    cfg = ModelConfig.from_folder(out)
    assert cfg.quantization is not None
    check(cfg, CheckpointFiles.open(out))
    assert "held out loss" in (out / "README.md").read_text()
    reply, _ = script.json(
        *("generate.py", "--model", out, "--prompt", "Write f.", "--max-new-tokens", 8),
        *("--chat", "--no-thinking", "--temperature", 0),
    )
    assert 1 <= reply["new_tokens"] <= 8


def test_batches_depend_on_the_step_alone():
    rows = [train_demo.np.arange(5000), train_demo.np.arange(900)]
    recipe = train_demo.SMOKE
    again = [train_demo.sample_batch(*rows, recipe, step, 0) for step in (7, 8, 7)]
    assert again[0].shape == (recipe.batch, recipe.context + 1)
    assert (again[0] == again[2]).all() and (again[0] != again[1]).any()


def test_learning_rate_rises_and_falls_to_zero():
    recipe = train_demo.FULL
    rates = [train_demo.learning_rate(step, recipe) for step in range(recipe.steps + 1)]
    assert max(rates) == recipe.learning_rate
    assert rates[0] == recipe.learning_rate / recipe.warmup
    assert rates[-1] == 0
    assert rates[recipe.warmup] == rates[recipe.steps // 2] == recipe.learning_rate


def test_held_out_modules_are_disjoint_from_the_training_ones():
    train, held_out = train_demo.library_files()
    assert not set(train) & set(held_out)
    assert 0.01 < len(held_out) / len(train) < 0.1


@pytest.mark.parametrize("args", [["--steps", "0"], ["--steps", "few"], ["--seed", "x"]])
def test_wrong_options(args, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train_demo.main(["--out", str(tmp_path / "demo"), *args])
    assert stop.value.code == 2
    assert args[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
