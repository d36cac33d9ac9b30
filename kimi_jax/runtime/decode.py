"""Decoding on the device: the state, the step, the loop over steps, and chunked prefill.

A step is a function (weights, state) -> state that appends one or more tokens to every live row.
`decode` runs any step in a `lax.while_loop`, so a block of cycles is one call with nothing read
back inside it. Plain decoding is `autoregressive_step`; a speculative step has the same type and
ends in the same `append`, which alone decides about stops and limits.

Row invariant: `tokens[:length]` are final, the newest of them is not in the cache yet. Prefill
therefore fills the cache with all prompt tokens but the last, and the first step does the rest:
sampling happens in one place. Knows token ids only, no text.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from kimi_jax.axes import WHOLE, Rules, pytree_dataclass, replace
from kimi_jax.model import transformer
from kimi_jax.model.cache import LatentCache
from kimi_jax.runtime.sampling import MAX_LOGPROBS, Choice, SamplingState, choose_tokens

MAX_BLOCK_TOKENS = 64
"""Tokens a row can gain in one call of `decode`; the size of what is read back."""

MAX_DRAFT_DEPTH = 8
"""Most drafts a cycle may accept, one after the other; the size of the counts by depth."""


class Finish(enum.IntEnum):
    """Why a row ended."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2


@pytree_dataclass
class TokenLog:
    """What was asked about each token of the current block, by its place in the block."""

    logprob: Float32[Array, "B X"]
    top_ids: Int32[Array, "B X top"]
    top_logprobs: Float32[Array, "B X top"]

    @classmethod
    def empty(cls, batch: int) -> "TokenLog":
        """Room for one block."""
        shape = (batch, MAX_BLOCK_TOKENS, MAX_LOGPROBS)
        return cls(
            logprob=jnp.zeros(shape[:2], jnp.float32),
            top_ids=jnp.zeros(shape, jnp.int32),
            top_logprobs=jnp.zeros(shape, jnp.float32),
        )


@pytree_dataclass
class DecodeState:
    """Everything decoding carries, on the device."""

    tokens: Int32[Array, "B S"]
    """Prompt and output; a token's index is its position and its cache slot."""
    lengths: Int32[Array, " B"]
    """Final tokens a row, prompt included; the newest is not in the cache."""
    prompt_lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    """The length at which a row ends for `Finish.LENGTH`."""
    stop_ids: Int32[Array, "B stops"]
    """Token ids that end a row; -1 fills up."""
    reasons: Int32[Array, " B"]
    """`Finish` of each row."""
    cache: LatentCache
    sampling: SamplingState
    log: TokenLog
    block_start: Int32[Array, " B"]
    """Lengths when the current block began."""
    cycles: Int32[Array, " B"]
    """Steps each row was live in."""
    drafted: Int32[Array, " B"]
    """Tokens proposed to each row."""
    accepted: Int32[Array, "B depth"]
    """Of these, the ones a row kept, by their depth in the proposal."""
    drafter: Any = None
    """A speculative step's own state."""

    @property
    def live(self) -> Bool[Array, " B"]:
        """Rows still decoding."""
        return self.reasons == Finish.RUNNING


Weights = Any
Step = Callable[[Weights, DecodeState], DecodeState]


class Block(NamedTuple):
    """What one call of `decode` reports; small, and the only thing read back."""

    tokens: Int32[Array, "B X"]
    counts: Int32[Array, " B"]
    """Tokens of `tokens` that are real."""
    reasons: Int32[Array, " B"]
    cycles: Int32[Array, " B"]
    """Steps since the row's request began; so are the next two."""
    drafted: Int32[Array, " B"]
    accepted: Int32[Array, "B depth"]
    log: TokenLog


def autoregressive_step(
    graph: nnx.GraphDef,
    rules: Rules = WHOLE,
    *,
    taps: tuple[int, ...] = (),
    keep: Callable[[DecodeState, tuple[jax.Array, ...]], DecodeState] | None = None,
) -> Step:
    """The plain step: one token a row. Its weights are the model's `nnx.State`.

    `keep(state, taps)` may put the tapped streams of the rows' newest tokens into the state.
    """

    def step(weights: Weights, state: DecodeState) -> DecodeState:
        model = nnx.merge(graph, weights)
        positions = (state.lengths - 1)[:, None]
        newest = jnp.take_along_axis(state.tokens, positions, axis=1)
        with jax.named_scope("target"):
            out = transformer.forward(
                model,
                newest,
                positions,
                state.cache,
                is_real=state.live[:, None],
                taps=taps,
                rules=rules,
            )
            logits_f32 = transformer.logits(model, out.hidden)[:, 0]
        with jax.named_scope("accept"):
            choice = choose_tokens(
                logits_f32,
                tokens=state.tokens,
                lengths=state.lengths,
                prompt_lengths=state.prompt_lengths,
                sampling=state.sampling,
                axis=rules.mesh_axes("V"),
            )
            state = replace(state, cache=out.cache)
            if keep is not None:
                state = keep(state, out.taps)
            chosen = jax.tree.map(lambda x: x[:, None], choice)
            return append(state, chosen, jnp.ones_like(state.lengths))

    return step


def append(
    state: DecodeState, chosen: Choice, counts: Int32[Array, " B"], *, num_drafted: int = 0
) -> DecodeState:
    """The state after each live row's first `counts` chosen tokens, cut at its stop or limit.

    `chosen` has fields [B, T, ...]. A stop token is kept as the row's last; where one call reaches
    both a stop and the limit, whichever comes first decides, and the stop wins a tie. Of a cycle
    that drafted, all counted tokens but the last were proposed; those kept count as accepted.
    """
    new = chosen.token
    T = new.shape[1]
    place = jnp.arange(T, dtype=jnp.int32)
    is_stop = jnp.any(new[:, :, None] == state.stop_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(is_stop, place, T), axis=1)
    taken = jnp.minimum(jnp.minimum(counts, first_stop + 1), state.limits - state.lengths)
    taken = jnp.where(state.live, jnp.maximum(taken, 0), 0)
    lengths = state.lengths + taken
    reason = jnp.where(lengths >= state.limits, int(Finish.LENGTH), int(Finish.RUNNING))
    reason = jnp.where(first_stop < taken, int(Finish.STOP), reason)

    def put(buffer: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
        # Places past the end are dropped: that is how rows take fewer than T tokens.
        at = jnp.where(place < taken[:, None], start[:, None] + place, buffer.shape[1])
        rows = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
        return buffer.at[rows, at].set(values.astype(buffer.dtype), mode="drop")

    def log_all() -> TokenLog:
        start = state.lengths - state.block_start
        return TokenLog(
            logprob=put(state.log.logprob, chosen.logprob, start),
            top_ids=put(state.log.top_ids, chosen.top_ids, start),
            top_logprobs=put(state.log.top_logprobs, chosen.top_logprobs, start),
        )

    depth = jnp.arange(MAX_DRAFT_DEPTH, dtype=jnp.int32)
    is_accepted = depth < jnp.minimum(counts - 1, taken)[:, None]
    asked = jnp.any(state.sampling.num_logprobs >= 0)
    return replace(
        state,
        tokens=put(state.tokens, new, state.lengths),
        lengths=lengths,
        reasons=jnp.where(state.live, reason, state.reasons).astype(jnp.int32),
        cycles=state.cycles + state.live.astype(jnp.int32),
        drafted=state.drafted + num_drafted * state.live.astype(jnp.int32),
        accepted=state.accepted + is_accepted.astype(jnp.int32),
        log=jax.lax.cond(asked, log_all, lambda: state.log),
    )


def decode(
    step: Step,
    weights: Weights,
    state: DecodeState,
    num_cycles: Int32[Array, ""],
    cancelled: Bool[Array, " B"],
    *,
    max_tokens_per_cycle: int = 1,
) -> tuple[DecodeState, Block]:
    """Runs up to `num_cycles` cycles, fewer when all rows end or the block is full.

    `cancelled` rows end before the first cycle, as stopped (the host found a stop string).
    """
    stopped = state.live & cancelled
    state = replace(
        state,
        reasons=jnp.where(stopped, int(Finish.STOP), state.reasons).astype(jnp.int32),
        block_start=state.lengths,
    )
    most_cycles = jnp.minimum(num_cycles, MAX_BLOCK_TOKENS // max_tokens_per_cycle)

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        cycle, state = carry
        return (cycle < most_cycles) & jnp.any(state.live)

    def run(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        cycle, state = carry
        return cycle + 1, step(weights, state)

    _, state = jax.lax.while_loop(more, run, (jnp.zeros((), jnp.int32), state))
    place = state.block_start[:, None] + jnp.arange(MAX_BLOCK_TOKENS, dtype=jnp.int32)
    inside = jnp.minimum(place, state.tokens.shape[1] - 1)
    block = Block(
        tokens=jnp.take_along_axis(state.tokens, inside, axis=1),
        counts=state.lengths - state.block_start,
        reasons=state.reasons,
        cycles=state.cycles,
        drafted=state.drafted,
        accepted=state.accepted,
        log=state.log,
    )
    return state, block


class Chunk(NamedTuple):
    """One prefill chunk, as a drafter's own prefill needs it."""

    tokens: Int32[Array, "B T"]
    next_tokens: Int32[Array, "B T"]
    """The prompt's token after each, known even across chunks."""
    positions: Int32[Array, "B T"]
    is_real: Bool[Array, "B T"]
    taps: tuple[jax.Array, ...]


def prefill_chunk(
    graph: nnx.GraphDef,
    weights: Weights,
    state: DecodeState,
    start: Int32[Array, ""],
    *,
    size: int,
    taps: tuple[int, ...] = (),
    rules: Rules = WHOLE,
) -> tuple[DecodeState, Chunk]:
    """The state with prompt tokens start..start+size in the cache, up to each row's last but one.

    `start + size` stays within the capacity. Slots past a row's prompt receive rows that mean
    nothing; decoding writes over them before it reads them.
    """
    model = nnx.merge(graph, weights)
    B = state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, size, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), (B, size))
    is_real = (positions < state.prompt_lengths[:, None] - 1) & state.live[:, None]
    out = transformer.forward(
        model,
        tokens,
        positions,
        state.cache,
        is_real=is_real,
        taps=taps,
        rules=rules,
        is_prefill=True,
    )
    following = jnp.minimum(positions + 1, state.tokens.shape[1] - 1)
    chunk = Chunk(
        tokens=tokens,
        next_tokens=jnp.take_along_axis(state.tokens, following, axis=1),
        positions=positions,
        is_real=is_real,
        taps=out.taps,
    )
    return replace(state, cache=out.cache), chunk


def chunk_sizes(num_tokens: int, sizes: tuple[int, ...]) -> list[int]:
    """Chunks, from the largest down, that cover `num_tokens`; `sizes` ascend and divide each other.

    A remainder takes the smallest size whose next smaller one would need more than two chunks.
    """
    plan: list[int] = []
    remaining = num_tokens
    while remaining > 0:
        size = sizes[0]
        for smaller, larger in zip(sizes, sizes[1:], strict=False):
            if remaining > 2 * smaller:
                size = larger
        plan.append(size)
        remaining -= size
    return plan
