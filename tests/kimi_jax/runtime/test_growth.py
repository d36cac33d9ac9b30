"""A long request's cache starts small and grows; its tokens are those of one that never grew."""

import pytest
from make_random_checkpoint import make_random_checkpoint

from kimi_jax import LLM, SamplingParams
from kimi_jax.runtime import engine
from kimi_jax.runtime.conditions import num_compiles


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "model"
    make_random_checkpoint(folder, "tiny", seed=5, max_position_embeddings=2048)
    return folder


def test_grown_equals_never_grown(long_folder, monkeypatch):
    prompts = [[5, 6, 7], list(range(20, 190))]
    params = SamplingParams(max_new_tokens=140, ignore_eos=True)
    whole = LLM(long_folder, max_length=600, max_batch=2).generate(prompts, params)

    monkeypatch.setattr(engine, "GROW_FROM", 256)
    llm = LLM(long_folder, max_length=600, max_batch=2)
    llm.engine.warm_up()
    compiles = num_compiles()
    grown = llm.generate(prompts, params)
    assert num_compiles() == compiles
    # The longer row passes 256 slots on its way.
    assert [r.token_ids for r in grown] == [r.token_ids for r in whole]
    assert [r.usage.new_tokens for r in grown] == [140, 140]
    unlimited = SamplingParams(max_new_tokens=None, ignore_eos=True)
    assert llm.generate(prompts[:1], unlimited)[0].usage.new_tokens == 597
