"""What to draft, chosen between blocks from what cycles cost and how many drafts stand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.runtime.engine import BlockReport, Proposal
from spec.economics import expected_tokens_per_cycle
from spec.tree import Chain, StaticTree

HYSTERESIS = 1.03
"""How much faster another length must promise to be before it is taken."""

PROBE_CYCLES = 4
"""Cycles of a block that only looks how many drafts would stand now."""

FIRST_WAIT, LAST_WAIT = 4, 16
"""Blocks between probes; the wait doubles each time nothing comes of one."""

MEMORY_CYCLES = 64
"""Cycles over which acceptance is remembered: what is older counts less and less."""

COST_SMOOTHING = 0.25
"""Weight of a whole block in a length's running cost."""

MANY = 1 << 16
"""More cycles than a block holds."""

LEAST_CYCLES = 7
"""Shorter blocks, as at the start of a stream, cost mostly their call and teach nothing."""


class FixedProposal:
    """Always the same; plain decoding once all live rows are past the drafter's own positions."""

    def __init__(self, proposal: Proposal, max_length: int):
        self._proposal = proposal
        self._max_length = max_length

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

    The promise of K is `expected_tokens_per_cycle` of the acceptance seen so far over the seconds a
    cycle costs, from warm-up or the first blocks and then from every block. Lengths whose cost is
    unknown are tried once, the longest first. What shorter lengths do not show is looked at again
    in short blocks of the longest, ever more rarely if nothing comes of it: a drafter that is never
    right costs a hundredth of the tokens.

    Args:
        lengths: K to choose from; 0 is among them whether named or not.
        max_length: the drafter's own positions; past them, plain decoding.
    """

    def __init__(self, lengths: Sequence[int], max_length: int):
        self._lengths = sorted({0, *lengths}, reverse=True)
        self._max_length = max_length
        self._seconds: dict[int, float] = {}
        # Of drafts at each depth, those reached (all before them stood) and those that stood.
        self._reached = [0.0] * self._lengths[0]
        self._stood = [0.0] * self._lengths[0]
        self._current = self._lengths[0]
        self._blocks_left = FIRST_WAIT
        self._wait = FIRST_WAIT

    def choose(self, lengths: Sequence[int]) -> tuple[StaticTree | None, int]:
        """A chain of one of the lengths or None, and the cycles to run it for."""
        longest = self._lengths[0]
        if all(n + longest > self._max_length for n in lengths):
            return None, MANY
        untried = [k for k in self._lengths if k not in self._seconds]
        if untried or (longest and not self._reached[0]):
            return Chain(untried[0] if untried else longest), 2 * PROBE_CYCLES
        before, self._current = self._current, self._best()
        if self._current != before:
            self._wait = FIRST_WAIT
            self._blocks_left = self._wait
        if self._current == longest:
            return Chain(longest), MANY
        self._blocks_left -= 1
        if self._blocks_left <= 0:
            self._wait = min(2 * self._wait, LAST_WAIT)
            self._blocks_left = self._wait
            return Chain(longest), PROBE_CYCLES
        return Chain(self._current), MANY

    def observe(self, report: BlockReport) -> None:
        """Takes a block in: its cost, and which drafts stood."""
        K = report.proposal.num_draft_tokens
        is_new = K not in self._seconds and report.cycles > 0
        if report.is_timed and (is_new or report.cycles >= LEAST_CYCLES):
            each = report.seconds / report.cycles
            old = self._seconds.get(K, each)
            self._seconds[K] = old + COST_SMOOTHING * (each - old)
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
        self._seconds |= {proposal.num_draft_tokens: each for proposal, each in seconds.items()}

    @property
    def acceptance(self) -> list[float]:
        """The chance that a draft stands if all before it do, by depth; 0 where none was seen."""
        pairs = zip(self._stood, self._reached, strict=True)
        return [stood / reached if reached else 0.0 for stood, reached in pairs]

    def _best(self) -> int:
        promise = {
            K: expected_tokens_per_cycle(self.acceptance[:K]) / self._seconds[K]
            for K in self._lengths
        }
        best = max(promise, key=promise.__getitem__)
        current = promise.get(self._current, 0.0)
        return best if promise[best] > HYSTERESIS * current else self._current
