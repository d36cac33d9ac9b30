"""The tuner without a GPU: times are made up, what is made of them is real."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import pytest
import tune_tiles
from tune_tiles import FORMS, Form, Unusable

from kernels_pallas import tiles, timing
from kernels_pallas.dispatch import Target
from kernels_pallas.registry import OPS
from kernels_pallas.tiles import CHIPS, ChipTiles

CHIP = CHIPS[12, 0]


@dataclasses.dataclass
class FakeGpu:
    platform: str = "gpu"
    compute_capability: str = "12.0"


def form_of(field: str) -> Form:
    return next(form for form in FORMS if form.field == field)


def wide_is_fast(chip: ChipTiles, form: Form) -> float:
    """More columns are better up to 64, 8 warps do not compile, 128 inputs are wrong."""
    own = form.of(chip)
    if own.num_warps == 8:
        raise Unusable("does not compile: shared memory")
    if own.inputs == 128:
        raise Unusable("wrong: error 0.5, finite True")
    return 1e-5 * (2 - min(own.columns, 64) / 64) * (1 + 0.1 * own.num_stages)


def test_every_field_and_option_has_a_form():
    kinds = {(form.field, form.index) for form in FORMS}
    wanted = set()
    for field, value in CHIP._asdict().items():
        is_one = hasattr(value, "_fields")
        wanted |= {(field, None)} if is_one else {(field, i) for i in range(len(value))}
    assert kinds == wanted and len(FORMS) == len(wanted)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_tried_can_be_written(form):
    present = form.of(CHIP)
    assert form.spec in OPS[form.op].specs
    for group in form.groups:
        assert set(group) <= set(present._fields)
        for new in tune_tiles.candidates(group, present):
            row = form.put(CHIP, new)
            if form.index is None or new.rows == present.rows:
                assert tiles.loads(tiles.dumps({(12, 0): row})) == {(12, 0): row}
            assert form.of(row) == new


def test_the_shape_of_an_attention_form_takes_its_option():
    for form in (f for f in FORMS if f.op == "mla_attention"):
        spec = OPS[form.op].specs[form.spec]
        with tiles.trying(CHIP):
            found = tiles.mla_tiles(Target("gpu"), spec.T * spec.N, jnp.dtype(spec.dtype))
        assert found is form.of(CHIP)


def test_the_fastest_that_is_right_is_taken():
    form = form_of("gate_up")
    chip, row = tune_tiles.tune_form(CHIP, form, wide_is_fast)
    assert (form.of(chip).columns, form.of(chip).num_stages) == (64, 2)
    assert chip._replace(gate_up=CHIP.gate_up) == CHIP
    assert row["changed"] and row["gain"] == pytest.approx(1.95 / 1.2, rel=1e-3)
    reasons = {drop["reason"] for drop in row["dropped"]}
    assert reasons == {"does not compile: shared memory", "wrong: error 0.5, finite True"}
    assert row["tried"] > len(row["dropped"]) > 0


def test_a_gain_within_the_noise_changes_nothing():
    def nearly(chip, form):
        return 1e-5 if form.of(chip) == form.of(CHIP) else 0.98e-5

    chip, row = tune_tiles.tune_form(CHIP, form_of("down"), nearly)
    assert chip == CHIP and not row["changed"] and row["gain"] == pytest.approx(1.02, abs=1e-3)


def test_a_gain_that_is_not_found_again_changes_nothing():
    seen = {}

    def lucky(chip, form):
        own = form.of(chip)
        seen[own] = seen.get(own, 0) + 1
        return 0.5e-5 if own != form.of(CHIP) and seen[own] == 1 else 1e-5

    chip, row = tune_tiles.tune_form(CHIP, form_of("down"), lucky)
    assert chip == CHIP and not row["changed"] and row["gain"] == 1


def test_forms_without_time_and_rows_that_do_not_run_are_named():
    def broken(chip, form):
        raise Unusable("does not compile: no")

    forms = [form_of("down"), form_of("gate_up")]
    chip, records, not_run = tune_tiles.tune(CHIP, forms, broken, 100)
    assert (chip, records) == (CHIP, [])
    assert [n["reason"] for n in not_run] == ["its present tiles: does not compile: no"] * 2
    _, _, not_run = tune_tiles.tune(CHIP, forms, broken, 0)
    assert not_run[0] == {"form": "down", "reason": "the 0 s were over"}


def run_main(monkeypatch, capsys, path, *options, gpu=None, measure=wide_is_fast):
    monkeypatch.setattr(timing, "find_gpu", lambda: gpu or FakeGpu())
    monkeypatch.setattr(tune_tiles, "OnGpu", lambda seed: measure)
    argv = ["tune_tiles.py", "--file", str(path), *options]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stop:
        tune_tiles.main()
    out = capsys.readouterr().out
    return stop.value.code, out, json.loads(out.splitlines()[-1])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(tiles.dumps(CHIPS))
    return path


def test_the_row_of_the_gpu_is_rewritten_and_no_other(monkeypatch, capsys, path):
    fields = "--fields gate_up down".split()
    code, out, last = run_main(monkeypatch, capsys, path, *fields)
    assert code == 0 and last["chip"] == "12.0" and last["written"] == str(path)
    new = tiles.loads(path.read_text())
    assert {c: row for c, row in new.items() if c != (12, 0)} == {
        c: row for c, row in CHIPS.items() if c != (12, 0)
    }
    assert new[12, 0].gate_up.columns == 64 and new[12, 0].down == CHIP.down
    assert '+    "gate_up": {"columns": 64' in out
    assert [r["form"] for r in last["forms"]] == ["gate_up", "down"]


def test_a_dry_run_prints_and_writes_nothing(monkeypatch, capsys, path):
    before = path.read_text()
    _, out, last = run_main(monkeypatch, capsys, path, "--dry-run", "--fields", "gate_up")
    assert path.read_text() == before and last["changed"] and last["written"] is None
    assert '-    "gate_up": {"columns": 32' in out and '+    "gate_up": {"columns": 64' in out


def test_a_gpu_that_is_not_listed_gets_a_row(monkeypatch, capsys, path):
    gpu = FakeGpu(compute_capability="8.9")
    _, _, last = run_main(monkeypatch, capsys, path, "--fields", "gate_up", gpu=gpu)
    new = tiles.loads(path.read_text())
    assert last["chip"] == "8.9" and list(new) == [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert new[8, 9].gate_up.columns == 64 and new[8, 0] == CHIPS[8, 0]


def test_a_file_that_is_none_is_refused(monkeypatch, capsys, path):
    path.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["tune_tiles.py", "--file", str(path)])
    with pytest.raises(SystemExit) as stop:
        tune_tiles.main()
    assert stop.value.code == 1 and "expected an object with a row" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(script):
    run = script.run("tune_tiles.py")
    assert run.returncode == 2 and not run.stdout
    (line,) = run.stderr.splitlines()
    assert line.startswith("tune_tiles.py: JAX found 1 x cpu, and no NVIDIA GPU; needed: ")


def test_measuring_tells_a_wrong_kernel_from_one_that_does_not_compile(monkeypatch):
    form = dataclasses.replace(form_of("mla_32_bits"), spec="tiny-step")
    compare = timing.compare

    def interpreted(op, spec, operands, _, expected):
        return compare(op, spec, operands, "interpret", expected)

    monkeypatch.setattr(timing, "compare", interpreted)
    monkeypatch.setattr(timing, "seconds_per_call", lambda *_: timing.Timing(2e-6, 0.0, 1, 1))
    measure = tune_tiles.OnGpu(seed=0)
    assert measure(CHIP, form) == 2e-6
    monkeypatch.setattr(timing, "is_right", lambda *_: False)
    with pytest.raises(Unusable, match="wrong: error"):
        measure(CHIP, form)
    monkeypatch.setattr(timing, "compare", compare)
    with pytest.raises(Unusable, match="does not compile: mla_attention cannot run as 'triton'"):
        measure(CHIP, form)
