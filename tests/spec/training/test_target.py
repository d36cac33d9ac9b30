"""Hidden states: of packed sequences as of each alone, from files as from the target."""

import functools
import shutil

import convert_checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_random_checkpoint import make_random_checkpoint

from kimi_jax.checkpoint.fingerprint import checkpoint_fingerprint
from kimi_jax.model.layers import rms_norm
from kimi_jax.model.transformer import forward
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import make_mesh
from spec.training.batches import lay_out
from spec.training.samples import Sample, digest_samples
from spec.training.states import StatesHeader, StatesWriter, StoredStates
from spec.training.target import (
    OfflineStates,
    OnlineStates,
    ends_of,
    load_ends,
)

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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "tensor=8"])
def test_packed_states_equal_those_of_each_sample(folder, samples, assert_close_to_scale, mesh):
    llm = LLM(folder, mesh=mesh, max_length=64, max_batch=1, progress=False)
    batch, placed = lay_out(samples, [[0, 1], [2]], num_rows=2, length=64)
    streams = OnlineStates(llm, TAPS).streams(batch, placed)
    model = LLM(folder, max_length=64, max_batch=1, progress=False).model
    run = jax.jit(functools.partial(forward, taps=TAPS))
    for place in placed:
        ids = jnp.asarray(samples[place.sample].input_ids)[None]
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        alone = run(model, ids, positions)
        at = slice(place.start, place.start + ids.shape[1])
        # 1e-5 of the largest: float32 sums in another order, over two layers.
        for ours, theirs in zip(streams.taps, alone.taps, strict=True):
            assert_close_to_scale(np.asarray(ours)[place.row, at], theirs[0], 1e-5)
        last = rms_norm(alone.hidden, model.norm[...], model.cfg.rms_norm_eps)
        assert_close_to_scale(np.asarray(streams.hidden)[place.row, at], last[0], 1e-5)


def test_stored_states_come_back_where_their_samples_lie(folder, samples, tmp_path):
    llm = LLM(folder, max_length=64, max_batch=1, progress=False)
    batch, placed = lay_out(samples, [[0, 1], [2]], num_rows=2, length=64)
    online = OnlineStates(llm, TAPS).streams(batch, placed)
    header = StatesHeader(
        fingerprint=checkpoint_fingerprint(folder),
        taps=TAPS,
        hidden_size=llm.cfg.hidden_size,
        dtype="float32",
        samples_sha256=digest_samples(samples),
        num_samples=len(samples),
    )
    with StatesWriter(tmp_path, header) as writer:
        for place in placed:
            at = slice(place.start, place.start + len(samples[place.sample].input_ids))
            taps = [np.asarray(tap)[place.row, at] for tap in online.taps]
            hidden = np.asarray(online.hidden)[place.row, at]
            writer.add(samples[place.sample], hidden, np.concatenate(taps, axis=-1))
    stored = StoredStates.open(
        tmp_path,
        hidden_size=llm.cfg.hidden_size,
        taps=TAPS,
        vocab_size=llm.cfg.vocab_size,
        fingerprint=checkpoint_fingerprint(folder),
    )
    # Stored in the order they were placed, packed here another way.
    assert [sample.id for sample in stored.samples] == ["0", "1", "2"]
    other, elsewhere = lay_out(stored.samples, [[2, 1], [0]], num_rows=2, length=64)
    offline = OfflineStates(stored, len(TAPS)).streams(other, elsewhere)
    where = {p.sample: p for p in placed}
    for place in elsewhere:
        length = len(samples[place.sample].input_ids)
        first = where[place.sample]
        pairs = zip((*offline.taps, offline.hidden), (*online.taps, online.hidden), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_array_equal(
                ours[place.row, place.start : place.start + length],
                np.asarray(theirs)[first.row, first.start : first.start + length],
            )


def test_a_fine_tuned_target_has_another_fingerprint(folder, tmp_path):
    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    assert checkpoint_fingerprint(tmp_path) == checkpoint_fingerprint(folder)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoint_fingerprint(tmp_path) != checkpoint_fingerprint(folder)


def test_the_two_matrices_alone_are_those_of_the_loaded_target(folder, tmp_path):
    llm = LLM(folder, max_length=64, max_batch=1, progress=False)
    whole = ends_of(llm)
    converted = tmp_path / "converted"
    assert convert_checkpoint.main([str(folder), str(converted), "--quiet"]) == 0
    for path in (folder, converted):
        parts = load_ends(str(path), llm.cfg, make_mesh(None), "float32")
        for a, b in zip((*whole[0], whole[1]), (*parts[0], parts[1]), strict=True):
            np.testing.assert_array_equal(a, b)
