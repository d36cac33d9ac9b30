"""scripts/convert_checkpoint.py as a user runs it: its output serves the other scripts, and a
conversion that was killed is gone on from."""

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import convert_checkpoint
import jax
import load_check
import numpy as np
import pytest

from kimi_jax import LLM
from kimi_jax.checkpoint.converted import PIECES, RECORD_NAME
from kimi_jax.checkpoint.reader import CheckpointError

PROMPT = ("--prompt", "def f(x):", "--max-new-tokens", 4, "--quiet")


@pytest.fixture(scope="module")
def out(tiny, tmp_path_factory, script) -> tuple[Path, dict, str]:
    """A conversion, its JSON line and what it printed before."""
    folder = tmp_path_factory.mktemp("converted") / "out"
    last, before = script.json("convert_checkpoint.py", tiny, folder)
    return folder, last, before


def test_the_last_line_says_what_was_written(tiny, out):
    folder, last, before = out
    assert before == f"12 of 12 pieces written, 0.001 GB in {last['seconds']:.1f} s\n"
    assert last["pieces"] == last["pieces_written"] == 12 and last["rounded"] == 0
    arrays = sum(path.stat().st_size for path in folder.glob(f"{PIECES}/*/*/[0-9]*"))
    assert last["bytes"] == last["bytes_written"] == arrays
    assert last["dtype"] == "bfloat16" and last["source"]["folder"] == str(tiny)
    assert last["conditions"]["mesh"] == "tensor=8" and last["conditions"]["device_count"] == 8


@pytest.fixture
def quick_compiles():
    # LLVM works less on the same programs.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_the_folder_serves_like_the_published_one(tiny, out, script):
    theirs, _ = script.json("generate.py", "--model", tiny, *PROMPT)
    ours, _ = script.json("generate.py", "--model", out[0], *PROMPT)
    assert ours["token_ids"] == theirs["token_ids"]


@pytest.mark.parametrize("mesh", [None, pytest.param("tensor=8", marks=pytest.mark.slow)])
def test_logits_are_the_same_to_the_last_bit(tiny, out, mesh, quick_compiles):
    ids = list(range(20))
    expected, found = (
        LLM(folder, mesh=mesh, max_length=64, progress=False).logits(ids)
        for folder in (tiny, out[0])
    )
    np.testing.assert_array_equal(found, expected)


def test_a_model_is_refused_before_it_is_built(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "wide"
    assert convert_checkpoint.main([str(tiny), str(folder), "--dtype", "float32", "--quiet"]) == 0
    with pytest.raises(ValueError, match="stored in float32, and bfloat16 would round"):
        LLM(folder, dtype="bfloat16", max_length=64)
    (folder / PIECES / "norm" / "norm" / "0").unlink()
    monkeypatch.setattr("kimi_jax.runtime.llm.abstract_model", None)
    with pytest.raises(CheckpointError, match=f"{PIECES}/norm/norm/0: missing"):
        LLM(folder, max_length=64)


def check(capsys, *args) -> tuple[int, dict, str]:
    status = load_check.main([str(arg) for arg in args])
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1]), text


def test_load_check_knows_it(out, tmp_path, capsys):
    folder = Path(shutil.copytree(out[0], tmp_path / "copy"))
    for more in ([], ["--verify"]):
        status, last, text = check(capsys, folder, *more)
        assert status == 0 and last["ok"] and last["converted"] and "converted from" in text
        assert last["placement"]["bytes_per_device"] > 0
    spoilt = folder / PIECES / "norm" / "norm" / "0"
    spoilt.write_bytes(bytes(spoilt.stat().st_size))
    assert check(capsys, folder)[0] == 0
    status, last, _ = check(capsys, folder, "--verify")
    assert status == 1 and f"{PIECES}/norm/norm/0: its bytes are not" in last["problems"][0]
    spoilt.unlink()
    status, last, _ = check(capsys, folder)
    assert status == 1 and f"{PIECES}/norm/norm/0: missing" in last["problems"][0]


def test_errors_are_one_line_and_the_status_is_1(tiny, out, tmp_path, capsys):
    for args, said in (
        ([tmp_path / "absent", tmp_path / "out"], "no such folder"),
        ([out[0], tmp_path / "out"], "is a converted checkpoint; give the published one"),
        ([tiny, tiny], "is the source"),
        ([tiny, tmp_path / "out", "--mesh", "pipeline=2"], "mesh 'pipeline=2': expected"),
        ([tiny, out[0], "--mesh", "tensor=4"], "with other options (there, here): mesh.tensor"),
    ):
        assert convert_checkpoint.main([str(arg) for arg in [*args, "--quiet"]]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("convert_checkpoint.py: error: ") and said in captured.err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stop:
        convert_checkpoint.main([str(tiny), str(tmp_path / "out"), "--dtype", "float16"])
    assert stop.value.code == 2


@pytest.mark.slow
def test_a_disk_that_refuses_a_file(tiny, tmp_path, script):
    """Files over 32 KiB are refused by the system, as all would be on a full disk."""
    folder = tmp_path / "out"
    command = script.command("convert_checkpoint.py", tiny, folder, "--mesh", "tensor=1")
    run = subprocess.run(
        ["bash", "-c", 'ulimit -f 32; exec "$@"', "bash", *command],
        capture_output=True,
        encoding="utf-8",
        env=script.env,
        timeout=300,
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "not written (" in run.stderr and "File too large" in run.stderr
    assert "goes on from it" in run.stderr
    last, _ = script.json("convert_checkpoint.py", tiny, folder, "--mesh", "tensor=1")
    assert last["pieces_written"] <= last["pieces"]
    assert load_check.main([str(folder), "--verify"]) == 0


def arrays(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.glob(f"{PIECES}/*/*/*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_killed_at_a_random_moment_and_again_when_it_goes_on(tiny, out, tmp_path, script, seed):
    """SIGKILL, between the first record and where an unbroken conversion would end."""
    rng, folder = random.Random(seed), tmp_path / "out"
    for _ in range(2):
        process = script.start("convert_checkpoint.py", tiny, folder)
        while not (folder / RECORD_NAME).exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, out[1]["seconds"]))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last, _ = script.json("convert_checkpoint.py", tiny, folder)
    assert last["pieces"] == 12
    assert arrays(folder) == arrays(out[0])
    assert load_check.main([str(folder), "--verify"]) == 0
