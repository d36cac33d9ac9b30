"""A random drafter, random target states, and a few samples: training without a target."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_random_drafter import tiny_drafter_config, write_random_drafter

from kimi_jax.config import ModelConfig, RopeConfig
from kimi_jax.runtime.mesh import make_mesh
from spec.training.batches import count_targets, lay_out
from spec.training.drafters import Beginning
from spec.training.loss import Ends, Streams, Unrolling
from spec.training.samples import Sample
from spec.training.trainer import Optimisation, Trainer

V, D = 40, 16


@pytest.fixture(scope="session")
def make_setup(tmp_path_factory):
    """A drafter's folder and configuration, the target's matrices, samples and their states."""

    def make(kind="llama", *, own_embedding=False, own_head=True, lengths=(9, 6), **changes):
        target = ModelConfig(
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=4,
            first_k_dense_replace=4,
            intermediate_size=24,
            moe_intermediate_size=8,
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            num_attention_heads=4,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
            max_position_embeddings=64,
            rope=RopeConfig(
                theta=1000.0,
                factor=4.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=16,
            ),
        )
        if kind == "llama":
            # Most, not all: some of the target's choices are tokens the drafter does not know.
            changes = {"draft_vocab_size": 28} | changes
        cfg = tiny_drafter_config(kind, target, **changes)
        folder = tmp_path_factory.mktemp("drafter")
        write_random_drafter(folder, cfg, own_embedding=own_embedding, own_head=own_head, seed=3)
        rng = np.random.default_rng(5)

        def normal(*shape):
            return rng.standard_normal(shape).astype(np.float32)

        ends = Ends(normal(V, D), normal(D, V))
        samples, states = [], []
        for i, length in enumerate(lengths):
            mask = np.zeros((length,), np.bool_)
            # A prompt of two tokens, and a token in the middle that a template supplied.
            mask[2:] = True
            mask[length // 2] = length > 8
            ids = rng.integers(0, V, length, dtype=np.int32)
            samples.append(Sample(id=str(i), input_ids=ids, loss_mask=mask))
            states.append(([normal(length, D) for _ in cfg.taps], normal(length, D)))
        return types.SimpleNamespace(
            folder=folder, cfg=cfg, target=target, ends=ends, samples=samples, states=states
        )

    return make


@pytest.fixture(scope="session")
def make_trainer():
    def make(setup, *, devices=1, placement="replicated", learning_rate=1e-2, steps=40, **unroll):
        mesh = make_mesh({"tensor": devices})
        beginning = Beginning.warm(setup.folder, setup.target)
        ends = Ends(*map(jnp.asarray, setup.ends))
        norm = jnp.ones((D,))
        model = beginning.model(None, ends, norm, make_mesh(None), seed=0)
        return Trainer(
            beginning.cfg,
            model,
            ends,
            unrolling=Unrolling(**{"draft_steps": 2} | unroll),
            optimisation=Optimisation(
                num_steps=steps, learning_rate=learning_rate, placement=placement
            ),
            mesh=mesh,
        )

    return make


@pytest.fixture(scope="session")
def place():
    """Rows of samples as an example on the trainer's devices, with the number of targets."""

    def place(trainer, setup, rows, *, num_rows=None, length=16):
        num_rows = num_rows or len(rows)
        batch, placed = lay_out(setup.samples, rows, num_rows=num_rows, length=length)
        shape = (num_rows, length, D)
        taps = [np.zeros(shape, np.float32) for _ in setup.cfg.taps]
        hidden = np.zeros(shape, np.float32)
        for p in placed:
            own_taps, own_hidden = setup.states[p.sample]
            at = slice(p.start, p.start + len(own_hidden))
            hidden[p.row, at] = own_hidden
            for tap, own in zip(taps, own_taps, strict=True):
                tap[p.row, at] = own
        streams = Streams(taps=tuple(taps), hidden=hidden)
        count = count_targets(setup.samples, [i for row in rows for i in row])
        return trainer.place(batch, streams), count

    return place


@pytest.fixture(scope="session")
def gradients_of():
    """Loss and gradients of one example, by path."""

    def gradients_of(trainer, example, count):
        state = trainer.init_state()
        gradients, sums, loss = trainer.gradients(state, [example], count)
        flat = jax.tree_util.tree_leaves_with_path(gradients)
        return float(loss), {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}, sums

    return gradients_of
