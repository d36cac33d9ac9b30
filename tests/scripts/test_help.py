"""Every script explains itself."""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in Path(__file__).parents[2].glob("scripts/*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name, monkeypatch, capsys):
    if name == "make_goldens":
        pytest.importorskip("compressed_tensors", reason="needs the extra `reference`")
    module = importlib.import_module(name)
    assert module.__doc__ and f"python scripts/{name}.py" in module.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert module.__doc__.splitlines()[0] in out.replace("\n", " ") and "--help" in out
