"""The GPU check's own code, on tiny shapes with interpreted kernels; and the timing under it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import timing
from kernels_pallas.registry import OPS, Op, Product

SHELL = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


def shell(*args: object, **env: str) -> subprocess.CompletedProcess:
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        ["bash", str(SHELL), *map(str, args)],
        capture_output=True,
        encoding="utf-8",
        env=keep | {"PYTHON": sys.executable} | env,
        timeout=300,
    )


@pytest.mark.slow
def test_everything_is_run_in_small(tmp_path):
    path = tmp_path / "out.json"
    # Little runs here, and much is compiled.
    run = shell(path, "--interpret", XLA_FLAGS="--xla_backend_optimization_level=0")
    assert run.returncode == 0, run.stderr + run.stdout
    *table, last = run.stdout.splitlines()
    out = json.loads(last)
    assert json.loads(path.read_text()) == out
    assert out["passed"] and not out["failures"] and not out["not_run"]
    assert [row["op"] for row in out["ops"]] == list(OPS)
    for row in out["ops"]:
        assert row["passed"] and row["error"] <= row["tolerance"] and row["tolerance_reason"]
        assert min(row["us"], row["us_copy_roof"], row["mb_read"]) > 0
        assert row["us_dense"] is None if row["op"] == "choose_experts" else row["us_dense"] > 0
    rows = out["slice"]["rows"]
    assert [(row["context"], row["rows"]) for row in rows] == [(16, 1), (16, 2)]
    assert rows[0]["over_step"] == 1 and rows[1]["over_step"] > 0
    assert len(out["slice"]["measured"]) == 4 and "no collectives" in out["slice"]["what"]
    assert out["conditions"]["jax"] == jax.__version__ and "clocks_at_end" in out
    assert any("us_copy_roof" in line for line in table)


def test_without_a_gpu_it_says_so_at_once(tmp_path):
    run = shell(tmp_path / "out.json", JAX_PLATFORMS="cpu")
    assert run.returncode == 2 and not run.stdout
    (line,) = run.stderr.splitlines()
    assert "JAX found 1 x cpu, and no NVIDIA GPU; needed: an NVIDIA GPU of compute" in line
    assert not list(tmp_path.iterdir())


def test_what_gets_no_time_is_named(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.json"
    argv = ["gpu_check.py", "--interpret", "--budget", "0", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stop:
        gpu_check.main()
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Nothing is wrong, but nothing was looked at.
    assert stop.value.code == 1 and not out["passed"] and out["ops"] == []
    names = [part["part"] for part in out["not_run"]]
    specs = gpu_check.interpreted_plan().specs
    shapes = [(op, spec) for op in OPS for spec in specs[op]]
    assert names == [
        "copy bandwidth",
        *(f"{op} {spec}: {part}" for op, spec in shapes for part in ("check", "time")),
        "slice: random weights",
        "slice: all times",
    ]
    reasons = {part["reason"].lstrip("-0123456789") for part in out["not_run"]}
    assert reasons == {" s were left, and it may take 20 s", "it was not checked",
                       "there are no weights"}  # fmt: skip
    assert json.loads(path.read_text()) == out


def test_a_part_that_fails_costs_no_other(tmp_path):
    run = gpu_check.Run(None, 1000.0)

    def fail():
        raise RuntimeError("first line\nsecond line")

    assert run.part("kind", "one", fail) is None
    assert run.part("kind", "two", lambda: 5) == 5
    assert run.out["failures"] == [{"part": "one", "error": "RuntimeError: first line"}]


def test_a_part_is_left_out_that_would_take_longer_than_is_left():
    run = gpu_check.Run(None, 0.5)
    run.longest["kind"] = 0.1
    assert run.part("kind", "short", lambda: time.sleep(0.2) or 1) == 1
    assert run.part("kind", "kept from it", lambda: 1, reserve=0.2) is None
    assert "0 s of them kept for what follows" in run.out["not_run"][0]["reason"]


def test_a_wrong_kernel_is_found():
    class Spec:
        dtype = "float32"

    def op(x, *, implementation):
        wrong = 0.0 if implementation == "xla" else 1e-3
        return x + wrong, jnp.argmax(x) + int(implementation != "xla")

    entry = Op(op, {"one": Spec()})
    x = jnp.array([1.0, -4.0])
    found = timing.compare(entry, "one", (x,), "interpret")
    assert found.error == pytest.approx(1e-3 / 4, rel=1e-3)
    assert found.mismatches == 1 and found.is_finite
    found = timing.compare(entry, "one", (jnp.array([1.0, jnp.inf]),), "interpret")
    assert not found.is_finite


def test_every_call_of_the_loop_is_made():
    calls = []

    def count(x):
        jax.debug.callback(lambda _: calls.append(1), x[0, 0])
        return x @ x, x.astype(jnp.int32)

    variants = [(jnp.eye(4) * k,) for k in range(3)]
    spent = timing.seconds_per_call(count, variants, repeats=2, least_calls=7)
    jax.effects_barrier()
    assert spent.calls == 9 and spent.runs == 2 and spent.seconds > 0
    assert len(calls) == 9 * (timing.WARM_UPS + 2)


def test_a_loop_changes_no_operand():
    seen = []

    def keep(x, ids):
        jax.debug.callback(lambda *a: seen.append([np.asarray(v).tolist() for v in a]), x, ids)
        return x

    x, ids = jnp.full((4,), jnp.nan), jnp.array([3, 5])
    timing.seconds_per_call(keep, [(x, ids)], repeats=1, least_calls=2)
    jax.effects_barrier()
    assert all(ids == [3, 5] for _, ids in seen) and len(seen) == 2 * (timing.WARM_UPS + 1)


def test_what_a_call_costs_at_the_least():
    experts, attention = OPS["expert_ffn"], OPS["mla_attention"]
    spec = experts.specs["tiny-verify"]
    x, weights, ids, combine, shared = spec.operands()
    ids[:] = ids[0]
    one_expert = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) // spec.E
    small = x.nbytes + ids.nbytes + combine.nbytes
    small += sum(leaf.nbytes for leaf in shared)
    operands = x, weights, ids, combine, shared
    assert experts.bytes_read(spec, operands) == 4 * one_expert + small
    assert experts.products(spec, operands) == [
        Product(4, 4, 256, 512),
        Product(4, 4, 256, 256),
        Product(1, 4, 256, 256),
    ]
    spec = attention.specs["kimi-verify"]
    first, second = attention.products(spec, None)
    assert (first, second) == (Product(1, 32, 576, 8192), Product(1, 32, 8192, 512))
    spec = attention.specs["tiny-tree"]
    last = attention.variant(spec, spec.operands(), 0)[3]
    assert np.all(np.asarray(last) + spec.X == spec.S - 1)


def test_dense_products_over_the_memory_are_refused():
    with pytest.raises(ValueError, match="2.1 GB of dense weights, over the 1.1 allowed"):
        timing.dense_seconds([Product(1, 1, 32768, 32768)], most_bytes=1 << 30)


def test_the_slice_is_one_eighth_of_kimi():
    cfg = gpu_check.share_of_kimi()
    assert (cfg.num_attention_heads, cfg.moe_intermediate_size, cfg.vocab_size) == (8, 256, 20480)
    assert (cfg.intermediate_size, cfg.n_routed_experts, cfg.hidden_size) == (2304, 384, 7168)
    assert [cfg.is_moe_layer(i) for i in range(cfg.num_hidden_layers)] == [False, True, True, True]


def test_a_layer_is_the_difference_of_two_depths():
    class Plan:
        depths = (2, 4)

    def m(layers, rows, ms):
        return {"layers": layers, "rows": rows, "context": 8, "ms": ms, "spread": 0.0,
                "distinct_experts": 8.0}  # fmt: skip

    measured = [m(4, 1, 1.0), m(4, 4, 1.8), m(4, 2, 1.2), m(2, 1, 0.6), m(2, 4, 0.8)]
    step, two, four = gpu_check.summarise(measured, Plan)
    assert (step["ms_moe_layer"], step["over_step"]) == (0.2, 1.0)
    assert (four["ms_moe_layer"], four["over_step"], four["layer_over_step"]) == (0.5, 1.8, 2.5)
    assert (two["ms_moe_layer"], two["layer_over_step"], two["over_step"]) == (None, None, 1.2)


def test_calls_that_are_timed_read_other_memory():
    for name, shared in (("expert_ffn", "experts"), ("mla_attention", None)):
        op, spec = OPS[name], OPS[name].specs["tiny-step"]
        operands = jax.tree.map(jnp.array, spec.operands())
        first, second, third = timing.timed_variants(op, "tiny-step", operands, most=3)
        places = [[leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(v)] for v in (
            first, second, third)]  # fmt: skip
        same = [len(set(each)) == 1 for each in zip(*places, strict=True)]
        # The weights and the shares are the same arrays; a call reads its own experts alone.
        assert sum(same) == (7 if shared else 0)
        if shared:
            assert len({np.asarray(v[2]).tobytes() for v in (first, second, third)}) > 1


def test_a_copy_s_bandwidth_and_dense_products_are_measured():
    assert timing.copy_bytes_per_second(1 << 16, repeats=1) > 0
    assert np.all(
        np.asarray(timing.copied_over_and_over(jnp.zeros(4, jnp.uint32))) == timing.COPIES
    )
    products = [Product(2, 3, 32, 16), Product(1, 3, 16, 32)]
    spent = timing.dense_seconds(
        products, most_bytes=1 << 20, most_variants=2, repeats=1, least_calls=3
    )
    assert spent.calls == 4 and spent.seconds > 0


def test_an_op_that_says_nothing_of_its_cost_reads_its_operands_once():
    x, kernels = jnp.ones((3, 8)), (jnp.ones((8, 4)), jnp.ones((8, 2, 3)))
    operands = x, x, None, jnp.ones(8), kernels, jnp.ones((3, 2), jnp.int32)
    op = Op(lambda *_, implementation: None, {})
    assert op.bytes_read(None, operands) == 4 * (24 + 24 + 8 + 32 + 48 + 6)
    assert op.products(None, operands) == [Product(1, 3, 8, 4), Product(1, 3, 8, 6)]
