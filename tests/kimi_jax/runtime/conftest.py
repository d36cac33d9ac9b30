"""Tiny random checkpoints and the LLMs tests share: compiling takes longer than all they run.

Two layers, one of them with INT4 experts; 256 byte tokens, of which 0..94 are printable, and 256
control tokens. The shared LLM has one capacity (512 slots) and chunks of 16, 128 and 512.
"""

import contextlib
import functools

import jax
import numpy as np
import pytest
from make_random_checkpoint import make_random_checkpoint

from kimi_jax.runtime import engine as engines
from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.sampling import SamplingParams

MAX_LENGTH = 320
NUM_PRINTABLE = 95
TINY = {"num_hidden_layers": 2, "max_position_embeddings": 512}


@contextlib.contextmanager
def _quick_compiles():
    # LLVM works less on the same programs: a third of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def quick_compiles():
    with _quick_compiles():
        yield


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """A checkpoint folder; the same arguments give the same folder."""

    @functools.cache
    def make(**changes):
        folder = tmp_path_factory.mktemp("checkpoint")
        make_random_checkpoint(folder, "tiny", **(TINY | changes))
        return folder

    return make


@pytest.fixture(scope="session")
def folder(make_folder):
    return make_folder()


@pytest.fixture(scope="session")
def llm(folder):
    """On one device, warmed up: nothing a test asks of it may compile."""
    with pytest.MonkeyPatch.context() as patch, _quick_compiles():
        patch.setattr(engines, "CAPACITY_UNIT", 512)
        llm = LLM(folder, max_length=MAX_LENGTH, max_batch=8, progress=False)
        llm.warm_up()
    return llm


@pytest.fixture(scope="session")
def make_llm(make_folder):
    """An LLM that compiles what it is asked for; the same arguments give the same LLM."""

    @functools.cache
    def make(mesh=None, experts="int4", **options):
        options = {"max_length": 256, "max_batch": 4, "progress": False} | options
        return LLM(make_folder(experts=experts), mesh=mesh, **options)

    return make


@pytest.fixture(scope="session")
def ids():
    """Random printable tokens, `seed`'s own."""

    def ids(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, NUM_PRINTABLE, length).tolist()

    return ids


@pytest.fixture(scope="session")
def on():
    """Greedy options that run to the limit, with changes."""

    def on(max_new_tokens: int | None = 8, **options) -> SamplingParams:
        return SamplingParams(**{"max_new_tokens": max_new_tokens, "ignore_eos": True} | options)

    return on


@pytest.fixture(scope="session")
def printable():
    """A bias that leaves the printable tokens: then a character is a token."""
    return {i: -100.0 for i in range(NUM_PRINTABLE, 512)}


@pytest.fixture
def no_compiles(llm):
    """Fails the test if anything compiles in it."""
    before = num_compiles()
    yield
    assert num_compiles() == before
