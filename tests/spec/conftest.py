"""A tiny target of two layers, random drafters for it, and LLMs with and without them."""

import functools

import numpy as np
import pieces
import pytest
from make_random_checkpoint import make_random_checkpoint
from make_random_drafter import tiny_drafter_config, write_random_drafter

from kimi_jax.config import ModelConfig
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.sampling import SamplingParams
from spec import Eagle3Drafter
from spec.controller import FixedLength
from spec.drafter import BoundEagle3

# With eight tokens of slack this fills the capacity of 256.
MAX_LENGTH = 248
PRINTABLE = 95


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_random_checkpoint(folder, "tiny", num_hidden_layers=2, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="session")
def target_cfg(target_folder):
    return ModelConfig.from_folder(target_folder)


@pytest.fixture(scope="session")
def make_drafter_folder(tmp_path_factory, target_cfg):
    """A random drafter's folder and configuration; the same arguments give the same."""

    @functools.cache
    def make(kind="llama", own_embedding=True, own_head=True, **changes):
        # Sizes that eight devices divide, so that one and eight run the same drafter.
        sizes = {"num_attention_heads": 8, "intermediate_size": 64}
        sizes |= {"num_key_value_heads": 8} if kind == "llama" else {}
        cfg = tiny_drafter_config(kind, target_cfg, **sizes | changes)
        folder = tmp_path_factory.mktemp("drafter")
        write_random_drafter(folder, cfg, own_embedding=own_embedding, own_head=own_head)
        return folder, cfg

    return make


@pytest.fixture(scope="session")
def plain(target_folder):
    with pieces.quick_compiles():
        yield LLM(target_folder, max_length=MAX_LENGTH, max_batch=4, progress=False)


@pytest.fixture(scope="session")
def make_drafted(target_folder, make_drafter_folder):
    """An LLM with a random drafter; the same arguments give the same.

    With a program for every number of drafts, compiled when `only` first asks for it.
    """

    @functools.cache
    def make(
        kind="llama",
        num_draft_tokens=tuple(range(9)),
        sample_drafts=False,
        mesh=None,
        **changes,
    ):
        folder, _ = make_drafter_folder(kind, **changes)
        drafter = Eagle3Drafter(
            folder, num_draft_tokens=num_draft_tokens, sample_drafts=sample_drafts
        )
        return LLM(
            target_folder,
            drafter=drafter,
            mesh=mesh,
            max_length=MAX_LENGTH,
            max_batch=4,
            progress=False,
        )

    return make


@pytest.fixture
def only(monkeypatch):
    """Blocks draft this many tokens from now on."""

    def only(num_draft_tokens: int) -> None:
        def controller(self):
            return FixedLength(num_draft_tokens, self.cfg.max_position_embeddings)

        monkeypatch.setattr(BoundEagle3, "controller", controller)

    return only


@pytest.fixture(autouse=True)
def quick_compiles():
    with pieces.quick_compiles():
        yield


@pytest.fixture(scope="session")
def ids():
    """Random printable tokens, `seed`'s own."""

    def ids(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, PRINTABLE, length).tolist()

    return ids


@pytest.fixture(scope="session")
def on():
    """Greedy options that run to the limit, with changes."""

    def on(max_new_tokens: int | None = 24, **options) -> SamplingParams:
        return SamplingParams(**{"max_new_tokens": max_new_tokens, "ignore_eos": True} | options)

    return on


@pytest.fixture(scope="session")
def check_same():
    return _check_same


def _check_same(llm, plain, prompts, params):
    """Replies are equal token for token, and their counts add up."""
    expected = plain.generate(prompts, params)
    found = llm.generate(prompts, params)
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.text, a.finish_reason, a.usage) == (
            b.token_ids,
            b.text,
            b.finish_reason,
            b.usage,
        )
        told = a.speculation
        assert b.speculation is None
        assert told.cycles == a.timings.cycles and told.emitted == len(a.token_ids)
        assert 0 <= told.accepted <= told.drafted and told.accepted <= told.emitted
        assert list(told.accepted_by_depth) == sorted(told.accepted_by_depth, reverse=True)
        if b.logprobs is not None:
            np.testing.assert_allclose(
                [e.logprob for e in a.logprobs], [e.logprob for e in b.logprobs], atol=1e-4
            )
    return found
