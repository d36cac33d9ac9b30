"""The cost of a cycle's parts, on the demo, in small."""

import json

import pytest

COLUMNS = (
    "draft_tokens context ms_step ms_verify ms_draft ms_cycle tokens_per_cycle tokens_per_second "
    "speedup break_even verify_over_step cycle_over_step"
).split()


@pytest.mark.slow
def test_every_form_is_measured(script, tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "words " * 40}) for _ in range(3)))
    options = "--context 20,4096 --repeats 1 --draft-tokens 2,0 --cycles 2".split()
    out, table = script.json("bench_decode.py", "--model", tiny, "--prompts", prompts, *options)
    # The checkpoint takes 256 tokens: the longest context leaves room for a block.
    places = [(row["context"], row["draft_tokens"]) for row in out["rows"]]
    assert places == [(20, 0), (20, 2), (192, 0), (192, 2)]
    for row in out["rows"]:
        assert list(row) == COLUMNS
        assert min(row["ms_step"], row["ms_verify"], row["ms_cycle"]) > 0
        assert row["break_even"] == pytest.approx(row["ms_cycle"] / row["ms_step"], rel=2e-3)
        assert 1 <= row["tokens_per_cycle"] <= row["draft_tokens"] + 1
        rate = 1e3 * row["tokens_per_cycle"] / row["ms_cycle"]
        assert row["tokens_per_second"] == pytest.approx(rate, rel=2e-3)
    assert set(out["verify_over_step_spread"]) == {"0", "2"}
    [replies] = out["replies"]
    assert replies["temperature"] == 0 and replies["auto_over_plain"] > 0
    assert out["conditions"]["device"] and "verify_over_step" in table


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--draft-tokens 9", "from 0 to 8"),
        ("--draft-tokens 1,x", "from 0 to 8"),
        ("--context 1", "from 2"),
        ("--cycles 0", "at least 1"),
        ("--prompts nowhere.txt", "nowhere.txt"),
    ],
)
def test_wrong_options_are_refused(script, options, problem):
    run = script.run("bench_decode.py", *options.split())
    assert run.returncode == 2 and problem in run.stderr
