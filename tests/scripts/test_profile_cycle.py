"""Stages of a cycle of the demo: what its operations are counted as, and that nothing is lost."""

import json
import sys
from pathlib import Path

import pieces
import profile_cycle
import pytest
from make_random_drafter import tiny_drafter_config, write_random_drafter

from kimi_jax import DEMO, LLM
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.program import Program
from kimi_jax.runtime.trace import BETWEEN, OUTSIDE
from spec import DEMO_DRAFTER, load_drafter, stages
from spec.stages import STAGES, stage_of
from spec.tree import Chain

K, CONTEXT = 3, 64
MISSED = (stages.UNATTRIBUTED, stages.LOOP)


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    with pieces.quick_compiles():
        yield


@pytest.fixture(scope="module")
def demo(quick_compiles):
    drafter = load_drafter(DEMO_DRAFTER, num_draft_tokens=K)
    return LLM(DEMO, drafter=drafter, max_length=2 * CONTEXT, max_batch=1, progress=False)


@pytest.fixture(scope="module")
def profiled(demo, tmp_path_factory):
    """Forms by name, and tokens a cycle."""
    options = ["--draft-tokens", str(K), "--repeats", "3", "--cycles", "4"]
    args = profile_cycle.make_parser().parse_args(options)
    text = demo.tokenizer.encode(profile_cycle.read_prompts(None))
    folder = tmp_path_factory.mktemp("recordings")
    return profile_cycle.profile(demo, text, CONTEXT, args, folder, recording=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, Chain(K)])
def test_every_operation_of_weight_has_a_stage(demo, form):
    text = demo.engine.lower_decode(1, demo.engine.capacities[0], form).compile().as_text()
    program = Program(text)
    found = {name: stage_of(op) for name, op in program.operations.items()}
    heavy = ("dot", "custom-call", "sort", "convolution")
    missed = [
        name
        for name, op in program.operations.items()
        if found[name] in MISSED and op.opcode in heavy
    ]
    assert missed == []
    # What is left is the loop's own: its counter and condition, the block's text.
    outside = {op.scope for name, op in program.operations.items() if found[name] in MISSED}
    for scope in outside:
        assert "while/body/closed_call" not in scope and "layer_" not in scope
    drafted = {stages.DRAFT, stages.EXTEND} if form else set()
    assert {*stages.VERIFY, stages.ACCEPT, *drafted} - {stages.COLLECTIVES} <= set(found.values())
    assert form or not {stages.DRAFT, stages.EXTEND} & set(found.values())


@pytest.mark.slow
def test_stages_add_up_to_what_was_recorded(demo, profiled):
    timed, gives = profiled
    assert 1 <= gives <= K + 1
    assert list(timed) == ["step", "cycle"]
    for each in timed.values():
        assert set(each.seconds) <= set(STAGES)
        assert min(each.seconds.values()) >= 0 and each.cycle_seconds > 0
        # Shares of time, not times: a slow machine slows what is counted and what is missed alike.
        assert sum(each.seconds.get(stage, 0.0) for stage in MISSED) < 0.1 * each.stages_seconds
    step, cycle = timed["step"], timed["cycle"]
    assert cycle.events > step.events > 100
    assert cycle.seconds[stages.DRAFT] > 0 and stages.DRAFT not in step.seconds
    rows = profile_cycle.stage_rows(CONTEXT, timed)
    told = profile_cycle.summary(demo, CONTEXT, K, "replicated", timed, gives)
    for name in ("step", "cycle"):
        # Rows are rounded to a ten-thousandth of a millisecond.
        total = sum(row[f"ms_{name}"] for row in rows)
        assert total == pytest.approx(told[f"ms_{name}_recorded"], abs=1e-3)
    assert sum(row["fraction"] or 0 for row in rows) == pytest.approx(1, abs=1e-2)
    assert told["break_even"] == pytest.approx(told["ms_cycle"] / told["ms_step"], rel=1e-2)
    verify = sum(row["ms_cycle"] for row in rows if row["name"] in stages.VERIFY)
    assert told["ms_verify"] == pytest.approx(verify, abs=1e-3)


@pytest.mark.slow
def test_the_table_shows_every_stage_and_the_verdict(demo, profiled, capsys):
    timed, gives = profiled
    rows = profile_cycle.stage_rows(CONTEXT, timed)
    told = profile_cycle.summary(demo, CONTEXT, K, "replicated", timed, gives)
    profile_cycle.show(rows, told)
    table = capsys.readouterr().out
    for name in (*(row["name"] for row in rows), "recorded", "not recorded", told["verdict"]):
        assert f"\n{name}" in table
    assert f"context {CONTEXT}, {K} draft tokens" in table


def run_main(monkeypatch, capsys, llm, *options: object) -> tuple[dict, str]:
    """The JSON and the table of the script over this model."""
    monkeypatch.setattr(sys, "argv", ["profile_cycle.py", *map(str, options)])
    monkeypatch.setattr(profile_cycle, "LLM", lambda *args, **more: llm)
    profile_cycle.main()
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    return json.loads(last), table


@pytest.mark.slow
def test_the_script_ends_with_its_figures(monkeypatch, capsys, demo, profiled, tmp_path):
    options = ("--context", CONTEXT, "--repeats", 2, "--cycles", 2, "--trace", tmp_path)
    out, table = run_main(monkeypatch, capsys, demo, *options)
    names = [row["name"] for row in out["rows"]]
    assert {stages.DRAFT, stages.EXPERTS, stages.EXTEND, OUTSIDE, BETWEEN} <= set(names)
    assert {row["context"] for row in out["rows"]} == {CONTEXT}
    [told] = out["contexts"]
    assert told["verdict"] in table and told["draft_tokens"] == K
    assert out["conditions"]["device"] and out["conditions"]["recording_us"] >= 0
    [line] = [line for line in table.splitlines() if "ui.perfetto.dev" in line]
    path = Path(line.split()[-1])
    assert path.is_relative_to(tmp_path / f"context-{CONTEXT}") and path.is_file()


@pytest.mark.slow
def test_plain_steps_alone(monkeypatch, capsys, demo, profiled):
    options = ("--context", CONTEXT, "--repeats", 1, "--cycles", 2, "--draft-tokens", 0)
    out, table = run_main(monkeypatch, capsys, demo, *options)
    assert all("ms_cycle" not in row and row["ms_step"] > 0 for row in out["rows"])
    [told] = out["contexts"]
    assert "break_even" not in told and "speculation" not in told["verdict"]
    assert "ms cycle" not in table


@pytest.mark.slow
def test_collectives_are_a_stage_of_their_own(script, tmp_path):
    options = "--mesh tensor=2 --context 64 --repeats 2 --cycles 2".split()
    out, _ = script.json("profile_cycle.py", *options)
    ms = {row["name"]: row["ms_cycle"] for row in out["rows"]}
    assert ms[stages.COLLECTIVES] > 0
    missed = sum(ms.get(stage, 0) for stage in MISSED)
    assert missed < 0.1 * sum(ms.values())
    assert out["conditions"]["mesh"] == {"expert": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--draft-tokens 9", "--draft-tokens is 9, expected 0 to 8"),
        ("--model here --draft-tokens 2", "--draft-tokens 2 needs a --drafter"),
        ("--drafter there --draft-tokens 0", "nothing is drafted"),
        ("--context 1", "--context is '1', expected numbers from 2"),
        ("--context 64,x", "expected numbers from 2"),
        ("--cycles 0", "at least 1"),
        ("--repeats 0", "at least 1"),
        ("--prompts nowhere.txt", "nowhere.txt"),
        ("--mesh tensor", "expected e.g. 'tensor=8'"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capsys, options, problem):
    assert _refusal(monkeypatch, capsys, *options.split()) == 2
    assert problem in capsys.readouterr().err


def test_a_trace_folder_that_cannot_be_made_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "nowhere" / "traces"):
        assert _refusal(monkeypatch, capsys, "--trace", str(folder)) == 2
        assert f"--trace {folder}: " in capsys.readouterr().err


def test_a_context_beyond_the_model_is_refused_before_loading(monkeypatch, capsys):
    longest = ModelConfig.from_folder(DEMO).max_position_embeddings - 64
    assert _refusal(monkeypatch, capsys, "--context", f"64,{longest + 1}") == 1
    told = capsys.readouterr().err
    assert f"--context {longest + 1}: " in told
    assert f"the model has {longest + 64}: at most {longest}" in told


def test_a_text_or_drafter_too_short_is_refused_before_loading(monkeypatch, capsys, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("x = 1\n" * 20)
    options = ("--prompts", str(text), "--context", "64")
    assert _refusal(monkeypatch, capsys, *options) == 1
    told = capsys.readouterr().err
    assert "--context 64: " in told and "and the text (--prompts takes a longer one) has " in told
    drafter = tmp_path / "drafter"
    cfg = tiny_drafter_config("llama", ModelConfig.from_folder(DEMO), max_position_embeddings=128)
    write_random_drafter(drafter, cfg)
    assert _refusal(monkeypatch, capsys, "--drafter", str(drafter), "--context", "65") == 1
    assert "and the drafter has 128: at most 64" in capsys.readouterr().err


def test_the_settings_of_the_gpu_and_the_cache_reach_the_model(monkeypatch, capsys):
    asked = {}

    def load(model, **options):
        asked.update(options)
        raise ValueError("seen")

    called = []
    monkeypatch.setattr(profile_cycle, "set_gpu_environment", lambda: called.append(1))
    options = ["--mesh", "tensor=2", "--cache", "sequence", "--context", "64"]
    assert _refusal(monkeypatch, capsys, *options, load=load) == 1
    assert called and asked["cache"] == "sequence" and asked["max_length"] == 128


def test_contexts_are_as_asked_for_or_as_fits():
    limits = {"the model": 4096, "the text": 1000}
    assert profile_cycle.contexts_within([100, 936], limits) == [100, 936]
    assert profile_cycle.contexts_within(None, limits) == [64, 512, 936]
    with pytest.raises(ValueError, match="--context 937: .* 1001, and the text has 1000: at most"):
        profile_cycle.contexts_within([937], limits)
    with pytest.raises(ValueError, match="--context 64: .* the text has 99: at most 35"):
        profile_cycle.contexts_within(None, {"the text": 99})


def _refusal(monkeypatch, capsys, *options: str, load=None) -> int:
    """The status of the script that refuses these options; nothing expensive before."""
    monkeypatch.setattr(sys, "argv", ["profile_cycle.py", *options])
    monkeypatch.setattr(profile_cycle, "LLM", load)
    with pytest.raises(SystemExit) as stop:
        profile_cycle.main()
    return stop.value.code
