"""When speculation pays: break-even, throughput and the best draft length, from costs; and what a
step or a cycle costs, predicted.

Plain arithmetic on Python numbers, no arrays, no figures of any machine. Every function is for one
stream. A cycle is one draft and one verification and emits its accepted draft tokens plus the
target's own next token, so tokens per cycle always counts that extra token. A step is one plain
decode step: one token.

    tokens per second = tokens per cycle / cycle time
    break-even        = cycle time / step time
    speedup           = tokens per cycle / break-even

The model of time, for the few rows of a decode step, where arithmetic hides behind the reading of
weights:

    time     = sum over what is read of bytes / (bandwidth x efficiency)
             + kernels x fixed cost of a kernel inside a graph
             + sum over collectives of latency(payload)
             + host launches x cost of a host launch
    experts  = E (1 - (1 - A / E)^n), distinct ones of n rows that choose A of E independently
"""

import bisect
import collections
import dataclasses
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


def rates_from_shares(kept_by_depth: Sequence[Number]) -> list[float]:
    """Probabilities as `expected_tokens_per_cycle` takes them, from cumulative shares.

    Args:
        kept_by_depth: the k-th, counted from 0, is the share of cycles that keep draft token k.

    Raises:
        ValueError: a share is outside 0..1, or above the one before it: a cycle that keeps a draft
            token keeps all before it.
    """
    rates, before = [], 1.0
    for depth, share in enumerate(kept_by_depth):
        if not 0 <= share <= 1:
            raise ValueError(f"kept_by_depth[{depth}] must be in 0..1, got {share!r}")
        if share > before:
            raise ValueError(
                f"kept_by_depth[{depth}] is {share!r}, more than the {before!r} before it; a cycle "
                "that keeps a draft token keeps all before it"
            )
        rates.append(share / before if before else 0.0)
        before = float(share)
    return rates


def distinct_experts(num_rows: Number, num_experts: int, num_chosen: int) -> float:
    """Mean distinct experts that rows choose, each independently of the others: an upper bound.

    Rows that follow each other in a text share more.

    Args:
        num_rows: rows of one forward, over all streams.
        num_experts: E, of a layer.
        num_chosen: A, of a row.

    Raises:
        ValueError: fewer experts than a row chooses, or no rows.
    """
    if not 1 <= num_chosen <= num_experts or num_rows < 0:
        raise ValueError(
            f"expected 1 <= num_chosen <= num_experts and num_rows >= 0, got {num_chosen}, "
            f"{num_experts} and {num_rows}"
        )
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_rows)


def distinct_in_trace(expert_ids: Sequence[Sequence[Sequence[int]]], num_rows: int) -> float:
    """Mean distinct experts of `num_rows` consecutive tokens, over all places and layers.

    Args:
        expert_ids: [layers][tokens][experts of a token], of one text.
        num_rows: tokens verified together.

    Raises:
        ValueError: a layer has fewer tokens.
    """
    counts = []
    for layer, tokens in enumerate(expert_ids):
        if not 1 <= num_rows <= len(tokens):
            raise ValueError(
                f"layer {layer} of the trace has {len(tokens)} tokens, {num_rows} are needed"
            )
        # A window that slides by a token: how often each expert is in it.
        inside: collections.Counter[int] = collections.Counter()
        for at, ids in enumerate(tokens):
            inside.update(ids)
            if at >= num_rows:
                inside.subtract(tokens[at - num_rows])
                inside += collections.Counter()
            if at >= num_rows - 1:
                counts.append(len(inside))
    if not counts:
        raise ValueError("the trace has no layers")
    return math.fsum(counts) / len(counts)


def distinct_of_streams(distinct: Number, num_streams: int, num_experts: int) -> float:
    """Mean distinct experts over streams that know nothing of each other.

    Args:
        distinct: of one stream's rows.
        num_streams: how many decode together.
        num_experts: E, of a layer.
    """
    return num_experts * (1 - (1 - distinct / num_experts) ** num_streams)


def read_seconds(num_bytes: Number, bytes_per_second: Number, efficiency: Number) -> float:
    """Seconds to read bytes from a device's memory at this share of its bandwidth.

    Raises:
        ValueError: the bandwidth is not positive, or the share is not in 0..1.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be above 0 and at most 1, got {efficiency!r}")
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second must be positive, got {bytes_per_second!r}")
    return num_bytes / (bytes_per_second * efficiency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds a collective takes by its payload in bytes: straight lines between the points.

    Below the first point as there. Past the last the line goes on as steep as between the last
    two, or at `bytes_per_second` where that is slower.
    """

    points: tuple[tuple[Number, Number], ...]
    """(bytes, seconds), by ascending bytes."""
    bytes_per_second: Number = math.inf
    """Of payload, where bandwidth limits."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"latency points must ascend by bytes, got {sizes}")
        for size, seconds in self.points:
            _positive(f"latency of {size:g} bytes", seconds)

    def seconds(self, num_bytes: Number) -> float:
        """Of one collective with this payload."""
        sizes = [size for size, _ in self.points]
        above = bisect.bisect_left(sizes, num_bytes)
        if above == 0:
            return self.points[0][1]
        if above == len(sizes):
            size, seconds = self.points[-1]
            slope = 1 / self.bytes_per_second
            if above > 1:
                size_before, before = self.points[-2]
                slope = max(slope, (seconds - before) / (size - size_before))
            return seconds + slope * (num_bytes - size)
        (low, before), (high, after) = self.points[above - 1], self.points[above]
        return before + (after - before) * (num_bytes - low) / (high - low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes one device reads, and the share of its bandwidth they come at."""

    num_bytes: Number
    efficiency: Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of a program: `kind` is "all-reduce" or "all-gather"."""

    kind: str
    count: Number
    num_bytes: Number
    """Of the result of one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one pass of a program does on each device."""

    reads: Mapping[str, Read]
    """By what is read."""
    kernels: Number
    """Launches inside graphs that are no collectives."""
    collectives: tuple[Collective, ...] = ()
    host_launches: Number = 0
    """Graphs, and what the host launches beside them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What time depends on, of one device among its like."""

    bytes_per_second: Number
    """Of its memory, by its data sheet."""
    kernel_seconds: Number
    """Fixed cost of a kernel inside a graph: the gap before it, filling up and running dry."""
    host_launch_seconds: Number
    latencies: Mapping[str, Latency]
    """By kind of collective; empty for one device alone."""


def seconds_by_term(work: Work, machine: Machine) -> dict[str, float]:
    """Predicted seconds of a pass, by what they go to; their sum is the pass's time.

    The terms are the names of `work.reads`, "kernels", the kinds of collectives, and "host".

    Raises:
        ValueError: a kind of collective the machine knows no latency of.
    """
    terms = {
        name: read_seconds(read.num_bytes, machine.bytes_per_second, read.efficiency)
        for name, read in work.reads.items()
    }
    terms["kernels"] = work.kernels * machine.kernel_seconds
    for collective in work.collectives:
        kind = collective.kind
        if kind not in machine.latencies:
            raise ValueError(f"no latency of {kind!r}; known: {sorted(machine.latencies)}")
        seconds = collective.count * machine.latencies[kind].seconds(collective.num_bytes)
        terms[kind] = terms.get(kind, 0.0) + seconds
    terms["host"] = work.host_launches * machine.host_launch_seconds
    return terms


def pass_seconds(work: Work, machine: Machine) -> float:
    """Predicted seconds of a pass."""
    return math.fsum(seconds_by_term(work, machine).values())


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
