"""A prompt through the cache in pieces, and greedy replies held against a reference's logits."""

import contextlib
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import LLM
from kimi_jax.model import transformer
from kimi_jax.model.cache import LatentCache

# Two logits closer than this may change places between two orders of summation.
NEAR_TIE = 1e-3


@contextlib.contextmanager
def quick_compiles():
    """LLVM works less on the same programs: half of the time or less."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@functools.partial(jax.jit, static_argnames="is_prefill")
def _run_piece(model, tokens, positions, cache, is_prefill):
    out = transformer.forward(model, tokens, positions, cache, is_prefill=is_prefill)
    return transformer.logits(model, out.hidden), out.cache


def cached_logits(llm: LLM, tokens: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Float32 logits [T, V] of a prompt given to the model in pieces of these sizes.

    Pieces of one token take the attention form of decoding, longer ones that of prompts.
    """
    cache = LatentCache.empty(llm.cfg, 1, 128, jnp.dtype("float32"))
    out, start = [], 0
    for size in sizes:
        positions = jnp.arange(start, start + size, dtype=jnp.int32)[None]
        piece = jnp.asarray(tokens[None, start : start + size])
        with quick_compiles():
            logits, cache = _run_piece(llm.model, piece, positions, cache, is_prefill=size > 1)
        out.append(np.asarray(logits[0]))
        start += size
    return np.concatenate(out)


def check_greedy(token_ids: Sequence[int], logits: np.ndarray) -> None:
    """Each token is the likeliest by its row of `logits`, near ties aside; most rows have none."""
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    is_clear = first - second > NEAR_TIE
    assert is_clear.mean() > 0.8
    np.testing.assert_array_equal(np.asarray(token_ids)[is_clear], logits.argmax(axis=-1)[is_clear])
