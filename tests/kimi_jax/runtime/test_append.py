"""`append`, which alone decides about stops and limits, on hand-made tables of integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.cache import LatentCache
from kimi_jax.runtime.decode import (
    MAX_BLOCK_TOKENS,
    MAX_DRAFT_DEPTH,
    DecodeState,
    Finish,
    TokenLog,
    append,
    chunk_sizes,
)
from kimi_jax.runtime.engine import capacities_for, first_at_least, ladder
from kimi_jax.runtime.sampling import MAX_LOGPROBS, Choice, SamplingParams, make_sampling_state

RUNNING, STOP, LENGTH = Finish.RUNNING, Finish.STOP, Finish.LENGTH
CAPACITY, STOP_ID, PROMPT = 16, 77, 2
JUNK = 99
MAX_ROWS, MAX_NEW = 5, 6

jit_append = jax.jit(append)


def state_of(limits, lengths=None, stop_ids=None, reasons=None, logprobs=0) -> DecodeState:
    """Rows of two prompt tokens; `limits` count from the prompt's end."""
    B = len(limits)
    lengths = np.full(B, PROMPT) if lengths is None else np.asarray(lengths)
    tokens = np.full((B, CAPACITY), JUNK)
    for row, length in enumerate(lengths):
        tokens[row, :length] = 1 + np.arange(length)
    int32 = jnp.int32
    return DecodeState(
        tokens=jnp.asarray(tokens, int32),
        lengths=jnp.asarray(lengths, int32),
        prompt_lengths=jnp.full((B,), PROMPT, int32),
        limits=jnp.asarray(limits, int32) + PROMPT,
        stop_ids=jnp.asarray(stop_ids if stop_ids is not None else [[STOP_ID, -1]] * B, int32),
        reasons=jnp.asarray(reasons if reasons is not None else [RUNNING] * B, int32),
        cache=LatentCache(layers=()),
        sampling=make_sampling_state([SamplingParams(logprobs=logprobs)] * B, 128),
        log=TokenLog.empty(B),
        block_start=jnp.asarray(lengths, int32),
        cycles=jnp.zeros((B,), int32),
        drafted=jnp.zeros((B,), int32),
        accepted=jnp.zeros((B, MAX_DRAFT_DEPTH), int32),
    )


def choice_of(rows) -> Choice:
    """Tokens [B, T] with a log-probability of minus their id."""
    rows = np.asarray(rows)
    token = jnp.asarray(rows.reshape(-1), jnp.int32)
    top = (token.shape[0], MAX_LOGPROBS)
    logprob = -token.astype(jnp.float32)
    choice = Choice(
        token=token,
        logprob=logprob,
        top_ids=jnp.broadcast_to(token[:, None], top),
        top_logprobs=jnp.broadcast_to(logprob[:, None], top),
    )
    return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), choice)


def take(limits, rows, counts=None, reasons=None, **state):
    """One call: new tokens, reason and the new state of each row.

    Rows that ended and tokens not counted make every call one shape, for one compile.
    """
    rows = np.asarray(rows)
    num_rows, width = rows.shape
    more = MAX_ROWS - num_rows
    counts = [width] * num_rows if counts is None else counts
    reasons = [RUNNING] * num_rows if reasons is None else reasons
    for name, filler in (("lengths", PROMPT), ("stop_ids", [-1, -1])):
        if name in state:
            state[name] = [*state[name], *[filler] * more]
    before = state_of([*limits, *[1] * more], reasons=[*reasons, *[STOP] * more], **state)
    padded = np.pad(rows, ((0, more), (0, MAX_NEW - width)), constant_values=JUNK)
    after = jit_append(before, choice_of(padded), jnp.asarray([*counts, *[1] * more], jnp.int32))
    lengths, tokens = np.asarray(after.lengths), np.asarray(after.tokens)
    starts = np.asarray(before.lengths)
    for row, start in enumerate(starts):
        # What was there stays, and nothing is written past the row's end.
        np.testing.assert_array_equal(tokens[row, :start], np.asarray(before.tokens)[row, :start])
        assert (tokens[row, lengths[row] :] == JUNK).all()
    assert after.reasons.tolist()[num_rows:] == [STOP] * more
    new = [tokens[row, starts[row] : lengths[row]].tolist() for row in range(num_rows)]
    return new, [Finish(r) for r in after.reasons.tolist()][:num_rows], after


SIX = [10, 11, 12, 13, 14, 15]


def with_stop(*places):
    return [STOP_ID if i in places else token for i, token in enumerate(SIX)]


@pytest.mark.parametrize(
    "limit, stops, count, expected, reason",
    [
        (5, [2], 6, 3, STOP),  # a stop and the limit in one call: the stop is first
        (5, [5], 6, 5, LENGTH),  # the stop lies past the limit
        (5, [4], 6, 5, STOP),  # a tie: the stop wins
        (5, [], 6, 5, LENGTH),
        (6, [], 6, 6, LENGTH),
        (7, [], 6, 6, RUNNING),
        (7, [5], 6, 6, STOP),
        (7, [0], 6, 1, STOP),
        (7, [1, 3], 6, 2, STOP),
        (7, [3], 3, 3, RUNNING),  # the stop was not taken
        (7, [2], 3, 3, STOP),
        (3, [4], 3, 3, LENGTH),
        (7, [], 1, 1, RUNNING),
        (1, [0], 6, 1, STOP),
        (1, [1], 6, 1, LENGTH),
        (7, [0], 0, 0, RUNNING),  # nothing taken, nothing stopped
    ],
)
def test_the_first_of_stop_and_limit_decides(limit, stops, count, expected, reason):
    row = with_stop(*stops)
    [new], [ended], after = take([limit], [row], counts=[count])
    assert (new, ended) == (row[:expected], reason)
    assert after.cycles.tolist()[0] == 1


def test_rows_are_independent():
    rows = [with_stop(2), SIX, with_stop(5), SIX, with_stop(0)]
    new, reasons, _ = take([5, 9, 5, 3, 9], rows, counts=[6, 4, 6, 2, 6])
    assert [len(n) for n in new] == [3, 4, 5, 2, 1]
    assert reasons == [STOP, RUNNING, LENGTH, RUNNING, STOP]


@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_a_row_that_ended_is_not_touched(reason):
    new, reasons, after = take([9, 9], [SIX, SIX], reasons=[reason, RUNNING])
    assert new == [[], SIX] and reasons == [reason, RUNNING]
    assert after.cycles.tolist()[:2] == [0, 1]
    assert np.asarray(after.log.logprob)[0].tolist() == [0.0] * MAX_BLOCK_TOKENS


def test_empty_stop_slots_match_nothing():
    """-1 fills up the stop ids, and a drafter may fill up its rows with -1."""
    row = [10, 11, -1, -1]
    [new], [reason], _ = take([9], [row], counts=[2], stop_ids=[[-1, -1]])
    assert (new, reason) == ([10, 11], RUNNING)
    [new], [reason], _ = take([9], [[10, 11, 12, -1]], counts=[3], stop_ids=[[-1, 12]])
    assert (new, reason) == ([10, 11, 12], STOP)


def test_each_row_has_its_own_stop_ids():
    new, reasons, _ = take([9, 9], [SIX, SIX], stop_ids=[[11, 13], [14, -1]])
    assert [len(n) for n in new] == [2, 5] and reasons == [STOP, STOP]


def test_the_last_slot_can_be_filled_and_not_passed():
    room = CAPACITY - PROMPT
    rows = [[20 + i for i in range(6)]] * 2
    new, reasons, _ = take([room, room], rows, lengths=[CAPACITY - 3, CAPACITY - 6])
    assert [len(n) for n in new] == [3, 6] and reasons == [LENGTH, LENGTH]


def test_the_log_has_an_entry_per_token_at_its_place_in_the_block():
    state = state_of([9, 9])
    for rows, counts in (([SIX, SIX], [2, 3]), ([[30, 31], [40, STOP_ID]], [2, 2])):
        state = jit_append(state, choice_of(rows), jnp.asarray(counts, jnp.int32))
    expected = [[10, 11, 30, 31], [10, 11, 12, 40, STOP_ID]]
    for row, tokens in enumerate(expected):
        logprobs = np.asarray(state.log.logprob)[row]
        assert logprobs.tolist() == [-t for t in tokens] + [0] * (MAX_BLOCK_TOKENS - len(tokens))
        assert np.asarray(state.log.top_ids)[row, : len(tokens), 0].tolist() == tokens
        assert np.asarray(state.log.top_logprobs)[row, : len(tokens), 7].tolist() == [
            -t for t in tokens
        ]


def test_nothing_is_logged_when_nobody_asks():
    _, _, after = take([9], [SIX], logprobs=None)
    assert not np.asarray(after.log.logprob).any()


SIZES = (16, 64, 256)


def test_chunks_cover_the_prompt_within_the_least_multiple_of_the_largest():
    for n in range(1025):
        plan = chunk_sizes(n, SIZES)
        assert sum(plan) >= n and sum(plan[:-1]) < max(n, 1)
        assert sum(plan) <= -(-n // 256) * 256
        assert plan == sorted(plan, reverse=True)


@pytest.mark.parametrize(
    "n, plan",
    [
        (0, []),
        (1, [16]),
        (32, [16, 16]),
        (33, [64]),
        (128, [64, 64]),
        (129, [256]),
        (257, [256, 16]),
        (300, [256, 64]),
    ],
)
def test_chunk_plans(n, plan):
    assert chunk_sizes(n, SIZES) == plan


def test_ladders_end_at_what_is_wanted():
    assert ladder(256, 4, 4096) == (256, 1024, 4096)
    assert ladder(256, 4, 300) == (256, 512)
    assert ladder(256, 4, 100) == (256,)
    assert ladder(1, 2, 8) == (1, 2, 4, 8)
    assert ladder(1, 2, 6) == (1, 2, 6)
    # Of two neighbours one would be enough.
    assert ladder(256, 4, 4096 + 3) == (256, 1024, 4352)


def test_few_programs_for_large_models():
    assert capacities_for(262144 + 3) == (256, 1024, 4096, 16384, 65536, 262400)
    assert capacities_for(262144 + 3, few_programs=True) == (4096, 16384, 65536, 262400)
    assert capacities_for(4096 + 3, few_programs=True) == (4352,)
    assert capacities_for(300, few_programs=True) == (512,)
    assert [first_at_least((1, 2, 4, 6), n) for n in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]
