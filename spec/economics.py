"""When speculation pays: break-even, throughput and the best draft length, from measured costs.

Plain arithmetic on Python numbers, no arrays. Every function is for one stream. A cycle is one
draft and one verification and emits its accepted draft tokens plus the target's own next token,
so tokens per cycle always counts that extra token. A step is one plain decode step: one token.

    tokens per second = tokens per cycle / cycle time
    break-even        = cycle time / step time
    speedup           = tokens per cycle / break-even
"""

import math
from collections.abc import Mapping, Sequence

# beartype, which checks annotations in tests, does not take an int where float is asked.
Number = float | int


def break_even(cycle_seconds: Number, step_seconds: Number) -> float:
    """Tokens per cycle at which speculation is exactly as fast as plain decoding.

    Fewer and it is slower, more and it is faster; below 1 it cannot lose.

    Args:
        cycle_seconds: seconds one cycle takes, draft and verification together.
        step_seconds: seconds one plain decode step takes; 1 / (plain tokens per second).

    Raises:
        ValueError: a time is not positive and finite.
    """
    cycle_seconds = _positive("cycle_seconds", cycle_seconds)
    return cycle_seconds / _positive("step_seconds", step_seconds)


def tokens_per_second(tokens_per_cycle: Number, cycle_seconds: Number) -> float:
    """Tokens a second of one stream; plain decoding is 1 token in a cycle of one step.

    Args:
        tokens_per_cycle: mean tokens emitted in a cycle, the target's own token included.
        cycle_seconds: seconds one cycle takes, draft and verification together.

    Raises:
        ValueError: `tokens_per_cycle` is below 1 or not finite, or the time is not positive and
            finite.
    """
    return _at_least_one(tokens_per_cycle) / _positive("cycle_seconds", cycle_seconds)


def expected_tokens_per_cycle(acceptance_by_depth: Sequence[Number]) -> float:
    """Mean tokens a cycle emits: 1 + r[0] + r[0] r[1] + ..., between 1 and K + 1.

    Draft token k counts only if it and all before it are accepted, and the target always adds one
    token of its own. No draft tokens (an empty sequence) is plain decoding: 1.

    Args:
        acceptance_by_depth: K probabilities in 0..1; the k-th, counted from 0, is that of
            accepting draft token k given that all before it were accepted. This is not the share
            of cycles that reach and accept depth k, which is the cumulative product.

    Raises:
        ValueError: a probability is outside 0..1 or not a number.
    """
    return 1.0 + math.fsum(_reached(acceptance_by_depth))


def speedup(tokens_per_cycle: Number, cycle_seconds: Number, step_seconds: Number) -> float:
    """Speculative over plain tokens per second, a ratio: above 1 speculation is faster.

    Args:
        tokens_per_cycle: mean tokens emitted in a cycle, the target's own token included.
        cycle_seconds: seconds one cycle takes, draft and verification together.
        step_seconds: seconds one plain decode step takes; 1 / (plain tokens per second).

    Raises:
        ValueError: `tokens_per_cycle` is below 1 or not finite, or a time is not positive and
            finite.
    """
    return _at_least_one(tokens_per_cycle) / break_even(cycle_seconds, step_seconds)


def best_num_draft_tokens(
    acceptance_by_depth: Sequence[Number], cycle_seconds: Mapping[int, Number]
) -> int:
    """The measured draft length K with the most tokens per second; the shortest of equals.

    Args:
        acceptance_by_depth: as in `expected_tokens_per_cycle`, at least as many as the longest K
            measured; a K uses the first K of them.
        cycle_seconds: K -> seconds one cycle with K draft tokens takes. Key 0 is the plain decode
            step; only where it is given can the answer be 0, that is, not to speculate.

    Raises:
        ValueError: nothing was measured, a K is negative or longer than the known probabilities,
            a time is not positive and finite, or a probability is outside 0..1.
    """
    if not cycle_seconds:
        raise ValueError(f"cycle_seconds has no measured draft length: {dict(cycle_seconds)}")
    tokens = [1.0]
    for reached in _reached(acceptance_by_depth):
        tokens.append(tokens[-1] + reached)
    rates: dict[int, float] = {}
    for K in sorted(cycle_seconds):
        if not 0 <= K < len(tokens):
            known = len(acceptance_by_depth)
            raise ValueError(f"cycle_seconds has K = {K}; acceptance is known for K = 0..{known}")
        rates[K] = tokens[K] / _positive(f"cycle_seconds[{K}]", cycle_seconds[K])
    return max(rates, key=lambda K: rates[K])  # the first of equals, and keys ascend


def _reached(acceptance_by_depth: Sequence[Number]) -> list[float]:
    """Probability that draft token k and all before it are accepted, for each k."""
    out, product = [], 1.0
    for depth, rate in enumerate(acceptance_by_depth):
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance_by_depth[{depth}] must be in 0..1, got {rate!r}")
        product *= rate
        out.append(product)
    return out


def _positive(name: str, seconds: Number) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"{name} must be positive and finite seconds, got {seconds!r}")
    return float(seconds)


def _at_least_one(tokens_per_cycle: Number) -> float:
    if not (tokens_per_cycle >= 1 and math.isfinite(tokens_per_cycle)):
        raise ValueError(
            "tokens_per_cycle must be finite and at least 1, the target's own token included, "
            f"got {tokens_per_cycle!r}"
        )
    return float(tokens_per_cycle)
