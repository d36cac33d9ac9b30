"""Hidden states of packed sequences are those of each alone, and cycles go as predicted."""

import jax.numpy as jnp
import numpy as np
import pytest
from make_random_checkpoint import make_random_checkpoint

from kimi_jax.model.transformer import forward
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import make_mesh
from spec.training.batches import lay_out
from spec.training.samples import Sample
from spec.training.target import OnlineStates, ends_of, load_ends

TAPS = (0, 1, 2)
LENGTHS = (21, 40, 9)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(2)
    return [
        Sample(
            id=str(i),
            input_ids=rng.integers(0, 300, length, dtype=np.int32),
            loss_mask=np.ones((length,), np.bool_),
        )
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_random_checkpoint(folder, "tiny", num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("mesh", [None, "tensor=8"])
def test_packed_states_equal_those_of_each_sample(folder, samples, assert_close_to_scale, mesh):
    llm = LLM(folder, mesh=mesh, max_length=64, max_batch=1, progress=False)
    batch, placed = lay_out(samples, [[0, 1], [2]], num_rows=2, length=64)
    streams = OnlineStates(llm, TAPS).streams(batch, placed)
    model = LLM(folder, max_length=64, max_batch=1, progress=False).model
    for place in placed:
        ids = jnp.asarray(samples[place.sample].input_ids)[None]
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        alone = forward(model, ids, positions, taps=TAPS)
        at = slice(place.start, place.start + ids.shape[1])
        # 1e-5 of the largest: float32 sums in another order, over two layers.
        for ours, theirs in zip(streams.taps, alone.taps, strict=True):
            assert_close_to_scale(np.asarray(ours)[place.row, at], theirs[0], 1e-5)


def test_the_two_matrices_alone_are_those_of_the_loaded_target(folder):
    llm = LLM(folder, max_length=64, max_batch=1, progress=False)
    whole, parts = ends_of(llm), load_ends(str(folder), llm.cfg, make_mesh(None), "float32")
    for a, b in zip((*whole[0], whole[1]), (*parts[0], parts[1]), strict=True):
        np.testing.assert_array_equal(a, b)
