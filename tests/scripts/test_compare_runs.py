"""Two runs side by side: what moved, and what else was different."""

import copy
import json

import compare_runs
import pytest

RUN = {
    "rows": [
        {"draft_tokens": 3, "context": 64, "ms_cycle": 19.0, "ms_step": 12.2},
        {"draft_tokens": 3, "context": 512, "ms_cycle": 19.4, "ms_step": 12.3},
    ],
    "tokens_per_cycle": 2.0,
    "conditions": {"jax": "0.12.0", "flags": {"graphs": True}, "device": "RTX PRO 6000"},
}


@pytest.fixture
def other():
    """The same machine a month later: captured in another mode."""
    run = copy.deepcopy(RUN)
    run["rows"][0]["ms_cycle"] = 29.0
    run["rows"][1]["ms_cycle"] = 19.5
    run["conditions"]["flags"]["graphs"] = False
    run["conditions"]["clocks"] = ["2400 MHz"]
    return run


def test_what_moved_and_which_conditions_differ(other):
    found = compare_runs.compare(RUN, other, 0.05)
    [row] = found["moved"]
    assert row["figure"] == "context=64 draft_tokens=3: ms_cycle"
    assert (row["a"], row["b"]) == (19.0, 29.0) and row["b_over_a"] == pytest.approx(29 / 19)
    assert found["same"] == 4 and found["only_in_a"] == found["only_in_b"] == []
    assert found["conditions_differ"] == [
        {"condition": "flags.graphs", "a": True, "b": False},
        {"condition": "clocks.0", "a": "(not recorded)", "b": "2400 MHz"},
    ]


def test_runs_of_other_shapes_are_compared_where_they_meet(other):
    del other["rows"][1]
    found = compare_runs.compare(RUN, other, 0.0)
    assert len(found["only_in_a"]) == 2 and found["only_in_b"] == []


def test_it_reads_whole_outputs(script, tmp_path, other):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("a table\n" + json.dumps(RUN) + "\n")
    b.write_text(json.dumps(other) + "\n\n")
    out, text = script.json("compare_runs.py", a, b)
    assert len(out["moved"]) == 1
    assert "19 -> 29" in text and "flags.graphs: True -> False" in text


def test_counts_by_depth_are_figures(other):
    a = RUN | {"accepted_by_depth": [20, 9, 3], "token_ids": [1, 2]}
    found = compare_runs.compare(a, a | {"accepted_by_depth": [20, 9, 0]}, 0.05)
    [row] = found["moved"]
    assert (row["figure"], row["a"], row["b"]) == ("accepted_by_depth.2", 3, 0)


@pytest.mark.parametrize(
    "line", ['{"rows": 3}', '{"rows": [1]}', '{"conditions": [1]}', "{" + '"a":{' * 9000, "{x"]
)
def test_lines_of_no_script_are_refused(tmp_path, line):
    (tmp_path / "b.txt").write_text(line)
    with pytest.raises(ValueError, match="b.txt: its last JSON line"):
        compare_runs.read_run(tmp_path / "b.txt")


def test_a_file_without_json_is_named(script, tmp_path):
    (tmp_path / "a.txt").write_text("nothing\n")
    run = script.run("compare_runs.py", tmp_path / "a.txt", tmp_path / "none.txt")
    assert run.returncode == 1 and "a.txt: no line of JSON" in run.stderr
    assert "Traceback" not in run.stderr
