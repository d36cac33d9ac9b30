"""XLA flags: set once, before JAX starts; the user's own stay."""

import os

import jax
import pytest
from jax._src import xla_bridge

from kimi_jax.runtime.flags import (
    GRAPHS_WITH_COLLECTIVES,
    MEMORY_FRACTION,
    default_compile_cache,
    parse_nccl,
    set_compile_cache,
    set_gpu_environment,
    set_gpu_flags,
    settings,
)

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
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert flags("", has_started=True) == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="reads its flags once"):
        flags("", has_started=True)
    assert flags(GRAPHS_WITH_COLLECTIVES, has_started=True) == GRAPHS_WITH_COLLECTIVES


@pytest.fixture
def environment(monkeypatch):
    """Has nothing of these settings but what is given, before JAX starts or after."""

    def environment(*, has_started: bool = False, **given: str) -> None:
        for name in list(os.environ):
            if name.startswith("NCCL_") or name.endswith("CLIENT_MEM_FRACTION"):
                monkeypatch.delenv(name)
        # Known to the fixture, so that what is set meanwhile goes with it.
        for name in ("NCCL_P2P_LEVEL", "NCCL_PROTO", MEMORY_FRACTION):
            monkeypatch.setenv(name, "")
            del os.environ[name]
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: has_started)

    return environment


def test_what_the_user_has_set_stays(environment):
    environment(NCCL_P2P_LEVEL="PHB")
    set_gpu_environment({"NCCL_PROTO": "LL"})
    told = settings()
    assert (told["NCCL_P2P_LEVEL"], told["NCCL_PROTO"], told[MEMORY_FRACTION]) == (
        "PHB",
        "LL",
        "0.95",
    )
    # What is asked for by name wins over the environment.
    set_gpu_environment({"NCCL_P2P_LEVEL": "SYS"})
    assert os.environ["NCCL_P2P_LEVEL"] == "SYS"


def test_the_memory_fraction_is_set_by_one_name_alone(environment):
    """XLA refuses both."""
    environment(XLA_PYTHON_CLIENT_MEM_FRACTION="0.8")
    set_gpu_environment()
    assert MEMORY_FRACTION not in os.environ


def test_it_is_too_late_for_a_gpu_that_has_started(environment, monkeypatch):
    environment(has_started=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    set_gpu_environment()
    assert MEMORY_FRACTION not in os.environ
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="set XLA_CLIENT_MEM_FRACTION=0.95 NCCL_P2P_LEVEL=SYS"):
        set_gpu_environment()


@pytest.mark.parametrize("text", ["", "LL", "PROTO=LL", "NCCL_PROTO", "NCCL_A=1,NCCL_A=2"])
def test_nccl_settings_that_say_nothing(text):
    with pytest.raises(ValueError, match="expected e.g. NCCL_PROTO=LL,NCCL_P2P_LEVEL=SYS"):
        parse_nccl(text)


def test_the_compile_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/x")
    assert str(default_compile_cache()) == "/x"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_compile_cache() == tmp_path / "kimi_jax" / "compiled"
    names = [
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        set_compile_cache(tmp_path / "own")
        assert (tmp_path / "own").is_dir()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
        set_compile_cache(None)
        assert not jax.config.jax_enable_compilation_cache
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
