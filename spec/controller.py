"""What to draft, chosen between blocks from what cycles cost and how many drafts stand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.runtime.engine import BlockReport, Proposal
from spec.economics import (
    best_num_draft_tokens,
    expected_tokens_per_cycle,
    tokens_per_second,
)
from spec.tree import Chain, StaticTree

HYSTERESIS = 1.03
"""How much faster another length must promise to be before it is taken."""

LEAVE_PLAIN = 1.06
"""The same for drafting at all: what it promises rests on two noisy costs, plain decoding on none.
Back to plain decoding there is no hurdle."""

PROBE_CYCLES = 8
"""Cycles of a block that only looks what another length costs, and how many drafts stand now."""

FIRST_WAIT, LAST_WAIT = 64, 1024
"""Cycles between such blocks; the wait doubles each time nothing comes of one."""

MEMORY_CYCLES = 64
"""Cycles over which costs and acceptance are remembered: what is older counts less and less."""

MANY = 1 << 16
"""More cycles than a block holds."""


class FixedProposal:
    """Always the same; plain decoding once all live rows are past the drafter's own positions."""

    def __init__(self, proposal: Proposal, max_length: int):
        self._proposal = proposal
        self._max_length = max_length

    @property
    def current(self) -> Proposal:
        """The proposal."""
        return self._proposal

    def choose(self, lengths: Sequence[int]) -> tuple[Proposal | None, int]:
        """The proposal or None; `lengths` are those of live rows."""
        is_past = all(n + self._proposal.depth > self._max_length for n in lengths)
        return (None if is_past else self._proposal), MANY

    def observe(self, report: BlockReport) -> None:
        """Nothing to learn."""

    def calibrate(self, seconds: Mapping[Any, float]) -> None:
        """Nothing to choose from."""


class AdaptiveLength:
    """The draft length that promises most tokens a second; kept from request to request.

    The promise of K is `expected_tokens_per_cycle` of the acceptance seen lately over the seconds a
    cycle costs. Costs come from warm-up, or from a short block of each length at the start, the
    longest first; after that every block tells the cost of its own length, and by how much all have
    changed with the context and the machine. In a short block now and then the longest length,
    which alone shows how many drafts would stand, and in turn each of the others are looked at
    again, ever more rarely if nothing comes of it: a drafter that is never right costs about a
    fiftieth of the tokens.

    Args:
        lengths: K to choose from; without 0 among them it always drafts.
        max_length: the drafter's own positions; past them, plain decoding.
    """

    def __init__(self, lengths: Sequence[int], max_length: int):
        self._lengths = sorted(set(lengths), reverse=True)
        self._max_length = max_length
        longest = self._lengths[0]
        # Of each length, seconds and cycles; of each depth, the drafts reached (all before them
        # stood) and those that stood. Both fade.
        self._costs: dict[int, tuple[float, float]] = {}
        self._reached = [0.0] * longest
        self._stood = [0.0] * longest
        self._current = longest
        self._wait = FIRST_WAIT
        self._cycles_left = FIRST_WAIT
        self._num_looks = 0

    @property
    def current(self) -> StaticTree:
        """A chain of the length last settled on."""
        return Chain(self._current)

    def choose(self, lengths: Sequence[int]) -> tuple[StaticTree | None, int]:
        """A chain of one of the lengths or None, and the cycles to run it for."""
        longest = self._lengths[0]
        if all(n + longest > self._max_length for n in lengths):
            return None, MANY
        if longest and not self._reached[0]:
            return Chain(longest), PROBE_CYCLES
        for K in self._lengths:
            if K not in self._costs:
                return Chain(K), PROBE_CYCLES
        best = self._best()
        if best != self._current:
            self._current, self._wait = best, FIRST_WAIT
            self._cycles_left, self._num_looks = self._wait, 0
        if self._cycles_left > 0:
            return self.current, MANY
        self._wait = min(2 * self._wait, LAST_WAIT)
        self._cycles_left = self._wait
        self._num_looks += 1
        others = [K for K in self._lengths if K not in (longest, self._current)]
        if others and (self._num_looks % 2 == 0 or self._current == longest):
            return Chain(others[self._num_looks // 2 % len(others)]), PROBE_CYCLES
        return Chain(longest), PROBE_CYCLES

    def observe(self, report: BlockReport) -> None:
        """Takes a block in: its cost, and which drafts stood."""
        K = report.proposal.num_draft_tokens
        self._cycles_left -= report.cycles
        if report.is_timed and report.cycles:
            self._learn_cost(K, report.seconds, report.cycles)
        # Also where nothing was drafted the text has gone on, and what stood before tells less.
        fade = max(0.5, 1 - report.row_cycles / MEMORY_CYCLES)
        self._reached = [fade * x for x in self._reached]
        self._stood = [fade * x for x in self._stood]
        reached = report.row_cycles
        for depth in range(K):
            stood = min(report.accepted_by_depth[depth], reached)
            self._reached[depth] += reached
            self._stood[depth] += stood
            reached = stood

    def calibrate(self, seconds: Mapping[Any, float]) -> None:
        """Takes in what cycles cost on this machine."""
        for proposal, each in seconds.items():
            self._costs[proposal.num_draft_tokens] = (PROBE_CYCLES * each, PROBE_CYCLES)

    @property
    def acceptance(self) -> list[float]:
        """The chance that a draft stands if all before it do, by depth; 0 where none was seen."""
        pairs = zip(self._stood, self._reached, strict=True)
        return [stood / reached if reached else 0.0 for stood, reached in pairs]

    @property
    def cycle_seconds(self) -> dict[int, float]:
        """What a cycle of each length is thought to cost now."""
        return {K: seconds / cycles for K, (seconds, cycles) in self._costs.items()}

    def _learn_cost(self, K: int, seconds: float, cycles: int) -> None:
        old = self.cycle_seconds.get(K)
        fade = max(0.5, 1 - cycles / MEMORY_CYCLES)
        self._costs = {other: (fade * s, fade * c) for other, (s, c) in self._costs.items()}
        own_seconds, own_cycles = self._costs.get(K, (0.0, 0.0))
        self._costs[K] = (own_seconds + seconds, own_cycles + cycles)
        # The others have probably become as much dearer or cheaper: half of it is believed.
        change = math.sqrt(self.cycle_seconds[K] / old) if old else 1.0
        for other in self._costs.keys() - {K}:
            own_seconds, own_cycles = self._costs[other]
            self._costs[other] = (change * own_seconds, own_cycles)

    def _best(self) -> int:
        costs, acceptance = self.cycle_seconds, self.acceptance
        best = best_num_draft_tokens(acceptance, costs)

        def promise(K: int) -> float:
            return tokens_per_second(expected_tokens_per_cycle(acceptance[:K]), costs[K])

        hurdle = 1.0 if best == 0 else LEAVE_PLAIN if self._current == 0 else HYSTERESIS
        return best if promise(best) > hurdle * promise(self._current) else self._current
