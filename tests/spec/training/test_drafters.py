"""New drafters with the public ones' sizes, and what is written of a trained one."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kimi_jax import published
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.mesh import make_mesh
from spec.eagle3.checkpoint import open_drafter
from spec.eagle3.config import DrafterConfig, DrafterError
from spec.training.drafters import Beginning, export_drafter, new_config
from spec.training.loss import Ends

K25 = ModelConfig.from_dict(published.K25)


def test_a_llama_drafter_for_k25_has_the_public_sizes():
    cfg = new_config(K25, "llama")
    assert (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim) == (64, 64, 128)
    assert (cfg.hidden_size, cfg.intermediate_size) == (7168, 18432)
    assert (cfg.draft_vocab_size, cfg.taps, cfg.rope.theta) == (32000, (2, 30, 58), 1e6)
    assert cfg.max_position_embeddings == 262144 and cfg.rms_norm_eps == 1e-6
    assert cfg.to_dict()["architectures"] == ["LlamaForCausalLMEagle3"]


def test_an_mla_drafter_for_k25_has_the_public_sizes():
    cfg = new_config(K25, "mla", is_eagle31=True)
    assert cfg.draft_vocab_size == 163840 and cfg.fc_norm and cfg.norm_output
    assert cfg.mla is not None and cfg.mla.q_lora_rank == 1536 and cfg.rope == K25.rope
    assert cfg.rms_norm_eps == 1e-5


def test_a_target_of_few_layers_is_tapped_at_both_ends_and_between():
    five = dataclasses.replace(K25, num_hidden_layers=5)
    assert new_config(five, "llama").taps == (0, 2, 5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"draft_vocab_size": 200000}, "draft_vocab_size is 200000"),
        ({"taps": (2, 62)}, "outside the target's 61 layers"),
        ({"taps": (1, 30)}, "ids from 1 are read as from 2"),
        ({"num_key_value_heads": 7}, "num_key_value_heads 7"),
        ({"kind": "mla", "rope_theta": 1e6}, "of 'llama'"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(options, problem):
    kind = options.pop("kind", "llama")
    with pytest.raises(DrafterError, match=problem):
        new_config(K25, kind, **options)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_a_new_drafter_written_and_read_again(make_setup, tmp_path, prefix):
    setup = make_setup()
    cfg = new_config(setup.target, "llama", draft_vocab_size=12)
    ids = np.sort(np.random.default_rng(1).choice(40, 12, replace=False)).astype(np.int32)
    norm = jnp.linspace(0.5, 1.5, 16)
    mesh = make_mesh(None)
    model = Beginning(cfg=cfg).model(ids, Ends(*map(jnp.asarray, setup.ends)), norm, mesh, seed=0)
    # The head and the final norm are the target's.
    np.testing.assert_array_equal(model.lm_head[...], setup.ends.lm_head[:, ids])
    np.testing.assert_array_equal(model.norm[...], norm)
    weights = nnx.split(model)[1]
    export_drafter(tmp_path, cfg, weights, dtype="float32", layer_prefix=prefix)
    tensors = load_file(tmp_path / "model.safetensors")
    assert f"{prefix}self_attn.q_proj.weight" in tensors and "embed_tokens.weight" not in tensors
    np.testing.assert_array_equal(np.arange(12) + tensors["d2t"], ids)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    again = Beginning.warm(tmp_path, setup.target)
    assert again.cfg == cfg and again.draft_ids().tolist() == ids.tolist()
    back = again.model(ids, Ends(*map(jnp.asarray, setup.ends)), norm, mesh, seed=9)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(weights), nnx.to_flat_state(nnx.split(back)[1]), strict=True
    ):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


def test_the_embedding_is_copied_where_asked(make_setup, tmp_path):
    setup = make_setup()
    cfg = new_config(setup.target, "llama", draft_vocab_size=12)
    ids = np.arange(12, dtype=np.int32) * 3
    model = Beginning(cfg=cfg).model(
        ids, Ends(*map(jnp.asarray, setup.ends)), jnp.ones((16,)), make_mesh(None), seed=0
    )
    embedding = jnp.asarray(setup.ends.embed_tokens)
    export_drafter(tmp_path, cfg, nnx.split(model)[1], embedding=embedding)
    read = DrafterConfig.from_folder(tmp_path, num_target_layers=4)
    assert open_drafter(tmp_path, read).has_own_embedding


def test_a_warm_start_of_another_target_is_refused(make_setup, caplog):
    setup = make_setup()
    with caplog.at_level(logging.ERROR), pytest.raises(DrafterError, match="vocab_size is 40"):
        Beginning.warm(setup.folder, dataclasses.replace(setup.target, vocab_size=48))
