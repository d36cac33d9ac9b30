"""The cost of a cycle's parts, on the demo, in small."""

import pytest


def test_every_form_is_measured(script):
    options = "--contexts 20 --repeats 1 --num-draft-tokens 2 --cycles 2".split()
    out, table = script.json("bench_decode.py", *options)
    [row] = out["rows"]
    assert row["context"] == 20 and row["capacity"] == 256
    assert min(row[f"{form}_ms"] for form in ("step", "verify", "cycle")) > 0
    assert row["break_even_tokens_per_cycle"] > 0
    assert out["conditions"]["num_draft_tokens"] == 2 and out["conditions"]["device"]
    assert "verify_over_step" in table


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--num-draft-tokens 8", "expected 1 to 7"),
        ("--cycles 40", "at most 12"),
        ("--contexts 1", "at least 2"),
    ],
)
def test_wrong_options_are_refused(script, options, problem):
    run = script.run("bench_decode.py", *options.split())
    assert run.returncode == 2 and problem in run.stderr
