"""A tiny target of two layers, random drafters for it, and LLMs with and without them."""

import functools

import numpy as np
import pieces
import pytest
from make_random_checkpoint import make_random_checkpoint
from make_random_drafter import tiny_drafter_config, write_random_drafter
from scripted import REAL, SLACK, ManyShapes, write_script

from kimi_jax.config import ModelConfig
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.sampling import SamplingParams
from spec.controller import FixedProposal
from spec.drafter import BoundEagle3
from spec.tree import Chain, StaticTree

# With the slots of the largest proposal this fills the capacity of 256.
MAX_LENGTH = 256 - SLACK
PRINTABLE = 95

SAMPLED = (Chain(2), StaticTree(((0,), (1,), (0, 0), (0, 1))))
"""What drafters that sample propose."""


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

    With a program for every shape, compiled when `only` first asks for it.
    """

    @functools.cache
    def make(
        kind="llama",
        choices=None,
        sample_drafts=False,
        lossy_threshold=None,
        mesh=None,
        cache="replicated",
        max_length=MAX_LENGTH,
        **changes,
    ):
        folder, _ = make_drafter_folder(kind, **changes)
        options = {"sample_drafts": sample_drafts, "lossy_threshold": lossy_threshold}
        if choices is not None or sample_drafts:
            options["choices"] = choices or SAMPLED
        llm = LLM(
            target_folder,
            drafter=ManyShapes(path_or_id=folder, **options),
            mesh=mesh,
            cache=cache,
            max_length=max_length,
            max_batch=4,
            progress=False,
        )
        write_script(llm, REAL)
        return llm

    return make


@pytest.fixture
def only(monkeypatch):
    """Blocks draft this from now on."""

    def only(shape) -> None:
        def controller(self, batch):
            return FixedProposal(shape, self.cfg.max_position_embeddings)

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
    return _check_replies(llm.generate(prompts, params), plain.generate(prompts, params))


@pytest.fixture(scope="session")
def check_replies():
    return _check_replies


def _check_replies(found, expected, most=None):
    """The same against replies already there, of which the first `most` tokens were asked for."""
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids == b.token_ids[:most]
        if most is None:
            assert (a.text, a.finish_reason, a.usage) == (b.text, b.finish_reason, b.usage)
        told = a.speculation
        assert b.speculation is None
        assert told.cycles == a.timings.cycles and told.emitted == len(a.token_ids)
        assert 0 <= told.accepted <= told.drafted and told.accepted <= told.emitted
        assert list(told.accepted_by_depth) == sorted(told.accepted_by_depth, reverse=True)
        if b.logprobs is not None:
            np.testing.assert_allclose(
                [e.logprob for e in a.logprobs],
                [e.logprob for e in b.logprobs][:most],
                atol=1e-4,
            )
    return found
