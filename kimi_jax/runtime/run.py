"""Requests on their way through an engine's programs, block by block."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.decode import MAX_BLOCK_TOKENS, MAX_DRAFT_DEPTH, Block, Finish
from kimi_jax.runtime.engine import BlockReport, Engine, Proposal, Request

STREAM_BLOCK_SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first, as many as were asked for."""


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """What one block gave one row."""

    row: int
    token_ids: tuple[int, ...]
    finish: Finish
    cycles: int
    drafted: int
    accepted: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None

    @classmethod
    def none(cls, row: int) -> "RowUpdate":
        """Before the first block."""
        return cls(row, (), Finish.RUNNING, 0, 0, (0,) * MAX_DRAFT_DEPTH, None)


class Run:
    """A batch of requests on its way; iterating gives each block's updates as they come.

    Rows named by `cancel` end before the next block. `prefill_seconds` and `decode_seconds` grow
    as the run goes.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, is_streaming: bool = False):
        if not 0 < len(requests) <= engine.max_batch:
            raise ValueError(f"{len(requests)} requests; a run takes 1 to {engine.max_batch}")
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._engine = engine
        self._requests = requests
        self._is_streaming = is_streaming
        self._cancelled: set[int] = set()

    def cancel(self, row: int) -> None:
        """Ends a row that is still running, as stopped."""
        self._cancelled.add(row)

    def __iter__(self) -> Iterator[list[RowUpdate]]:
        engine, requests = self._engine, self._requests
        began = time.perf_counter()
        state = engine.new_state(requests)
        state = engine.prefill(state, max(len(r.prompt) for r in requests) - 1)
        jax.block_until_ready(state.cache)
        self.prefill_seconds = time.perf_counter() - began
        running = set(range(len(requests)))
        lengths = [len(r.prompt) for r in requests]
        num_cycles = 1 if self._is_streaming else MAX_BLOCK_TOKENS
        batch = state.lengths.shape[0]
        controller = None if engine.drafter is None else engine.drafter.controller(batch)
        before = {row: RowUpdate.none(row) for row in running}
        while running - self._cancelled:
            began = time.perf_counter()
            cancelled = np.zeros(state.lengths.shape, np.bool_)
            cancelled[list(self._cancelled)] = True
            state = engine.fit(state, requests, lengths)
            # Growing the cache, now and then, is no part of what a cycle costs.
            fitted, compiles = time.perf_counter(), num_compiles()
            proposal, most = None, num_cycles
            if controller is not None:
                proposal, most = controller.choose([lengths[row] for row in running])
            state, block = engine.decode(state, min(num_cycles, most), cancelled, proposal)
            updates = _row_updates(requests, block, running)
            for update in updates:
                lengths[update.row] += len(update.token_ids)
            ended = time.perf_counter()
            seconds = ended - began
            self.decode_seconds += seconds
            if controller is not None and proposal is not None:
                is_timed = num_compiles() == compiles
                controller.observe(
                    _report(proposal, updates, before, seconds=ended - fitted, is_timed=is_timed)
                )
            before = {update.row: update for update in updates}
            running -= {u.row for u in updates if u.finish != Finish.RUNNING}
            yield updates
            # Text should flow: blocks grow until one takes as long as a reader notices.
            if self._is_streaming and seconds < STREAM_BLOCK_SECONDS:
                num_cycles = min(2 * num_cycles, MAX_BLOCK_TOKENS)


def _report(
    proposal: Proposal,
    updates: Sequence[RowUpdate],
    before: Mapping[int, RowUpdate],
    *,
    seconds: float,
    is_timed: bool,
) -> BlockReport:
    """The block between two updates of each row."""

    def mean(values: Iterable[int]) -> float:
        return sum(values) / len(updates)

    depths = range(len(updates[0].accepted))
    return BlockReport(
        proposal=proposal,
        cycles=max(u.cycles - before[u.row].cycles for u in updates),
        row_cycles=mean(u.cycles - before[u.row].cycles for u in updates),
        accepted_by_depth=tuple(
            mean(u.accepted[d] - before[u.row].accepted[d] for u in updates) for d in depths
        ),
        seconds=seconds,
        is_timed=is_timed,
    )


def _row_updates(requests: Sequence[Request], block: Block, running: set[int]) -> list[RowUpdate]:
    """Reads back a block; the logprobs only if some row asked for them."""
    small = jax.device_get(block._replace(log=None))
    wants_log = any(requests[row].params.logprobs is not None for row in running)
    log = jax.device_get(block.log) if wants_log else None
    updates = []
    for row in sorted(running):
        count, params = int(small.counts[row]), requests[row].params
        ids = tuple(small.tokens[row, :count].tolist())
        logprobs = None
        if params.logprobs is not None and log is not None:
            logprobs = tuple(
                TokenLogprobs(
                    token_id=token,
                    logprob=float(log.logprob[row, at]),
                    top=tuple(
                        zip(
                            log.top_ids[row, at, : params.logprobs].tolist(),
                            log.top_logprobs[row, at, : params.logprobs].tolist(),
                            strict=True,
                        )
                    ),
                )
                for at, token in enumerate(ids)
            )
        updates.append(
            RowUpdate(
                row=row,
                token_ids=ids,
                finish=Finish(int(small.reasons[row])),
                cycles=int(small.cycles[row]),
                drafted=int(small.drafted[row]),
                accepted=tuple(small.accepted[row].tolist()),
                logprobs=logprobs,
            )
        )
    return updates
