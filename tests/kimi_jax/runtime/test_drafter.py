"""The seam a drafter plugs into, with one that drafts the target's own next tokens.

It runs the plain step three times and takes one, two or three of the tokens, ragged over rows and
cycles. Its replies must be those of plain decoding whatever the request asks for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kimi_jax.axes import replace
from kimi_jax.model.cache import insert_row
from kimi_jax.runtime.decode import Finish, append, autoregressive_step
from kimi_jax.runtime.engine import Drafter
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.sampling import Choice

pytestmark = pytest.mark.usefixtures("quick_compiles")

# With two tokens of slack this fills the capacity of 256.
MAX_LENGTH = 254
DRAFTED = 3


@dataclasses.dataclass(frozen=True)
class Some:
    """What a cycle drafts."""

    num_draft_tokens: int = DRAFTED - 1
    depth: int = DRAFTED - 1
    num_slots: int = DRAFTED - 1


class Fixed:
    """The same in every block."""

    current = Some()

    def choose(self, lengths):
        return Some(), 64

    def observe(self, report):
        assert report.proposal == Some()
        assert 0 < report.row_cycles <= report.cycles
        assert sum(report.accepted_by_depth) <= report.row_cycles * (DRAFTED - 1)

    def calibrate(self, seconds):
        raise AssertionError("there is nothing to choose from")


class Replay:
    """A perfect drafter; its state records what its prefill was given."""

    taps = (0, 2)
    proposals = (Some(),)
    weights: Any = ()

    def check(self, cfg, mesh):
        pass

    def bind(self, cfg, mesh, dtype):
        return self

    def controller(self, batch):
        return Fixed()

    def make_step(self, graph, rules, proposal):
        assert proposal == Some()
        plain = autoregressive_step(graph, rules)

        def step(weights, state):
            target, _ = weights
            ahead = replace(
                state,
                limits=jnp.full_like(state.limits, 10**6),
                stop_ids=jnp.full_like(state.stop_ids, -1),
            )
            ahead = jax.lax.fori_loop(0, DRAFTED, lambda _, s: plain(target, s), ahead)
            drafted = jnp.arange(DRAFTED, dtype=jnp.int32)[None]

            def take(buffer, start):
                rows = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
                return buffer[rows, start[:, None] + drafted]

            in_block = state.lengths - state.block_start
            flat = Choice(
                token=take(ahead.tokens, state.lengths).reshape(-1),
                logprob=take(ahead.log.logprob, in_block).reshape(-1),
                top_ids=take(ahead.log.top_ids, in_block).reshape(-1, 20),
                top_logprobs=take(ahead.log.top_logprobs, in_block).reshape(-1, 20),
            )
            B = state.lengths.shape[0]
            chosen = jax.tree.map(lambda x: x.reshape(B, DRAFTED, *x.shape[1:]), flat)
            row = jnp.arange(B, dtype=jnp.int32)
            counts = 1 + (state.cycles + row) % DRAFTED
            state = replace(state, cache=ahead.cache)
            return append(state, chosen, counts, num_drafted=DRAFTED - 1)

        return step

    def after_block(self, weights, state, graph, rules, proposal):
        return state.drafter

    def pspecs(self, rules):
        return ()

    def init_state(self, batch, capacity):
        return {
            "next_tokens": jnp.full((batch, capacity), -1, jnp.int32),
            "taps": jnp.zeros((batch, capacity, 2, 64)),
        }

    def state_pspecs(self, rules):
        whole = rules.pspec("")
        return {"next_tokens": whole, "taps": whole}

    def grow(self, drafter_state, batch, capacity):
        raise AssertionError("no request of these tests outgrows its first capacity")

    def insert(self, drafter_state, own, row):
        return insert_row(drafter_state, own, row)

    def prefill(self, weights, drafter_state, chunk, graph, rules):
        start = chunk.positions[0, 0]

        def put(buffer, new):
            old = jax.lax.dynamic_slice_in_dim(buffer, start, new.shape[1], axis=1)
            is_real = chunk.is_real.reshape(*chunk.is_real.shape, *(1,) * (new.ndim - 2))
            return jax.lax.dynamic_update_slice_in_dim(
                buffer, jnp.where(is_real, new, old), start, axis=1
            )

        return {
            "next_tokens": put(drafter_state["next_tokens"], chunk.next_tokens),
            "taps": put(drafter_state["taps"], jnp.stack(chunk.taps, axis=2)),
        }


@pytest.fixture(scope="module")
def drafted(folder):
    return LLM(folder, drafter=Replay(), max_length=MAX_LENGTH, max_batch=4, progress=False)


@pytest.fixture
def same(llm, drafted):
    """Requests, at most four, with and without the drafter; results of the first."""

    def same(prompts, params):
        # Batches of four rows only: one program.
        params = params if isinstance(params, list) else [params] * len(prompts)
        fill = 4 - len(prompts)
        prompts, params = prompts + [[1]] * fill, params + params[:1] * fill
        plain = llm.generate(prompts, params)
        found = drafted.generate(prompts, params)
        for a, b in zip(found, plain, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.usage) == (
                b.token_ids,
                b.text,
                b.finish_reason,
                b.usage,
            )
            if b.logprobs is not None:
                np.testing.assert_allclose(
                    [e.logprob for e in a.logprobs], [e.logprob for e in b.logprobs], atol=1e-4
                )
                assert [[i for i, _ in e.top] for e in a.logprobs] == [
                    [i for i, _ in e.top] for e in b.logprobs
                ]
        return found[: 4 - fill]

    return same


def test_it_is_a_drafter():
    assert isinstance(Replay(), Drafter)
    assert not isinstance(object(), Drafter)


def test_greedy_replies_are_those_of_plain_decoding(same, ids, on):
    results = same([ids(9, 2), ids(1), ids(16, 3), ids(17, 4)], on(100))
    for row, result in enumerate(results):
        # One, two, three tokens a cycle in turn, from the row's own place in the turn.
        lengths = np.cumsum([1 + (cycle + row) % DRAFTED for cycle in range(100)])
        cycles = np.argmax(lengths >= 100) + 1
        assert result.timings.cycles == cycles
        told = result.speculation
        assert (told.cycles, told.drafted, told.emitted) == (cycles, 2 * cycles, 100)
        # A cycle cut by the limit keeps drafts, and loses the token after them.
        assert 100 - cycles <= told.accepted <= 100
        assert len(told.accepted_by_depth) == DRAFTED - 1


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 63, 64, 65])
def test_max_new_tokens_is_exact(same, ids, on, new):
    results = same([ids(9, 2), ids(1), ids(16, 3), ids(17, 4)], on(new))
    assert [r.usage.new_tokens for r in results] == [new] * 4


def test_the_context_is_filled_to_its_last_slot(drafted, llm, same, ids, on):
    prompts = [ids(n, n) for n in (253, 252, 251, 200)]
    expected = [on(MAX_LENGTH - len(p)) for p in prompts]
    plain = [r.token_ids for r in llm.generate(prompts, expected)]
    found = drafted.generate(prompts, on(None))
    assert [r.token_ids for r in found] == plain
    assert [r.finish_reason for r in found] == ["length"] * 4


def test_a_stop_may_come_anywhere_in_a_cycle(same, ids, on):
    prompts = [ids(9, 2), ids(1), ids(16, 3), ids(17, 4)]
    free = same(prompts, on(24, temperature=1.0, seed=3))
    for place in range(8):
        stops = [r.token_ids[place] for r in free]
        params = [on(24, temperature=1.0, seed=3, stop_token_ids=(s,)) for s in stops]
        for result, whole, stop in zip(same(prompts, params), free, stops, strict=True):
            assert result.finish_reason == "stop"
            assert result.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {5: 30.0, 6: 29.0}, "presence_penalty": 2.0},
        {"logit_bias": {5: 30.0, 6: 29.0}, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 5, "min_p": 0.5},
        {"temperature": 1.0, "seed": 5, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "seed": 5, "logprobs": 5, "frequency_penalty": 1.0},
        {"logprobs": 3},
        {"ignore_eos": False, "temperature": 1.0, "seed": 2, "logit_bias": {257: 5.0}},
    ],
)
def test_every_option_means_the_same(same, ids, on, options):
    same([ids(9, 2), ids(1), ids(16, 3), ids(17, 4)], on(70, **options))


def test_stop_strings(same, ids, on, printable):
    options = {"logit_bias": printable, "temperature": 1.0, "seed": 1}
    prompts = [ids(9, 2), ids(1), ids(16, 3), ids(17, 4)]
    free = same(prompts, on(80, **options))
    params = [on(80, stop=r.text[40:43], **options) for r in free]
    for result, whole, own in zip(same(prompts, params), free, params, strict=True):
        assert result.text == whole.text.partition(own.stop[0])[0]


def test_odd_prompts(drafted, llm, on):
    expected = [r.token_ids for r in llm.generate(["", "hi", "", ""], on())]
    assert [r.token_ids for r in drafted.generate(["", "hi", "", ""], on())] == expected
    assert drafted.generate([], on()) == []
    with pytest.raises(ValueError, match="prompt 1 holds token id 512"):
        drafted.generate(["a", [512]], on())
    assert [r.token_ids for r in drafted.generate(["", "hi", "", ""], on())] == expected


def test_its_prefill_sees_every_prompt_token_once(drafted, folder, ids, on):
    """Next tokens are right across chunks, and taps are the streams of one whole pass."""
    engine = drafted.engine
    prompts = [ids(81, 1), ids(65, 2), ids(3, 3), ids(1)]
    requests = drafted._requests(prompts, on())
    state = engine.prefill(engine.new_state(requests), 80)  # chunks of 16
    own = jax.tree.map(np.asarray, state.drafter)
    config, tensors = oracles.read_checkpoint(folder)
    for row, prompt in enumerate(prompts):
        n = len(prompt) - 1
        assert own["next_tokens"][row, :n].tolist() == prompt[1:]
        assert (own["next_tokens"][row, n:] == -1).all()
        hidden = oracles.forward(tensors, config, prompt).hidden
        for place, tap in enumerate(Replay.taps):
            np.testing.assert_allclose(own["taps"][row, :n, place], hidden[tap, :n], atol=1e-4)
    assert state.reasons.tolist() == [Finish.RUNNING] * 4
