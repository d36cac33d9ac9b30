"""The bundled drafter: what its text predicts is what decoding counts, and the text is plain's."""

import numpy as np
import pytest

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.runtime.replies import Speculation
from spec import DEMO_DRAFTER
from spec.training.batches import pack_order
from spec.training.drafters import Beginning
from spec.training.evaluate import decode_held_out, held_out, serve, shares
from spec.training.loss import Unrolling
from spec.training.run import make_example
from spec.training.samples import Sample
from spec.training.target import OnlineStates, ends_of
from spec.training.trainer import Optimisation, Trainer

PROMPTS = ["def read(self, size):\n", "class Node:\n    def __init__(self", "import os\nimport "]
NEW = 90


@pytest.fixture(scope="module")
def plain():
    return LLM(DEMO, max_length=128, max_batch=4, progress=False)


@pytest.mark.slow
def test_acceptance_predicted_from_the_text_is_that_of_the_cycles(plain):
    prompts = [plain.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    samples = []
    for number, (prompt, reply) in enumerate(
        zip(prompts, plain.generate(prompts, params), strict=True)
    ):
        ids = np.array([*prompt, *reply.token_ids], np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        samples.append(Sample(id=str(number), input_ids=ids, loss_mask=mask))

    start = Beginning.warm(DEMO_DRAFTER, plain.cfg)
    llm = LLM(DEMO, drafter=start, max_length=128, max_batch=4, progress=False)
    ends, norm = ends_of(llm)
    trainer = Trainer(
        start.cfg,
        start.model(start.draft_ids(), ends, norm, llm.mesh, seed=0),
        ends,
        unrolling=Unrolling(draft_steps=3),
        optimisation=Optimisation(num_steps=1),
        mesh=llm.mesh,
    )
    state = trainer.init_state()
    rows = pack_order([len(s.input_ids) for s in samples], range(len(samples)), 128)
    source = OnlineStates(llm, start.cfg.taps)
    examples = [make_example(trainer, source, samples, rows, num_rows=len(rows), length=128)]
    held = held_out(trainer, state, samples, examples, num_draft_tokens=3)
    predicted = Speculation.total(held.walks)

    serve(llm, trainer.weights(state))
    found = decode_held_out(llm, prompts, [NEW] * len(prompts))
    assert found.emitted == predicted.emitted == NEW * len(prompts)
    # The same rows, so only near ties between float sums differ.
    np.testing.assert_allclose(shares(found), shares(predicted), atol=0.05)
    assert found.tokens_per_cycle > 1.8
    for drafted, expected in zip(
        llm.generate(prompts, params), plain.generate(prompts, params), strict=True
    ):
        assert drafted.token_ids == expected.token_ids
