"""Requests on their way through an engine's programs, block by block.

As many rows as the engine allows run together; a row that has ended takes the next request while
the others go on, so that none waits for the slowest. Knows token ids only, no text.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.decode import (
    MAX_BLOCK_TOKENS,
    MAX_DRAFT_DEPTH,
    Block,
    DecodeState,
    Finish,
    TokenLog,
)
from kimi_jax.runtime.engine import BlockReport, Engine, Proposal, Request

STREAM_BLOCK_SECONDS = 0.03
REFILL_BLOCK_CYCLES = 16
"""Most cycles of a block while requests wait: a row that ends within a block idles to its end."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first, as many as were asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """What one block gave one request; counts and seconds are those since its start."""

    index: int
    """The request's place among all of the run."""
    token_ids: tuple[int, ...] = ()
    finish: Finish = Finish.RUNNING
    cycles: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = (0,) * MAX_DRAFT_DEPTH
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prefill_seconds: float = 0.0
    """Of its prompt, and of those that were taken in together with it."""
    decode_seconds: float = 0.0
    """Of the blocks it was in."""
    compiles: int = 0


@dataclasses.dataclass
class _Row:
    """A request that holds a row."""

    request: Request
    length: int
    num_compiles: int
    """When its turn came."""
    last: RowUpdate


class Run:
    """Requests on their way; iterating gives each block's updates as they come.

    Requests are asked for as rows are free, and one ahead, so they may be as many as a file has.
    Up to `max_batch` start together; a row that has ended takes the next one. `prefill_seconds` and
    `decode_seconds` grow as the run goes.
    """

    def __init__(self, engine: Engine, requests: Iterable[Request], *, is_streaming: bool = False):
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._engine = engine
        self._waiting = enumerate(requests)
        self._ahead: tuple[int, Request] | None = None
        self._is_streaming = is_streaming
        self._rows: list[_Row | None] = []
        self._cancelled: set[int] = set()

    def cancel(self, index: int) -> None:
        """Ends a request that is running; the run says no more of it."""
        self._cancelled.add(index)

    def __iter__(self) -> Iterator[list[RowUpdate]]:
        engine, state = self._engine, None
        num_cycles = 1 if self._is_streaming else MAX_BLOCK_TOKENS
        self._ahead = next(self._waiting, None)
        while True:
            self._drop_cancelled()
            if not self._live():
                # The old caches go before the new ones are there.
                state = None
                if (state := self._start()) is None:
                    return
            assert state is not None
            for place, row in enumerate(self._rows):
                if row is None and self._ahead is not None:
                    began = time.perf_counter()
                    row = self._rows[place] = self._next()
                    state = engine.fit(state, *_extent(self._live().values()))
                    state = engine.insert(state, row.request, place)
                    jax.block_until_ready(state.cache)
                    self._count_prefill([row], time.perf_counter() - began)
            began = time.perf_counter()
            live = self._live()
            state = engine.fit(state, *_extent(live.values()))
            # Growing the cache, now and then, is no part of what a cycle costs.
            fitted, compiles = time.perf_counter(), num_compiles()
            proposal, most, controller = None, num_cycles, None
            wanted = min(num_cycles, self._cycles_until_a_row_may_end(live.values()))
            if engine.drafter is not None:
                controller = engine.drafter.controller(len(self._rows))
                proposal, most = controller.choose([row.length for row in live.values()])
            is_empty = np.array([row is None for row in self._rows])
            state, block = engine.decode(state, min(wanted, most), is_empty, proposal)
            updates = _row_updates(live, block)
            ended = time.perf_counter()
            self.decode_seconds += ended - began
            if controller is not None and proposal is not None:
                is_timed = num_compiles() == compiles
                before = [row.last for row in live.values()]
                controller.observe(
                    _report(proposal, before, updates, seconds=ended - fitted, is_timed=is_timed)
                )
            yield self._take_in(live, updates, ended - began)
            # Text should flow: blocks grow until one takes as long as a reader notices.
            if self._is_streaming and ended - began < STREAM_BLOCK_SECONDS:
                num_cycles = min(2 * num_cycles, MAX_BLOCK_TOKENS)

    def _live(self) -> dict[int, _Row]:
        """The rows that hold a request, by their place in the batch."""
        return {place: row for place, row in enumerate(self._rows) if row is not None}

    def _cycles_until_a_row_may_end(self, rows: Iterable[_Row]) -> int:
        """While requests wait for a row; else as many as a block holds."""
        if self._ahead is None:
            return MAX_BLOCK_TOKENS
        left = min(self._engine.limit(row.request) - row.length for row in rows)
        return min(left, REFILL_BLOCK_CYCLES)

    def _next(self) -> _Row:
        """The request that waits, to hold a row from now on."""
        assert self._ahead is not None
        index, request = self._ahead
        self._ahead = next(self._waiting, None)
        return _Row(
            request=request,
            length=len(request.prompt),
            num_compiles=num_compiles(),
            last=RowUpdate(index=index),
        )

    def _drop_cancelled(self) -> None:
        for place, row in self._live().items():
            if row.last.index in self._cancelled:
                self._cancelled.remove(row.last.index)
                self._rows[place] = None

    def _start(self) -> DecodeState | None:
        """The state of the next requests, in a batch of their own size; None if there are none."""
        rows = []
        while self._ahead is not None and len(rows) < self._engine.max_batch:
            rows.append(self._next())
        if not rows:
            return None
        began = time.perf_counter()
        state = self._engine.new_state([row.request for row in rows])
        state = self._engine.prefill(state, max(row.length for row in rows) - 1)
        jax.block_until_ready(state.cache)
        self._rows = rows + [None] * (state.lengths.shape[0] - len(rows))
        self._count_prefill(rows, time.perf_counter() - began)
        return state

    def _count_prefill(self, rows: Iterable[_Row], seconds: float) -> None:
        self.prefill_seconds += seconds
        for row in rows:
            row.last = dataclasses.replace(row.last, prefill_seconds=seconds)

    def _take_in(
        self, live: dict[int, _Row], updates: Sequence[RowUpdate], seconds: float
    ) -> list[RowUpdate]:
        """Moves the rows on and frees those that have ended; the updates with their times."""
        told = []
        for (place, row), update in zip(live.items(), updates, strict=True):
            row.length += len(update.token_ids)
            row.last = dataclasses.replace(
                update,
                prefill_seconds=row.last.prefill_seconds,
                decode_seconds=row.last.decode_seconds + seconds,
                compiles=num_compiles() - row.num_compiles,
            )
            told.append(row.last)
            if update.finish != Finish.RUNNING:
                self._rows[place] = None
        return told


def _extent(rows: Iterable[_Row]) -> tuple[list[Request], list[int]]:
    """What `Engine.fit` asks: the requests, and how long each is by now."""
    listed = list(rows)
    return [row.request for row in listed], [row.length for row in listed]


def _report(
    proposal: Proposal,
    before: Sequence[RowUpdate],
    after: Sequence[RowUpdate],
    *,
    seconds: float,
    is_timed: bool,
) -> BlockReport:
    """The block between two updates of each row."""
    pairs = list(zip(before, after, strict=True))

    def mean(values: Iterable[int]) -> float:
        return sum(values) / len(pairs)

    depths = range(len(after[0].accepted))
    return BlockReport(
        proposal=proposal,
        cycles=max(new.cycles - old.cycles for old, new in pairs),
        row_cycles=mean(new.cycles - old.cycles for old, new in pairs),
        accepted_by_depth=tuple(
            mean(new.accepted[d] - old.accepted[d] for old, new in pairs) for d in depths
        ),
        seconds=seconds,
        is_timed=is_timed,
    )


def _row_updates(live: dict[int, _Row], block: Block) -> list[RowUpdate]:
    """Reads back a block; the logprobs only if some row asked for them."""
    small = jax.device_get(block._replace(log=None))
    wants_log = any(row.request.params.logprobs is not None for row in live.values())
    log = jax.device_get(block.log) if wants_log else None
    updates = []
    for place, row in live.items():
        ids = tuple(small.tokens[place, : int(small.counts[place])].tolist())
        updates.append(
            RowUpdate(
                index=row.last.index,
                token_ids=ids,
                finish=Finish(int(small.reasons[place])),
                cycles=int(small.cycles[place]),
                drafted=int(small.drafted[place]),
                accepted=tuple(small.accepted[place].tolist()),
                logprobs=_logprobs(log, place, ids, row.request.params.logprobs),
            )
        )
    return updates


def _logprobs(
    log: TokenLog | None, place: int, ids: tuple[int, ...], num_top: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """Of a row's tokens of the block, each with the `num_top` most likely ones, if asked for."""
    if log is None or num_top is None:
        return None
    return tuple(
        TokenLogprobs(
            token_id=token,
            logprob=float(log.logprob[place, at]),
            top=tuple(
                zip(
                    log.top_ids[place, at, :num_top].tolist(),
                    log.top_logprobs[place, at, :num_top].tolist(),
                    strict=True,
                )
            ),
        )
        for at, token in enumerate(ids)
    )
