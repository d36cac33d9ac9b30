"""Strict numerics and 8 CPU devices for every test."""

import os

# Read once by XLA when the backend starts, so before JAX is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402
import numerics  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def assert_close():
    return numerics.assert_close


@pytest.fixture(scope="session")
def assert_close_to_scale():
    return numerics.assert_close_to_scale
