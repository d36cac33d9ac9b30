"""scripts/generate.py with a drafter: the same text, and what speculation did."""

import generate
import pytest


@pytest.fixture(scope="module")
def drafter(script, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "llama"
    out, _ = script.json("make_random_drafter.py", "--target", tiny, "--out", folder)
    assert out["config"]["architectures"] == ["LlamaForCausalLMEagle3"] and out["parameters"] > 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, drafted",
    [
        ("--draft-tokens 2", 2),
        ("--tree 4,2,2", 4),
        ("--draft-tokens auto", 0),
    ],
)
def test_the_text_is_that_of_plain_decoding(script, tiny, drafter, options, drafted):
    common = ("--model", tiny, "--prompt", "abc", "--max-new-tokens", 20, "--quiet")
    plain, _ = script.json("generate.py", *common)
    assert plain["tokens_per_cycle"] is None and plain["conditions"]["drafter"] is None
    found, _ = script.json("generate.py", *common, "--drafter", drafter, *options.split())
    assert found["token_ids"] == plain["token_ids"]
    assert found["tokens_per_cycle"] == 20 / found["cycles"]
    if drafted:
        assert found["drafted"] == drafted * found["cycles"]
        assert len(found["accepted_by_depth"]) == 2
    assert found["acceptance_rate"] == sum(found["accepted_by_depth"]) / found["drafted"]
    assert found["ms_per_cycle"] > 0
    assert found["break_even"] == pytest.approx(found["ms_per_cycle"] / found["ms_per_step"])


@pytest.mark.parametrize(
    "options, problem",
    [
        ("--draft-tokens 3", "only with a --drafter"),
        ("--drafter none --tree 3,2,2", "only with a --drafter"),
        ("--drafter none --taps 1,2", "only with a --drafter"),
        ("--drafter d --draft-tokens 9", "expected 0 to 8"),
        ("--drafter d --draft-tokens x", "expected 0 to 8, or auto"),
        ("--drafter d --draft-tokens 3 --tree 3,2,2", "both given"),
        ("--drafter d --tree 3,2", "nodes,depth,top_k"),
        ("--drafter d --tree 70,4,8", "at most 63"),
        ("--drafter d --tree 9,1,2", "grows 2 nodes"),
        ("--drafter d --sample-drafts", "only with a --temperature over 0"),
        ("--drafter d --lossy-threshold 0.3", "only with a --temperature over 0"),
        ("--drafter d --lossy-threshold 1.5 --temperature 1", "between 0 and 1"),
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
