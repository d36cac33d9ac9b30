"""Every kernel compiles for every GPU it is meant for, on a machine without one.

Compiled in processes of their own: the CUDA plugin has to be admitted before JAX starts.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_check.py"

# What a block may use, from the CUDA programming guide's table of compute capabilities.
SHARED_KIB = {"a100": 163, "h100": 227, "b200": 227, "rtx-pro-6000": 99}

KERNELS = {
    "mla_attention": {"mla_attention_split", "mla_attention_merge"},
    "expert_ffn": {"experts_gate_up", "experts_down"},
}


@pytest.fixture(scope="module", params=SHARED_KIB)
def report(request):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the extra cuda12")
    command = [sys.executable, str(SCRIPT), "--hardware", request.param]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])["programs"]


def test_shared_memory_fits_and_no_kernel_spills(report):
    hardware, programs = report
    assert {p["op"] for p in programs} == set(KERNELS)
    for program in programs:
        where = f"{program['op']} {program['shape']}"
        for launch in program["launches"]:
            assert launch["shared_bytes"] <= SHARED_KIB[hardware] * 1024, f"{where}: {launch}"
        for kernel, made in program["assembled"].items():
            assert made["spilled_bytes"] <= 64, f"{where}: {kernel} spills"


def test_few_tokens_take_two_launches_and_copy_no_weights(report):
    _, programs = report
    for program in programs:
        if program["shape"] in ("kimi-batch", "kimi-prefill", "kimi-tree"):
            continue
        names = {launch["name"] for launch in program["launches"]}
        # A float32 verification rounds nothing; XLA may still prepare a cast of the lengths.
        assert names == KERNELS[program["op"]], program["shape"]
        assert program["other_launches"] == [], program["shape"]
        if program["op"] == "expert_ffn":
            assert program["temp_bytes"] < 1 << 20, program["shape"]
