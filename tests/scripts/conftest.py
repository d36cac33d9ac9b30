"""A tiny random checkpoint, and scripts run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_random_checkpoint import make_random_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts") / "tiny"
    # Twice the preset's length: tool declarations are long in bytes.
    make_random_checkpoint(folder, "tiny", seed=4, max_position_embeddings=256)
    return folder


class Script:
    """Starts scripts with one visible CPU device, as outside the tests."""

    def __init__(self):
        self.env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}

    def command(self, name: str, *args: object) -> list[str]:
        return [sys.executable, str(ROOT / "scripts" / name), *map(str, args)]

    def run(self, name: str, *args: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(name, *args),
            capture_output=True,
            encoding="utf-8",
            env=self.env,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )

    def json(self, name: str, *args: object) -> tuple[dict, str]:
        """The last line of stdout, and what stands before it; the script must succeed."""
        run = self.run(name, *args)
        assert run.returncode == 0, run.stderr
        assert "Traceback" not in run.stderr
        before, newline, last = run.stdout.removesuffix("\n").rpartition("\n")
        return json.loads(last), before + newline

    def start(self, name: str, *args: object) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(name, *args), stdout=pipe, stderr=pipe, env=self.env, text=True
        )


@pytest.fixture(scope="session")
def script() -> Script:
    return Script()
