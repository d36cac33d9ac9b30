"""The probe on simulated devices: what it writes, and that the planner reads it."""

import json
import sys

import plan
import probe_collectives as probe
import pytest

from kimi_jax.runtime.mesh import make_mesh


def test_sizes_are_powers_of_two():
    assert probe.sizes_between(1024, 8192) == (1024, 2048, 4096, 8192)
    assert probe.sizes_between(1 << 10, 1 << 21) == tuple(1 << e for e in range(10, 22))


@pytest.mark.parametrize("kind", probe.KINDS)
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"expert": 2, "tensor": 2}])
def test_a_chain_is_compiled_whole(kind, mesh):
    # It counts its collectives itself, and runs.
    probe.compile_chain(make_mesh(mesh), kind, 4096, turns=2)()


def test_a_chain_that_is_folded_is_not_timed(monkeypatch):
    monkeypatch.setattr(probe, "_chain", lambda kind, axes, turns, x, own: x)
    with pytest.raises(RuntimeError, match="8 all-reduce became 0 all-reduce: not timed"):
        probe.compile_chain(make_mesh({"tensor": 2}), "all-reduce", 4096, turns=2)


def test_rows_are_whole():
    rows = probe.measure(make_mesh({"tensor": 8}), (1024, 16384), repeats=2, turns=1)
    assert [(row["name"], row["bytes"]) for row in rows] == [
        ("all-reduce", 1024),
        ("all-reduce", 16384),
        ("all-gather", 1024),
        ("all-gather", 16384),
    ]
    for row in rows:
        assert 0 < row["us_least"] <= row["us"] <= row["us_most"] and row["us_between"] > 0


def test_without_nvidia_smi_topology_is_null(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert probe.read_topology() == {"topology": None, "peer_access": None}


def test_nvidia_smi_is_read_by_lines(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "GPU0 $*"\necho "GPU1 X"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert probe.read_topology() == {
        "topology": ["GPU0 topo -m", "GPU1 X"],
        "peer_access": ["GPU0 topo -p2p r", "GPU1 X"],
    }
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert probe.read_topology() == {"topology": None, "peer_access": None}


@pytest.mark.slow
def test_the_planner_reads_its_file(script, tmp_path):
    path = tmp_path / "measured.json"
    out, text = script.json(
        "probe_collectives.py",
        *("--mesh", "tensor=2", "--platform", "cpu", "--least", 4096, "--most", 65536),
        *("--repeats", 2, "--turns", 1, "--out", path),
    )
    assert json.loads(path.read_text()) == out
    assert len(out["rows"]) == 2 * 5 and out["conditions"]["devices"] == 2
    assert "all-reduce" in text and "between" in text
    args = ["--interconnect", str(path), "--devices", "2"]
    it = plan.make_plan(plan.make_parser().parse_args(args))
    [row] = [r for r in out["rows"] if (r["name"], r["bytes"]) == ("all-reduce", 16384)]
    assert it.machine().latencies["all-reduce"].seconds(16384) == pytest.approx(1e-6 * row["us"])
    assert any("no GPU" in told for told in it.assumptions)
    terms = [t["term"] for t in plan.largest_terms(it, 3, count=99)]
    assert "all-reduce" in terms and "all-gather" in terms


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mesh", "tensor"], "expected e.g. 'tensor=8'"),
        (["--mesh", "tensor=1"], "--mesh has 1 devices, expected 2..64"),
        (["--mesh", "tensor=65"], "--mesh has 65 devices"),
        (["--repeats", "0"], "must be at least 1"),
        (["--turns", "0"], "must be at least 1"),
        (["--least", "8"], "--least 8 and --most 2097152: expected 16 <="),
        (["--least", "4096", "--most", "1024"], "--least 4096 and --most 1024"),
        (["--out", "nowhere/measured.json"], "no such folder"),
    ],
)
def test_options_that_cannot_be_are_refused(monkeypatch, capsys, args, said):
    monkeypatch.setattr(sys, "argv", ["probe_collectives.py", *args])
    monkeypatch.setattr(probe, "make_mesh", None)  # nothing expensive before
    with pytest.raises(SystemExit) as stop:
        probe.main()
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_mesh_that_is_not_there_is_an_error(script):
    run = script.run("probe_collectives.py", "--mesh", "tensor=2", "--platform", "gpu")
    assert run.returncode == 1 and "probe_collectives.py: error: no gpu device" in run.stderr
    assert "Traceback" not in run.stderr
