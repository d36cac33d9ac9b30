"""What is installed: the three packages, the demo's files, and nothing that starts JAX."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
DEMO_FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tiktoken.model",
    "tokenizer_config.json",
}


def test_version():
    assert importlib.metadata.version("kimi-jax").split(".")[0].isdecimal()


@pytest.mark.parametrize("name", ["kimi_jax", "spec", "kernels_pallas"])
def test_packages_import(name):
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == ROOT / name
    assert module.__doc__


def test_the_demo_is_complete():
    names = {path.name for path in (ROOT / "kimi_jax" / "demo").iterdir()}
    assert names >= DEMO_FILES


def test_the_demo_s_drafter_is_complete_and_small():
    files = list((ROOT / "kimi_jax" / "demo" / "drafter").iterdir())
    assert {path.name for path in files} == {"README.md", "config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in files) <= 6_000_000


def test_a_wheel_holds_the_packages_and_the_demo(tmp_path):
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    for package in ("kimi_jax", "spec", "kernels_pallas"):
        on_disk = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert on_disk <= names
    assert "kernels_pallas/tiles.json" in names
    demo = (path for path in (ROOT / "kimi_jax" / "demo").rglob("*") if path.is_file())
    assert {path.relative_to(ROOT).as_posix() for path in demo} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kimi_jax",
        "spec",
        "kernels_pallas",
    }


def test_importing_does_not_start_jax():
    # A platform that does not exist fails as soon as a backend is asked for.
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import kimi_jax, spec, kernels_pallas\n"
            "from jax._src import xla_bridge\n"
            "print(xla_bridge.backends_are_initialized())",
        ],
        env=os.environ | {"JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"


def test_the_readme_lists_every_module_and_script():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+\.py)` \|", text, re.MULTILINE))
    folders = ("kimi_jax", "spec", "kernels_pallas", "scripts")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    names = {p.relative_to(ROOT).as_posix() for p in files if p.name != "__init__.py"}
    assert listed == names | {"tests/oracles.py", "tests/drafter_oracle.py"}
