"""The comparison helpers of numerics.py, as fixtures (test folders are not packages)."""

import importlib.util
from pathlib import Path

import pytest


def load(path: Path):
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


NUMERICS = load(Path(__file__).parent / "numerics.py")


@pytest.fixture(scope="session")
def assert_close():
    return NUMERICS.assert_close


@pytest.fixture(scope="session")
def assert_close_to_scale():
    return NUMERICS.assert_close_to_scale
