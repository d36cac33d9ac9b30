"""Tiny checkpoints against what transformers computed for them (scripts/make_goldens.py).

The checkpoints are made again from their seeds, so the files hold inputs and outputs only.
"""

import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from make_random_checkpoint import make_random_checkpoint
from pieces import cached_logits, check_greedy, quick_compiles
from safetensors.numpy import load_file

from kimi_jax import LLM, SamplingParams
from kimi_jax.model.transformer import forward

# Of the largest value: float32 sums in another order, three layers deep.
TOLERANCE = 2e-4
NAMES = ("tiny-float", "tiny-int4", "tiny-groups")


class Golden:
    def __init__(self, name: str, folder: Path):
        with np.load(Path(__file__).parent / f"{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.about = json.loads(str(self.arrays["about"]))
        self.tokens = self.arrays["tokens"]
        self.folder = folder
        make_random_checkpoint(folder, **self.about["checkpoint"])

    def close(self, actual: np.ndarray, key: str, tolerance: float = TOLERANCE) -> None:
        expected = self.arrays[key]
        assert actual.shape == expected.shape
        largest = np.abs(expected).max()
        assert np.abs(actual - expected).max() <= tolerance * largest, key


@pytest.fixture(scope="module", params=NAMES)
def golden(request, tmp_path_factory) -> Golden:
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


def test_checkpoint_is_the_one_the_golden_was_made_from(golden):
    crc = 0
    (path,) = golden.folder.glob("*.safetensors")
    for name, tensor in sorted(load_file(path).items()):
        crc = zlib.crc32(tensor.tobytes(), zlib.crc32(name.encode(), crc))
    assert crc == golden.about["checkpoint_crc32"]


def test_oracle_agrees(golden):
    config, tensors = oracles.read_checkpoint(golden.folder)
    out = oracles.forward(tensors, config, golden.tokens)
    golden.close(out.logits[golden.arrays["positions"]], "logits", 1e-5)
    golden.close(out.hidden, "hidden", 1e-5)
    experts = np.stack([np.sort(ids, axis=-1) for ids in out.experts.values()])
    np.testing.assert_array_equal(experts, golden.arrays["experts"])


@pytest.fixture(scope="module")
def llm(golden) -> LLM:
    return LLM(golden.folder, dtype="float32", max_length=64)


@pytest.fixture(scope="module")
def llm_on_eight(golden) -> LLM:
    return LLM(golden.folder, dtype="float32", max_length=64, mesh={"tensor": 8})


@pytest.mark.parametrize("name", ["llm", "llm_on_eight"])
def test_logits(golden, name, request):
    llm = request.getfixturevalue(name)
    golden.close(llm.logits(golden.tokens.tolist())[golden.arrays["positions"]], "logits")


@pytest.mark.parametrize("size", [16, 1])
def test_logits_through_the_cache(golden, llm, size):
    logits = cached_logits(llm, golden.tokens, [size] * (len(golden.tokens) // size))
    golden.close(logits[golden.arrays["positions"]], "logits")


@pytest.mark.slow
def test_decoding_on_eight_devices(golden, llm_on_eight):
    """The token after each known position past the 32 of training, and a longer reply."""
    tokens, original = golden.tokens.tolist(), 32
    rows = np.flatnonzero(golden.arrays["positions"] >= original)
    prompts = [tokens[: position + 1] for position in golden.arrays["positions"][rows]]
    one = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=5)
    many = SamplingParams(max_new_tokens=36, ignore_eos=True)
    with quick_compiles():
        *results, reply = llm_on_eight.generate(
            [*prompts, tokens[:20]], [one] * len(prompts) + [many]
        )
    expected = golden.arrays["logits"][rows].astype(np.float64)
    check_greedy([result.token_ids[0] for result in results], expected)
    for result, logits in zip(results, expected, strict=True):
        log_probs = logits - np.log(np.exp(logits).sum())
        for token, logprob in result.logprobs[0].top:
            assert abs(logprob - log_probs[token]) <= TOLERANCE * np.abs(logits).max()
    config, tensors = oracles.read_checkpoint(golden.folder)
    logits = oracles.forward(tensors, config, [*tokens[:20], *reply.token_ids]).logits
    check_greedy(reply.token_ids, logits[19:-1])


def test_hidden_states_and_experts(golden, llm):
    layers = len(golden.arrays["hidden"]) - 1
    tokens = jnp.asarray(golden.tokens)[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    out = jax.jit(lambda model: forward(model, tokens, positions, taps=tuple(range(layers + 1))))(
        llm.model
    )
    golden.close(np.stack([np.asarray(tap[0]) for tap in out.taps]), "hidden")
    experts = np.stack([np.sort(np.asarray(r.expert_ids), axis=-1) for r in out.routing])
    np.testing.assert_array_equal(experts, golden.arrays["experts"])
