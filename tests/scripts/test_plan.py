"""The planner: bytes and launches as compiled, published speeds as far as they are known."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import plan
import pytest

from kernels_pallas.compile_only import HARDWARE
from kimi_jax.config import ModelConfig
from kimi_jax.published import K25, K25_EAGLE3
from spec import machines
from spec.eagle3.config import DrafterConfig
from spec.machines import INTERCONNECTS
from spec.planner import Plan
from spec.traffic import drafter_bytes, target_bytes

K25_CONFIG = ModelConfig.from_dict(K25)
BF16 = jnp.dtype(jnp.bfloat16)
GB = 10**9

# What scripts/compile_check.py said of Kimi-K2.5 on 8x RTX PRO 6000 (JAX 0.12.0.1, 61 layers,
# K = 3, November 2026), as far as the planner reads it.
PROGRAM = {"kernels_per_layer": 11.0, "all_reduces_per_layer_most": 2}
COMPILED = {
    "programs": {
        "step": PROGRAM
        | {
            "launches": {"kCustomKernel": 696, "kAllReduce": 123, "kConditional": 4, "kCopy": 3},
            "all_reduces": 123,
            "all_gathers": 1,
            "graphs": 1,
            "launches_outside_graphs": 0,
            "temp_bytes": 4377232,
        },
        "cycle": PROGRAM
        | {
            "launches": {"kCustomKernel": 795, "kAllReduce": 132, "kConditional": 4, "kCopy": 2},
            "all_reduces": 132,
            "all_gathers": 4,
            "graphs": 1,
            "launches_outside_graphs": 0,
            "temp_bytes": 35629600,
        },
        "prefill": {"temp_bytes": 169998824},
    },
    "conditions": {
        "layers": 61,
        "draft_tokens": 3,
        "batch": 1,
        "compiled_devices": 8,
        "hardware": "rtx-pro-6000",
        "jax": "0.12.0.1",
        "config": K25_CONFIG.to_dict(),
    },
}


def made(*args: object) -> Plan:
    return plan.make_plan(plan.make_parser().parse_args(list(map(str, args))))


def rows_of(*args: object) -> list[dict]:
    return plan.plan_rows(made(*args))


@pytest.fixture
def write(tmp_path):
    def to(name: str, data: object):
        path = tmp_path / name
        path.write_text(json.dumps(data) + "\n")
        return path

    return to


@pytest.fixture
def compiled(write):
    return write("compile_check.txt", COMPILED)


# Bytes, from the shapes.


def test_a_device_holds_what_the_compiled_programs_hold():
    target = target_bytes(K25_CONFIG, 8, BF16)
    drafter = DrafterConfig.from_dict(K25_EAGLE3, num_target_layers=61)
    drafts = drafter_bytes(drafter, 8, BF16)
    # The same run of compile_check.py.
    assert target.resident == 76_182_593_536
    assert drafts.resident == 567_661_568
    assert target.slot * 8192 == 575_668_224


def test_what_a_forward_reads_by_hand():
    target = target_bytes(K25_CONFIG, 8, BF16)
    # 3 x 7168 x 2048 weights of 0.5625 bytes in 60 layers, an eighth each.
    assert target.expert == 3 * 7168 * 2048 * 0.5625 * 60 / 8
    assert 8 * 8 * target.expert == pytest.approx(11.9e9, rel=5e-3)
    # q_a, kv_a and two norms a layer, whole on every device.
    assert target.read["attention kept whole"] == 61 * 2 * (7168 * (1536 + 576) + 1536 + 512)
    assert target.read["shared experts"] == 60 * 3 * 7168 * 2048 * 2 / 8
    assert target.read["dense layers"] == 3 * 7168 * 18432 * 2 / 8
    assert target.read["head"] == 163840 * 7168 * 2 / 8 + 7168 * 2
    heads = 1536 * 64 * 192 + 64 * (128 + 128) * 512 + 64 * 128 * 7168
    assert target.read["attention"] == 61 * heads * 2 / 8
    assert target.slot == 61 * 576 * 2


def test_one_device_holds_all_of_it():
    whole, cut = target_bytes(K25_CONFIG, 1, BF16), target_bytes(K25_CONFIG, 8, BF16)
    assert whole.expert == 8 * cut.expert
    assert "attention kept whole" not in whole.read
    assert whole.resident == pytest.approx(594e9, rel=1e-2)


def test_what_a_cycle_does_by_hand():
    it = made("--context", 1000, "--interconnect", "pcie-switch")
    step, cycle = it.step(), it.cycle(3)
    assert step.reads["routed experts"].num_bytes == pytest.approx(8 * it.target.expert)
    assert cycle.reads["routed experts"].num_bytes == pytest.approx(
        31.014 * it.target.expert, rel=1e-4
    )
    # The layer and the head three times, what fuses the target's streams once, the slots each time.
    drafts = it.drafts
    assert (
        cycle.reads["drafter"].num_bytes
        == 3 * (drafts.layer + drafts.head + 1000 * 4096) + drafts.fuse
    )
    assert "drafter" not in step.reads
    assert step.reads["latent cache"].num_bytes == cycle.reads["latent cache"].num_bytes
    assert (step.kernels, cycle.kernels) == (703, 802)
    told = [(c.kind, c.count, c.num_bytes) for c in cycle.collectives]
    assert told == [
        ("all-reduce", 123, 4 * 14336),
        ("all-gather", 1, 4 * 64),
        ("all-reduce", 6, 14336),
        ("all-reduce", 3, 4 * 14336),
        ("all-gather", 3, 64),
    ]


def test_a_shared_out_cache_by_hand():
    """An eighth of the rows to read and hold, and in each of 61 layers two exchanges more."""
    whole, shared = (
        made("--context", 65536, "--cache", cache) for cache in ("replicated", "sequence")
    )
    cached = [it.step().reads["latent cache"].num_bytes for it in (whole, shared)]
    assert cached[0] == 8 * cached[1] == 65536 * 61 * 576 * 2
    more = shared.step().collectives[len(whole.step().collectives) :]
    # 64 heads' queries; their 512 values and a float32, both in bfloat16.
    assert [(c.count, c.num_bytes) for c in more] == [(61, 64 * 576 * 2), (61, 64 * 514 * 2)]
    [verified] = [c for c in shared.cycle(3).collectives if c.num_bytes == 4 * 64 * 576 * 2]
    assert verified.count == 61
    held = [plan.plan_memory(it)["cache_bytes"] for it in (whole, shared)]
    assert held[0] == 8 * held[1]


def test_batches_read_more_experts_and_caches():
    one, four = made(), made("--batch", 4)
    for name, times in (("routed experts", 31.014 / 8), ("latent cache", 4)):
        read = one.step().reads[name].num_bytes
        assert four.step().reads[name].num_bytes == pytest.approx(times * read, rel=1e-4)
    # As four rows of one stream, which choose independently too.
    assert four.step().reads["routed experts"].num_bytes == pytest.approx(
        one.cycle(3).reads["routed experts"].num_bytes
    )
    assert four.step().reads["attention"] == one.step().reads["attention"]


# Published speeds (one stream; the engines' contexts are not known, and short ones assumed). The
# efficiencies and fixed costs of spec/machines.py come from elsewhere and are not fitted to these.


def test_the_plain_step_of_a_known_engine_is_reproduced():
    # 8x RTX PRO 6000, NCCL at about 24 us: 82 to 91 tokens/s, 11 to 12.2 ms.
    step = rows_of("--engine-launches", 30, "--context", 1024)[0]
    assert step["ms_step"] == pytest.approx(11, rel=0.25)
    assert step["tokens_per_second"] == pytest.approx(86.9, rel=0.05)


def test_the_cycle_of_a_known_engine_is_reproduced():
    # The same with verification in one graph and 3 drafts: 86.9 to 117.1 tokens/s, 1.77.
    rows = rows_of("--engine-launches", 30, "--context", 1024)
    assert rows[3]["break_even"] == pytest.approx(1.8, rel=0.25)
    assert rows[3]["break_even"] == pytest.approx(1.77, rel=0.2)


def test_a_faster_all_reduce_and_other_hardware_are_reproduced():
    args = ("--engine-launches", 30, "--context", 1024)
    # The same machine with a one-shot all-reduce: 101 tokens/s.
    one_shot = rows_of(*args, "--interconnect", "pcie-switch-one-shot")[0]
    assert one_shot["tokens_per_second"] == pytest.approx(101, rel=0.05)
    # 8x B200: 143 tokens/s.
    b200 = rows_of(*args, "--hardware", "b200")[0]
    assert b200["ms_step"] == pytest.approx(1e3 / 143, rel=0.25)


def test_this_project_is_predicted_from_its_launch_list(compiled):
    it = made("--launches", compiled)
    rows = plan.plan_rows(it)
    assert it.counts.kernels == 703 and it.cycle(3).kernels == pytest.approx(801)
    assert it.counts.source.startswith("compile_check.txt: 61 layers compiled for 8x rtx-pro-6000")
    # The figures of the README.
    assert rows[0]["ms_step"] == pytest.approx(9.60, abs=0.02)
    assert rows[3]["break_even"] == pytest.approx(1.60, abs=0.01)
    assert plan.best_draft_tokens(it) == 2
    assert rows[2]["tokens_per_second"] == pytest.approx(154.1, abs=0.3)
    # The defaults are this list, rounded.
    for row, default in zip(rows, rows_of(), strict=True):
        assert default["ms_cycle"] == pytest.approx(row["ms_cycle"], rel=2e-3)


def test_the_readmes_predictions_are_the_planners():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = text.split("## Planning a machine")[1].split("\n## ")[0]
    lines = [
        line
        for line in section.splitlines()
        if line.startswith(tuple(f"| {h} |" for h in HARDWARE))
    ]
    assert len(lines) >= 7
    for line in lines:
        hardware, interconnect, *figures = [cell.strip() for cell in line.strip("|").split("|")]
        ms, plain, best, fastest, even = map(float, figures)
        it = made("--hardware", hardware, "--interconnect", interconnect)
        rows = plan.plan_rows(it)
        assert rows[0]["ms_step"] == pytest.approx(ms, abs=0.01), line
        assert rows[0]["tokens_per_second"] == pytest.approx(plain, abs=0.6), line
        assert plan.best_draft_tokens(it) == best
        assert rows[int(best)]["tokens_per_second"] == pytest.approx(fastest, abs=0.6), line
        assert rows[3]["break_even"] == pytest.approx(even, abs=0.01), line


# Launch lists.


def test_layers_that_were_not_compiled_are_as_the_others(write, compiled):
    short = json.loads(json.dumps(COMPILED))
    for name in ("step", "cycle"):
        program = short["programs"][name]
        program["launches"]["kCustomKernel"] -= 58 * 11
        program["all_reduces"] -= 58 * 2
    short["conditions"]["layers"] = short["conditions"]["config"]["num_hidden_layers"] = 3
    few, whole = made("--launches", write("short.txt", short)), made("--launches", compiled)
    assert plan.plan_rows(few) == plan.plan_rows(whole)
    assert any("58 layers that were not compiled" in told for told in few.assumptions)


def test_collectives_outside_graphs_cost_host_launches(write, compiled):
    cut = json.loads(json.dumps(COMPILED))
    for name, graphs in (("step", 123), ("cycle", 132)):
        cut["programs"][name] |= {"graphs": graphs, "launches_outside_graphs": graphs}
    slow, fast = made("--launches", write("cut.txt", cut)), made("--launches", compiled)
    assert slow.step().host_launches == 248 and fast.step().host_launches == 3
    assert slow.cycle(3).host_launches == pytest.approx(266)
    added = plan.plan_rows(slow)[0]["ms_step"] - plan.plan_rows(fast)[0]["ms_step"]
    assert added == pytest.approx(245 * 5e-3, abs=2e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compiled_devices": 4}, "compiled for something else: compiled_devices"),
        ({"batch": 2}, "compiled for something else: batch"),
        ({"config": K25_CONFIG.to_dict() | {"hidden_size": 1}}, "something else: hidden_size"),
        ({"layers": 99}, "something else"),
        ({"config": None}, "not a whole output of compile_check.py"),
        ({"draft_tokens": 0}, "not of a compilation that went well"),
    ],
)
def test_launches_of_something_else_are_refused(write, change, said):
    path = write("other.txt", COMPILED | {"conditions": COMPILED["conditions"] | change})
    with pytest.raises(ValueError, match=said):
        made("--launches", path)


def test_launches_need_both_programs(write):
    path = write("step.txt", COMPILED | {"programs": {"step": COMPILED["programs"]["step"]}})
    with pytest.raises(ValueError, match="not of compile_check.py with its programs step and"):
        made("--launches", path)


# Routing traces.


def test_a_trace_replaces_the_bound(write):
    # Every token of every layer the same experts: a verification reads no more than a step.
    path = write("trace.json", {"expert_ids": [[list(range(8))] * 12] * 2})
    it = made("--routing", path)
    assert it.distinct == (8,) * 9
    assert it.cycle(3).reads["routed experts"] == it.step().reads["routed experts"]
    assert any(told == "rows choose experts as in trace.json" for told in it.assumptions)


@pytest.mark.parametrize(
    "trace",
    [
        {"rows": []},
        {"expert_ids": []},
        {"expert_ids": 3},
        {"expert_ids": [[1, 2]]},
        {"expert_ids": [[list(range(7))] * 9]},
        {"expert_ids": [[[384, *range(7)]] * 9]},
        {"expert_ids": [[[0, 0, *range(6)]] * 9]},
        {"expert_ids": [[["a", *range(7)]] * 9]},
    ],
)
def test_traces_of_something_else_are_refused(write, trace):
    with pytest.raises(ValueError, match=r"trace.json: expected .*\[8\].* below 384"):
        made("--routing", write("trace.json", trace))


def test_a_trace_needs_a_verification_of_tokens(write):
    path = write("trace.json", {"expert_ids": [[list(range(8))] * 4]})
    assert made("--routing", path, "--draft-tokens-max", 3).distinct == (8,) * 4
    with pytest.raises(ValueError, match="has 4 tokens, 5 are needed"):
        made("--routing", path, "--draft-tokens-max", 4)


# Interconnects.

MEASURED = {
    "measures": "collectives",
    "rows": [
        {"name": "all-reduce", "bytes": 1024, "us": 20.0},
        {"name": "all-reduce", "bytes": 65536, "us": 30.0},
        {"name": "all-gather", "bytes": 1024, "us": 10.0},
    ],
    "conditions": {"devices": 8, "device": "NVIDIA X", "platform": "gpu"},
}


def test_a_measured_file_replaces_the_table(write):
    it = made("--interconnect", write("measured.json", MEASURED))
    assert it.interconnect.title == "measured on NVIDIA X"
    latency = it.machine().latencies["all-reduce"]
    assert latency.seconds(1024) == pytest.approx(20e-6)
    assert latency.seconds(33280) == pytest.approx(25e-6)
    assert not any("collectives" in told for told in it.assumptions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"measures": "launches"}, "not a file of scripts/probe_collectives.py"),
        ({"rows": MEASURED["rows"][:2]}, "not a whole measurement"),
        ({"rows": [{"name": "all-reduce"}]}, "not a whole measurement"),
        ({"rows": [{"name": "send", "bytes": 1, "us": 1}]}, "not a whole measurement"),
        ({"conditions": {}}, "not a whole measurement"),
        ({"conditions": {"devices": 4}}, "measured over 4 devices, --devices is 8"),
    ],
)
def test_measurements_of_something_else_are_refused(write, change, said):
    with pytest.raises(ValueError, match=said):
        made("--interconnect", write("measured.json", MEASURED | change))


@pytest.mark.parametrize("name", INTERCONNECTS)
def test_every_table_has_its_source(name):
    table = INTERCONNECTS[name]
    assert (
        table.source and table.assumption and set(table.latencies) == {"all-reduce", "all-gather"}
    )
    # From a token's payload on more bytes take no less time.
    seconds = [table.latencies["all-reduce"].seconds(size) for size in (14336, 57344, 1 << 20)]
    assert seconds == sorted(seconds)


def test_every_figure_has_its_source():
    for name, figure in machines.FIGURES.items():
        assert figure.source and figure.unit and figure.value > 0, name


@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_gpu_can_be_planned(hardware):
    it = made("--hardware", hardware)
    memory = plan.plan_memory(it)
    assert memory["device_bytes"] == HARDWARE[hardware].memory_bytes
    assert (
        it.interconnect is INTERCONNECTS["nvlink" if HARDWARE[hardware].nvlinks else "pcie-switch"]
    )
    assert plan.plan_rows(it)[0]["ms_step"] > 0


def test_one_gpu_has_no_collectives(tmp_path):
    it = made("--config", "tiny", "--devices", 1, "--context", 64)
    assert it.step().collectives == () and it.machine().latencies == {}
    assert plan.plan_rows(it)[3]["ms_cycle"] > plan.plan_rows(it)[0]["ms_cycle"] > 0
    assert len(plan.largest_terms(it, 3)) == 3


# Memory and what is largest.


def test_memory_by_hand():
    memory = plan.plan_memory(made("--context", 8192))
    assert memory["cache_bytes"] == 70272 * 8192 and memory["drafter_cache_bytes"] == 4096 * 8192
    parts = [memory[name] for name in list(memory)[:6]]
    assert memory["total_bytes"] == sum(parts) == pytest.approx(79.03 * GB, abs=0.01 * GB)
    assert memory["fits"] and memory["longest_context"] == 262144
    # Caches come in steps of 256 slots.
    assert plan.plan_memory(made("--context", 8193))["cache_bytes"] == 70272 * 8448


def test_what_does_not_fit_says_so():
    memory = plan.plan_memory(made("--devices", 4))
    assert not memory["fits"] and memory["spare_bytes"] < 0 and memory["longest_context"] == 0
    tight = plan.plan_memory(made("--context", 262144, "--batch", 2))
    assert not tight["fits"] and 100_000 < tight["longest_context"] < 262144


def test_the_largest_terms_say_what_would_shrink_them():
    it = made()
    experts, reduces, kernels = plan.largest_terms(it, 3)
    assert [t["term"] for t in (experts, reduces, kernels)] == [
        "routed experts",
        "all-reduce",
        "kernels",
    ]
    assert "--routing" in experts["shrink"]
    # At 57 KB one shot is no faster than NCCL; at the 14 KB of a plain step it is.
    assert "a kernel that also takes the residual sum" in reduces["shrink"]
    assert (
        "a one-shot kernel in place of NCCL would save 1." in plan.largest_terms(it, 0)[0]["shrink"]
    )
    assert "a kernel less in every layer saves 0.12 ms" in kernels["shrink"]
    assert experts["ms"] > reduces["ms"] > kernels["ms"] > 0
    every = plan.largest_terms(it, 3, count=99)
    assert sum(t["ms"] for t in every) == pytest.approx(plan.plan_rows(it)[3]["ms_cycle"], abs=0.02)
    assert all(t["shrink"] for t in every)


# The command line.


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--hardware", "rtx-9000"], "invalid choice: 'rtx-9000'"),
        (["--interconnect", "infiniband"], "'infiniband', expected pcie-switch"),
        (["--interconnect", "nvlink"], "'nvlink', but rtx-pro-6000 has no NVLink"),
        (["--interconnect", "none.json"], "none.json: "),
        (["--acceptance", "0.7,1.2"], "acceptance_by_depth[1] must be in 0..1, got 1.2"),
        (["--acceptance", "-0.1"], "acceptance_by_depth[0] must be in 0..1"),
        (["--acceptance", "nan"], "must be in 0..1"),
        (["--acceptance", "high"], "'high', expected probabilities"),
        (["--acceptance", ""], "'', expected probabilities"),
        (["--cumulative", "--acceptance", "0.5,0.6"], "is 0.6, more than the 0.5 before it"),
        (["--context", "262145"], "--context is 262145, expected 1..262144"),
        (["--context", "0"], "--context is 0"),
        (["--devices", "7"], "does not divide this model"),
        (["--devices", "0"], "--devices is 0, expected 1..64"),
        (["--batch", "65"], "--batch is 65, expected 1..64"),
        (["--draft-tokens-max", "9"], "--draft-tokens-max is 9, expected 0..8"),
        (["--engine-launches", "0"], "--engine-launches is 0"),
        (["--engine-launches", "9", "--launches", "x"], "not allowed with"),
        (["--launches", "none.txt"], "none.txt: "),
        (["--config", "kimi-k9"], "'kimi-k9', expected kimi-k2.5"),
        (["--cache", "sequence", "--devices", "1"], "shares slots out over devices"),
        (["--plot", "plan.jpg"], "--plot plan.jpg: expected a .png"),
        (["--plot", "nowhere/plan.png"], "expected a .png in a folder that exists"),
    ],
)
def test_options_that_cannot_be_are_refused(monkeypatch, capsys, args, said):
    monkeypatch.setattr(sys, "argv", ["plan.py", *args])
    monkeypatch.setattr(plan, "target_bytes", None)  # nothing expensive before
    with pytest.raises(SystemExit) as stop:
        plan.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and err.count("error:") == 1


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        made("--plot", tmp_path / "plan.png")


def test_shares_of_cycles_are_turned_into_rates():
    rates = made("--cumulative", "--acceptance", "0.8,0.4,0.1", "--draft-tokens-max", 3).rates
    assert rates == pytest.approx((0.8, 0.5, 0.25))
    assert made("--acceptance", "0.3,0.6").rates == (0.3, 0.6, *[0.3] * 6)


def test_the_whole_script(script, tmp_path, compiled):
    png = tmp_path / "plan.png"
    out, text = script.json(
        "plan.py",
        *("--hardware", "rtx-pro-6000", "--devices", 8, "--interconnect", "pcie-switch"),
        *("--context", 8192, "--acceptance", "0.7,0.55,0.45", "--launches", compiled),
        *("--plot", png),
    )
    assert [row["draft_tokens"] for row in out["rows"]] == list(range(9))
    assert set(out["rows"][0]) == {
        "draft_tokens",
        "ms_step",
        "ms_cycle",
        "break_even",
        "tokens_per_cycle",
        "tokens_per_second",
    }
    assert out["rows"][0]["break_even"] == out["rows"][0]["tokens_per_cycle"] == 1
    assert out["rows"][3]["tokens_per_cycle"] == pytest.approx(1 + 0.7 + 0.385 + 0.17325, abs=1e-3)
    assert out["best_draft_tokens"] == 2 and len(out["largest_terms"]) == 3
    assert out["memory"]["fits"] and out["conditions"]["is_prediction"]
    assert out["conditions"]["figures"]["INT4 efficiency"]["is_assumption"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "PREDICTED, not measured" in text and "<- best" in text and "assumed" in text


def test_a_plot_in_this_process(tmp_path):
    it = made("--draft-tokens-max", 3)
    with warnings.catch_warnings():
        # Of matplotlib's own dependencies.
        warnings.simplefilter("ignore", DeprecationWarning)
        plan.draw(tmp_path / "a.png", it, plan.plan_rows(it), 2)
    assert (tmp_path / "a.png").stat().st_size > 10_000
