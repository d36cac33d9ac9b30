"""scripts/generate.py with a drafter: the same text, and what speculation did."""

import generate
import pytest


@pytest.fixture(scope="module")
def drafter(script, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "llama"
    out, _ = script.json("make_random_drafter.py", "--target", tiny, "--out", folder)
    assert out["config"]["architectures"] == ["LlamaForCausalLMEagle3"] and out["parameters"] > 0
    return folder


def test_the_text_is_that_of_plain_decoding(script, tiny, drafter):
    common = ("--model", tiny, "--prompt", "abc", "--max-new-tokens", 20, "--quiet")
    plain, _ = script.json("generate.py", *common)
    assert plain["speculation"] is None and plain["conditions"]["drafter"] is None
    found, _ = script.json("generate.py", *common, "--drafter", drafter, "--num-draft-tokens", 2)
    assert found["token_ids"] == plain["token_ids"]
    told = found["speculation"]
    assert told["emitted"] == 20 and told["drafted"] == 2 * told["cycles"]
    assert told["tokens_per_cycle"] == 20 / told["cycles"]
    assert found["conditions"]["drafter"]["num_draft_tokens"] == [2]


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--num-draft-tokens 3", "only with --drafter"),
        ("--taps 1,2", "only with --drafter"),
        ("--drafter d --num-draft-tokens 9", "expected 0 to 8"),
        ("--drafter d --num-draft-tokens x", "expected numbers"),
        ("--drafter d --sample-drafts", "only with a --temperature over 0"),
    ],
)
def test_wrong_options_are_refused_before_loading(tiny, capsys, options, problem):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", str(tiny), "--prompt", "a", *options.split()])
    assert stopped.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, problem",
    [("--drafter {t}", "a target checkpoint"), ("--drafter {d} --taps 0,1,99", "99")],
)
def test_a_drafter_that_does_not_fit_is_refused(script, tiny, drafter, options, problem):
    words = options.format(d=drafter, t=tiny).split()
    run = script.run("generate.py", "--model", tiny, "--prompt", "a", "--quiet", *words)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert problem in run.stderr
