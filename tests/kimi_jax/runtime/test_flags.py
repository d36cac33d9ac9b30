"""XLA flags: set once, before JAX starts; the user's own stay."""

import os

import jax
import pytest
from jax._src import xla_bridge

from kimi_jax.runtime.flags import GRAPHS_WITH_COLLECTIVES, set_gpu_flags

OWN = "--xla_gpu_enable_command_buffer=FUSION"


@pytest.fixture
def flags(monkeypatch):
    """Sets XLA_FLAGS, the JAX version and whether it has started; gives the flags afterwards."""

    def run(before: str, *, version=(0, 12, 0), has_started=False, **options) -> str:
        monkeypatch.setenv("XLA_FLAGS", before)
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: has_started)
        set_gpu_flags(**options)
        return os.environ["XLA_FLAGS"]

    return run


def test_the_flag_is_added_to_the_users_own_and_said(flags, caplog):
    caplog.set_level("INFO")
    assert flags("--xla_dump_to=/x") == f"--xla_dump_to=/x {GRAPHS_WITH_COLLECTIVES}"
    assert GRAPHS_WITH_COLLECTIVES in caplog.text


def test_the_users_own_choice_wins(flags):
    assert flags(OWN) == OWN
    assert flags(OWN, has_started=True) == OWN


def test_collectives_can_stay_outside(flags):
    assert flags("", collectives_in_graphs=False) == ""


def test_an_older_jax_has_no_use_for_it(flags):
    assert flags("", version=(0, 10, 2)) == ""


def test_it_is_too_late_once_jax_has_started(flags, monkeypatch):
    # On a CPU it changes nothing either way.
    assert flags("", has_started=True) == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="reads its flags once"):
        flags("", has_started=True)
    assert flags(GRAPHS_WITH_COLLECTIVES, has_started=True) == GRAPHS_WITH_COLLECTIVES
