"""What `LLM` is given when it is made, its dtypes, and what a measurement depends on."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.runtime import flags
from kimi_jax.runtime.conditions import conditions, num_compiles
from kimi_jax.runtime.llm import LLM

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float16"}, r"dtype is 'float16', expected one of \['bfloat16', 'float32'\]"),
        ({"dtype": ""}, "dtype is ''"),
        ({"max_length": 1}, r"max_length is 1, expected 2\.\.512"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": 513}, r"max_length is 513, expected 2\.\.512"),
        ({"max_batch": 0}, "max_batch is 0, expected at least 1"),
    ],
)
def test_options_that_cannot_be_are_named_before_loading(folder, monkeypatch, options, message):
    before = num_compiles()
    monkeypatch.setattr("kimi_jax.runtime.llm.load_params", None)
    with pytest.raises(ValueError, match=message):
        LLM(folder, **options)
    assert num_compiles() == before


def test_max_length_defaults_to_the_models_own_limit(folder):
    llm = LLM(folder, progress=False)
    assert llm.max_length == 512 and llm.dtype == "float32"
    assert llm.load_seconds > 0


def test_loading_compiles_nothing(folder):
    LLM(folder, max_length=256, progress=False)
    before = num_compiles()
    LLM(folder, max_length=256, progress=False)
    assert num_compiles() == before


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(make_llm, llm, ids, on):
    """Weights are bfloat16 in the file, so only activations round, to 2^-9 each.

    Some twenty roundings in a row over two layers: 3 % of a token's logits in the mean square. Not
    for all tokens, because rounding now and then chooses another expert.
    """
    half = make_llm(dtype="bfloat16")
    assert half.engine.target_weights["norm"][...].dtype == jnp.bfloat16
    prompt = ids(40)
    expected, found = llm.logits(prompt), half.logits(prompt)
    assert found.dtype == np.float32
    error = np.sqrt(np.mean((found - expected) ** 2, -1) / np.mean(expected**2, -1))
    assert (error > 1e-4).all() and np.quantile(error, 0.9) < 0.03
    [result] = half.generate([prompt[:1]], on(39, logprobs=1))
    assert len(result.token_ids) == 39
    log_probs = jax.nn.log_softmax(half.logits([*prompt[:1], *result.token_ids])[:-1])
    # Decoding attends in another form than prefill, so near ties may fall either way.
    chosen = log_probs[np.arange(39), list(result.token_ids)]
    given = np.array([entry.logprob for entry in result.logprobs])
    assert np.quantile(np.abs(given - chosen), 0.9) < 0.1
    assert np.quantile(np.max(log_probs, axis=-1) - chosen, 0.9) < 0.1


def test_latent_norm_eps_can_be_overridden(folder, llm):
    assert LLM(folder, latent_norm_eps=1e-2, progress=False).cfg.latent_norm_eps == 1e-2
    assert llm.cfg.latent_norm_eps == 1e-6


# Conditions and flags.


def test_conditions_say_what_two_runs_may_differ_in():
    found = conditions(context=128)
    assert found["jax"] == jax.__version__
    assert (found["platform"], found["device_count"]) == ("cpu", 8)
    assert "--xla_force_host_platform_device_count=8" in found["xla_flags"]
    assert found["context"] == 128
    assert {"kimi_jax", "flax", "python", "device", "cpu_cores", "commit"} <= set(found)
    json.dumps(found)


def test_compiles_are_counted():
    before = num_compiles()
    function = jax.jit(lambda x: x * 2 + before)
    one = jnp.ones((7,))
    start = num_compiles()
    function(one)
    function(one)
    assert num_compiles() == start + 1


def test_host_devices_cannot_be_added_once_jax_runs():
    flags.set_host_device_count(8)
    with pytest.raises(RuntimeError, match="16 devices are wanted.*started with 8.*count=16"):
        flags.set_host_device_count(16)


def test_host_devices_are_set_before_jax_runs(monkeypatch):
    monkeypatch.setattr(flags.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    flags.set_host_device_count(4)
    assert flags.os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
