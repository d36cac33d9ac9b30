"""Logits against transformers, live: whole prompts, chunks, one token at a time, 1 and 8 devices.

Checkpoints are stored as published (bfloat16, INT4 experts) and run in float32 on both sides.
Prompts pass `original_max_position_embeddings` (32) twice over, so every YaRN term counts.
"""

import numpy as np
import oracles
import pytest
from make_random_checkpoint import make_random_checkpoint
from pieces import cached_logits, check_greedy, quick_compiles

from kimi_jax import LLM, SamplingParams
from kimi_jax.config import RopeConfig

pytestmark = pytest.mark.reference

NUM_TOKENS = 96
# Of the largest logit: float32 sums in another order, three layers deep.
TOLERANCE = 2e-4
CASES = {
    "int4 nested": {"seed": 11, "experts": "int4", "prefix": True},
    "int4 flat": {"seed": 12, "experts": "int4", "prefix": False},
    "bf16 nested": {"seed": 13, "experts": "bf16", "prefix": True},
    "bf16 flat": {"seed": 14, "experts": "bf16", "prefix": False},
    "groups": {"seed": 15, "experts": "int4", "prefix": False, "n_group": 4, "topk_group": 2},
    "plain rope": {
        "seed": 16,
        "experts": "bf16",
        "prefix": False,
        "rope": RopeConfig(theta=10000.0),
    },
}


class Case:
    """A checkpoint, a prompt, and what transformers makes of it."""

    def __init__(self, folder, kwargs):
        goldens = pytest.importorskip("make_goldens", reason="needs the extra `reference`")
        goldens.quiet()
        self.folder, self.run_reference = folder, goldens.run_reference
        self.cfg = make_random_checkpoint(folder, "tiny", **kwargs)
        self.tokens = goldens.prompt(kwargs["seed"], self.cfg.vocab_size, NUM_TOKENS)
        self.reference = goldens.load_reference(folder)
        self.expected = self.run_reference(self.reference, self.tokens)

    def close(self, logits, expected=None, tolerance=TOLERANCE):
        expected = self.expected.logits if expected is None else expected
        assert logits.shape == expected.shape
        assert np.abs(logits - expected).max() <= tolerance * np.abs(expected).max()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    pytest.importorskip("torch", reason="needs the extra `reference`")
    return Case(tmp_path_factory.mktemp("checkpoint"), CASES[request.param])


@pytest.fixture(scope="module")
def llm(case):
    return LLM(case.folder, dtype="float32", max_length=128)


@pytest.fixture(scope="module")
def llm_on_eight(case):
    return LLM(case.folder, dtype="float32", max_length=128, max_batch=1, mesh={"tensor": 8})


def test_oracle_agrees(case):
    config, tensors = oracles.read_checkpoint(case.folder)
    out = oracles.forward(tensors, config, case.tokens)
    case.close(out.logits, tolerance=1e-5)
    case.close(out.hidden, case.expected.hidden, tolerance=1e-5)
    experts = np.stack([np.sort(ids, axis=-1) for ids in out.experts.values()])
    np.testing.assert_array_equal(experts, case.expected.experts)


def test_whole_prompt(case, llm):
    case.close(llm.logits(case.tokens.tolist()))


def test_whole_prompt_on_eight_devices(case, llm_on_eight):
    with quick_compiles():
        case.close(llm_on_eight.logits(case.tokens.tolist()))


@pytest.mark.parametrize("sizes", [[32, 32, 32], [40, 1, 55]], ids=str)
def test_chunks(case, llm, sizes):
    case.close(cached_logits(llm, case.tokens, sizes))


def test_one_token_at_a_time(case, llm):
    case.close(cached_logits(llm, case.tokens, [1] * NUM_TOKENS))


def test_greedy_continuation_is_the_same(case, llm):
    import torch

    prompt = case.tokens[:24]
    expected = case.reference.generate(
        torch.as_tensor(prompt)[None].long(),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].numpy()
    logits = cached_logits(llm, expected[:-1].astype(np.int32), [1] * 63)
    np.testing.assert_array_equal(logits[23:].argmax(axis=-1), expected[24:])


@pytest.mark.parametrize("case", ["int4 nested", "bf16 flat", "groups"], indirect=True)
def test_greedy_reply_on_eight_devices(case, llm_on_eight):
    """Through `LLM`, its reply past the 32 positions of training given back to transformers."""
    prompt = case.tokens[:24]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with quick_compiles():
        [result] = llm_on_eight.generate([prompt.tolist()], params)
    whole = np.concatenate([prompt, np.asarray(result.token_ids, np.int32)])
    logits = case.run_reference(case.reference, whole).logits
    check_greedy(result.token_ids, logits[len(prompt) - 1 : -1])
