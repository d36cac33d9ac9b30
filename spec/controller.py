"""How many tokens to draft, chosen between blocks from what blocks cost and gave."""

from collections.abc import Sequence

PROBE_EVERY = 8
"""Blocks after which the lengths that lost are tried again: text changes, and so does what pays."""

LEAST_CYCLES = 4
"""Shorter blocks, as at the start of a stream, cost mostly their call and teach nothing."""

SMOOTHING = 0.5
"""Weight of a new block in a length's running figures."""


class FixedLength:
    """Always K, and 0 once every live row has passed the drafter's own position limit."""

    def __init__(self, num_draft_tokens: int, max_length: int):
        self._num_draft_tokens = num_draft_tokens
        self._max_length = max_length

    def choose(self, lengths: Sequence[int]) -> int:
        """K or 0; `lengths` are those of live rows."""
        is_past = all(n + self._num_draft_tokens > self._max_length for n in lengths)
        return 0 if is_past else self._num_draft_tokens

    def observe(self, num_draft_tokens: int, cycles: int, tokens: float, seconds: float) -> None:
        """Nothing to learn."""


class FastestLength:
    """The length whose blocks gave most tokens a second, the others tried again now and then.

    Every length is tried once at the start, the longest first, and one that lost once every
    `PROBE_EVERY` blocks, so a drafter that does not pay costs about one block in eight. It is kept
    from request to request.
    """

    def __init__(self, lengths: Sequence[int], max_length: int):
        self._lengths = sorted(lengths, reverse=True)
        self._max_length = max_length
        self._rates: dict[int, float] = {}
        self._since_probe = 0
        self._next_probe = 0

    def choose(self, lengths: Sequence[int]) -> int:
        """One of the lengths given at the start, 0 past the drafter's own position limit."""
        if all(n + self._lengths[0] > self._max_length for n in lengths):
            return 0
        untried = [k for k in self._lengths if k not in self._rates]
        if untried:
            return untried[0]
        best = max(self._rates, key=self._rates.__getitem__)
        self._since_probe += 1
        if self._since_probe < PROBE_EVERY:
            return best
        self._since_probe = 0
        others = [k for k in self._lengths if k != best]
        if not others:
            return best
        self._next_probe += 1
        return others[self._next_probe % len(others)]

    def observe(self, num_draft_tokens: int, cycles: int, tokens: float, seconds: float) -> None:
        """Takes a block in: tokens a row gained over its seconds."""
        if cycles < LEAST_CYCLES or seconds <= 0:
            return
        rate = tokens / seconds
        old = self._rates.get(num_draft_tokens, rate)
        self._rates[num_draft_tokens] = old + SMOOTHING * (rate - old)
