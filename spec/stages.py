"""The stages of a plain step and of a speculative cycle, and which of them to attack.

A stage is known by the named scopes an operation was traced in: `spec/cycle.py` opens "draft",
"target", "accept" and "extend", the target's layers "mla", "moe", "mlp" and "head".
"""

import dataclasses
from collections.abc import Mapping

from kimi_jax.runtime.program import CALLS, Operation
from kimi_jax.runtime.trace import BETWEEN, OUTSIDE, TRACING
from spec.economics import Number, break_even

DRAFT, ACCEPT, EXTEND = "draft", "accept", "extend"
ATTENTION, EXPERTS, DENSE, COLLECTIVES, HEAD, REST = (
    "attention",
    "experts",
    "dense layers",
    "collectives",
    "head",
    "rest",
)
LOOP, UNATTRIBUTED = "loop", "unattributed"

STAGES = {
    DRAFT: "the drafter proposes",
    ATTENTION: "the target's, with the norms and first products before it",
    EXPERTS: "router, routed and shared experts, with the norm before them",
    DENSE: "the target's layers without experts",
    COLLECTIVES: "the target's all-reduces and all-gathers, waiting for other devices included",
    HEAD: "final norm and head",
    REST: "the rest of the target: embedding, rotary angles, the last sum",
    ACCEPT: "the choice of tokens, which drafts stand, what the row keeps",
    EXTEND: "the drafter runs again, over the accepted rows",
    LOOP: "the loop over cycles, and what a block does before and after it",
    BETWEEN: "nothing runs between two operations: the runtime starts the next",
    OUTSIDE: "the host: it starts a block and reads it back",
    UNATTRIBUTED: "operations without a scope, or that the program does not know",
    TRACING: "the profiler records an operation's end; not there without it",
}
"""In the order of a table, and what each is."""

VERIFY = (ATTENTION, EXPERTS, DENSE, COLLECTIVES, HEAD, REST)
"""The target's forward: of a cycle, the verification."""

_PARTS = {"mla": ATTENTION, "moe": EXPERTS, "mlp": DENSE, "head": HEAD}
_COLLECTIVE = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)


def stage_of(operation: Operation | None) -> str:
    """The stage an operation belongs to.

    Collectives of drafter and choice count there: only the target's have a stage of their own.
    """
    if operation is None:
        return UNATTRIBUTED
    scopes = operation.scope.split("/")
    for stage in (DRAFT, EXTEND, ACCEPT):
        if stage in scopes:
            return stage
    if "target" in scopes:
        if operation.opcode.startswith(_COLLECTIVE):
            return COLLECTIVES
        return next((_PARTS[scope] for scope in scopes if scope in _PARTS), REST)
    if operation.opcode in CALLS:
        # The time of a loop itself is what passes between the operations of its body.
        return BETWEEN
    return LOOP if operation.scope else UNATTRIBUTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """One program's cycle, by stage and as a whole."""

    seconds: Mapping[str, Number]
    """Of a cycle, by stage, as traced; their sum is the traced cycle."""
    cycle_seconds: Number
    """Without the profiler."""
    events: Number
    """Operations recorded in a cycle."""

    @property
    def traced_seconds(self) -> float:
        """Of a cycle while the profiler recorded."""
        return sum(self.seconds.values())

    @property
    def stages_seconds(self) -> float:
        """The stages' sum without what the trace itself shows as its own cost."""
        return self.traced_seconds - self.seconds.get(TRACING, 0.0)

    @property
    def verify_seconds(self) -> float:
        """The target's forward."""
        return sum(self.seconds.get(stage, 0.0) for stage in VERIFY)

    def fraction(self, stage: str) -> float:
        """Of the stages' sum."""
        return self.seconds.get(stage, 0.0) / self.stages_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a verdict is made from, beside the times."""

    context: int
    num_draft_tokens: int
    tokens_per_cycle: Number
    distinct_step: Number
    """Experts a plain step reads a layer, and a verification, if rows choose independently."""
    distinct_verify: Number
    num_experts: int
    devices: int
    cache: str
    """Where the latent cache lies, as `LLM` is told."""


def verdict(step: Timed, cycle: Timed | None, facts: Facts) -> str:
    """One line: whether speculation pays, the largest term of a cycle, and what would shrink it."""
    slow = step if cycle is None else cycle
    terms = {stage: seconds for stage, seconds in slow.seconds.items() if stage in STAGES}
    terms.pop(TRACING, None)
    term = max(terms, key=lambda stage: terms[stage])
    what = "step" if cycle is None else "cycle"
    told = f"{term} takes {100 * slow.fraction(term):.0f} % of a {what} at {facts.context} tokens"
    if cycle is not None and term in VERIFY and step.seconds.get(term):
        grown = cycle.seconds[term] / step.seconds[term]
        told += f", {grown:.1f} times a plain step's"
    told += f": {_remedy(term, cycle is not None, facts)}"
    if cycle is None:
        return told
    needed = break_even(cycle.cycle_seconds, step.cycle_seconds)
    gives = facts.tokens_per_cycle
    sign = "pays" if gives > needed else "does not pay"
    return f"speculation {sign} ({gives:.2f} tokens a cycle, break-even {needed:.2f}); {told}"


def _remedy(term: str, is_cycle: bool, facts: Facts) -> str:
    fewer = "draft fewer tokens, " if is_cycle else ""
    if term == EXPERTS:
        rows = (
            f"up to {facts.distinct_verify:.1f} distinct experts of {facts.num_experts} a layer "
            f"against {facts.distinct_step:.0f} in a step; "
            if is_cycle
            else f"{facts.distinct_step:.0f} of {facts.num_experts} experts a layer are read; "
        )
        return rows + fewer + "cut the experts over more devices, or tune tiles (tune_tiles.py)"
    is_shared_out = facts.cache == "sequence"
    can_share_out = facts.devices > 1 and not is_shared_out
    share_out = "share its slots out over the devices (--cache sequence), " if can_share_out else ""
    return {
        ATTENTION: f"it reads the cache: {fewer}{share_out}keep contexts short, or tune tiles "
        "(tune_tiles.py)",
        DENSE: "weights are read once whatever the rows: cut them over more devices",
        COLLECTIVES: f"over {facts.devices} devices: probe_collectives.py says whether the links "
        "are slow, else another device is late"
        + ("; at short contexts --cache replicated spares two a layer" if is_shared_out else ""),
        HEAD: f"it reads the vocabulary once: {fewer}cut it over more devices",
        REST: "not a place that should be large: look at the trace",
        DRAFT: "draft fewer tokens, or take a drafter with a smaller vocabulary",
        EXTEND: f"{fewer}or take a smaller drafter",
        ACCEPT: "sampling options cost here (top_k, top_p, penalties, logprobs); greedy is cheap",
        LOOP: "the state is copied or a block is too short: more cycles a block",
        BETWEEN: "many small operations, or the processor is shared: look at launches and graphs "
        "(compile_check.py), and at what else runs",
        OUTSIDE: "the host is late: more cycles a block, and nothing else on its cores",
        UNATTRIBUTED: "compile again without a compilation cache made by another version",
    }[term]
