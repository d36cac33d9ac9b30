"""Which parameters stay as narrow as they are stored."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kimi_jax import DEMO
from kimi_jax.checkpoint.load import load_params, open_checkpoint
from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import take_rows
from kimi_jax.runtime import placement
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import make_mesh
from kimi_jax.runtime.placement import abstract_model, kept_dtypes


@pytest.fixture(scope="module")
def plan():
    return open_checkpoint(ModelConfig.from_folder(DEMO), DEMO)


# Of the demo's matrices only the head has LARGE_MATRIX values.
@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [
        ("cpu", "float32", {"embed_tokens", "lm_head"}),
        ("gpu", "float32", {"embed_tokens"}),
        ("cpu", "bfloat16", set()),
    ],
)
def test_what_is_kept(plan, platform, dtype, expected):
    kept = kept_dtypes(plan, jnp.dtype(dtype), platform=platform)
    assert kept == dict.fromkeys(expected, jnp.bfloat16)


def test_a_tied_embedding_is_widened(plan):
    # It is the head too, which reads it by columns.
    cfg = dataclasses.replace(plan.cfg, tie_word_embeddings=True)
    tied = dataclasses.replace(plan, cfg=cfg)
    assert "embed_tokens" not in kept_dtypes(tied, jnp.dtype("float32"), platform="cpu")


def test_values_are_those_of_the_wide_ones(plan):
    f32, mesh = jnp.dtype("float32"), make_mesh({"tensor": 1})
    kept = kept_dtypes(plan, f32, platform="cpu")
    narrow = load_params(plan, abstract_model(plan.cfg, mesh, f32, dtypes=kept).wanted)
    wide = load_params(plan, abstract_model(plan.cfg, mesh, f32).wanted)
    for path in kept:
        assert narrow[path].dtype == jnp.bfloat16 and wide[path].dtype == f32
        assert (narrow[path].astype(f32) == wide[path]).all()


def test_looking_rows_up_in_a_loop_copies_no_table():
    table = jnp.ones((4096, 64), jnp.bfloat16)

    def run(table, at):
        def body(_, at):
            return (at + take_rows(table, at)[:, :, 0].astype(jnp.int32)) % table.shape[0]

        return jax.lax.fori_loop(0, 8, body, at)

    at = jnp.zeros((1, 2), jnp.int32)
    memory = jax.jit(run).lower(table, at).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes / 4


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("mesh", [None, pytest.param("tensor=8", marks=pytest.mark.slow)])
def test_a_model_of_kept_matrices_is_the_wide_one(
    mesh, make_llm, folder, ids, on, monkeypatch, assert_close_to_scale
):
    wide = make_llm()
    monkeypatch.setattr(placement, "LARGE_MATRIX", 1)
    narrow = LLM(folder, mesh=mesh, max_length=256, max_batch=4, progress=False)
    layer = narrow.model.layers[1]
    for param in (layer.self_attn.o_proj, layer.mlp.shared_experts.up_proj, narrow.model.lm_head):
        assert param[...].dtype == jnp.bfloat16
    assert layer.self_attn.kv_b_proj_k[...].dtype == jnp.float32
    # Of one token, of few, and of more than FEW_ROWS; devices and blocks add in another order.
    for length in (1, 9, 40):
        prompt = ids(length, length)
        assert_close_to_scale(narrow.logits(prompt), wide.logits(prompt), 1e-5)
    prompts = [ids(9, 2), ids(1), ids(16, 3)]
    found, expected = (llm.generate(prompts, on(12)) for llm in (narrow, wide))
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
