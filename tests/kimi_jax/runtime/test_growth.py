"""A long request's cache starts small and grows; its tokens are those of one that never grew."""

from kimi_jax import SamplingParams
from kimi_jax.runtime import engine


def test_grown_equals_never_grown(make_llm, monkeypatch, quick_compiles):
    prompts = [[5, 6, 7], list(range(20, 190))]
    params = SamplingParams(max_new_tokens=140, ignore_eos=True)
    whole = make_llm(max_length=512, max_batch=2).generate(prompts, params)
    monkeypatch.setattr(engine, "GROW_FROM", 256)
    grown = make_llm(max_length=511, max_batch=2).generate(prompts, params)
    # The longer row passes 256 slots on its way.
    assert [r.token_ids for r in grown] == [r.token_ids for r in whole]
    assert [r.usage.new_tokens for r in grown] == [140, 140]
