"""scripts/bench_load.py: what it reports of the small preset."""

import bench_load
import pytest


@pytest.mark.parametrize("more", [[], pytest.param(["--memory-ready"], marks=pytest.mark.slow)])
def test_the_last_line_compares_with_cat(tiny, script, more):
    last, text = script.json("bench_load.py", tiny, "--mesh", "tensor=2", "--repeats", 1, *more)
    [row] = last["rows"]
    assert 0 < last["share_of_cat"] == row["cat_seconds"] / row["seconds"]
    assert row["weight_bytes"] < row["peak_bytes"] == last["peak_bytes"]
    assert last["conditions"]["mesh"] == "tensor=2" and "share" in text


@pytest.mark.slow
def test_a_converted_checkpoint_takes_its_turns(tiny, tmp_path, script):
    script.json("convert_checkpoint.py", tiny, tmp_path / "out", "--mesh", "tensor=2")
    last, text = script.json(
        "bench_load.py", tiny, "--converted", tmp_path / "out", "--mesh", "tensor=2", "--repeats", 1
    )
    [row] = last["rows"]
    assert row["converted"]["weight_bytes"] == row["weight_bytes"]
    assert last["restore_over_load"] == row["seconds"] / row["converted"]["seconds"]
    assert text.count("converted") == 1


def test_wrong_options(tiny, tmp_path, capsys):
    for args, message in (
        ([tmp_path], "no safetensors files"),
        ([tiny, "--repeats", 0], "at least 1"),
        ([tiny, "--converted", tmp_path], "no converted checkpoint"),
    ):
        with pytest.raises(SystemExit):
            bench_load.main([str(arg) for arg in args])
        assert message in capsys.readouterr().err
