"""Strict numerics, 8 CPU devices and one cache of compiled programs for every test."""

import atexit
import logging
import os
import shutil
import tempfile

# Read once by XLA when the backend starts, so before JAX is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# Most of the tests' time is compiling. What one worker, or one script, has compiled the others of
# this run read; name a folder to keep it from run to run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="kimi-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import numerics  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def log_level():
    """Scripts' main functions set it."""
    logging.getLogger("kimi_jax").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def assert_close():
    return numerics.assert_close


@pytest.fixture(scope="session")
def assert_close_to_scale():
    return numerics.assert_close_to_scale
