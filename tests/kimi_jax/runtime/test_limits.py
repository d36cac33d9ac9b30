"""The longest prompt and reply of a model with YaRN, and two engines over the same weights."""

import numpy as np
import pytest
from pieces import check_greedy

from kimi_jax.runtime.engine import Engine, Request
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.run import Run

pytestmark = pytest.mark.usefixtures("quick_compiles")

LIMIT = 128


@pytest.fixture(scope="module")
def stretched(make_folder):
    """32 positions of training times 4: the limit is 128, not four times that."""
    llm = LLM(make_folder(max_position_embeddings=LIMIT), max_batch=4, progress=False)
    rope = llm.cfg.rope
    assert (rope.original_max_position_embeddings, rope.factor) == (32, 4.0)
    return llm


def test_replies_end_at_the_models_limit(stretched, ids, on):
    """On both sides of the positions of training; what decoding says, whole prompts say too."""
    assert stretched.max_length == LIMIT
    prompts = [ids(length, length) for length in (31, 33, 126, 127)]
    results = stretched.generate(prompts, on(None))
    for prompt, result in zip(prompts, results, strict=True):
        assert len(prompt) + len(result.token_ids) == LIMIT
        assert result.finish_reason == "length"
    for prompt, result in zip(prompts[:2], results, strict=False):
        logits = stretched.logits([*prompt, *result.token_ids])
        check_greedy(result.token_ids, logits[len(prompt) - 1 : -1])
    # Asking for more than there is room for ends there too.
    more = stretched.generate(prompts, on(1000))
    assert [r.token_ids for r in more] == [r.token_ids for r in results]


@pytest.mark.parametrize(
    "length, message",
    [
        (128, "prompt 0 has 128 tokens and leaves no room for a reply: max_length is 128"),
        (129, r"prompt 0 has 129 tokens, max_length is 128 \(the model's own limit is 128\)"),
    ],
)
def test_prompts_at_and_past_the_limit_are_refused(stretched, ids, on, length, message):
    for params in (on(1), on(None)):
        with pytest.raises(ValueError, match=message):
            stretched.generate([ids(length)], params)


def test_logits_reach_the_limit_and_not_past_it(stretched, ids):
    assert stretched.logits(ids(LIMIT)).shape == (LIMIT, 512)
    with pytest.raises(ValueError, match="129 tokens, max_length is 128"):
        stretched.logits(ids(LIMIT + 1))


def test_a_lower_limit_leaves_the_logits_as_they_are(stretched, make_folder, ids, on):
    folder = make_folder(max_position_embeddings=LIMIT)
    lower = LLM(folder, max_length=64, max_batch=1, progress=False)
    np.testing.assert_array_equal(lower.logits(ids(60)), stretched.logits(ids(60)))
    for length in (64, 65):
        with pytest.raises(ValueError, match=f"{length} tokens.* max_length is 64"):
            lower.generate([ids(length)], on(1))
    with pytest.raises(ValueError, match=r"max_length is 129, expected 2\.\.128"):
        LLM(folder, max_length=LIMIT + 1, progress=False)


def test_two_engines_over_the_same_weights(llm, ids, on):
    """In turn, their blocks interleaved, and after one left a run half done."""
    engines = [
        llm.engine,
        Engine(
            llm.cfg,
            llm.engine.graph,
            llm.engine.target_weights,
            llm.mesh,
            max_length=llm.max_length,
            max_batch=1,
        ),
    ]
    request = Request(tuple(ids(9, 2)), on(40), ())
    expected = llm.generate([list(request.prompt)], on(40))[0].token_ids

    def tokens_of(runs) -> list[tuple[int, ...]]:
        """The tokens of the runs, a block of each at a time."""
        out, live = [() for _ in runs], {i: iter(run) for i, run in enumerate(runs)}
        while live:
            for i, blocks in list(live.items()):
                updates = next(blocks, None)
                if updates is None:
                    del live[i]
                for update in updates or ():
                    out[i] += update.token_ids
        return out

    for engine in (*engines, *engines):
        assert tokens_of([Run(engine, [request])]) == [expected]
    streams = [Run(engine, [request], is_streaming=True) for engine in engines]
    assert tokens_of(streams) == [expected] * 2
    for left, other in (engines, engines[::-1]):
        next(iter(Run(left, [request], is_streaming=True)))
        assert tokens_of([Run(other, [request])]) == [expected]
    assert llm.generate([list(request.prompt)], on(40))[0].token_ids == expected
