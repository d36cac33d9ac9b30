"""Operations told apart by their scopes, and verdicts worked by hand."""

import dataclasses

import pytest

from kimi_jax.runtime.program import Operation
from kimi_jax.runtime.trace import BETWEEN, OUTSIDE, TRACING
from spec import stages
from spec.stages import STAGES, Facts, Timed, stage_of, verdict

LOOP = "jit(decode)/shard_map/while/body/"


@pytest.mark.parametrize(
    ("scope", "opcode", "stage"),
    [
        (LOOP + "target/layer_3/mla/dot_general", "dot", stages.ATTENTION),
        (LOOP + "target/layer_3/moe/while/body/mul", "fusion", stages.EXPERTS),
        (LOOP + "target/layer_0/mlp/dot_general", "fusion", stages.DENSE),
        (LOOP + "target/head/dot_general", "fusion", stages.HEAD),
        (LOOP + "target/embed/gather", "gather", stages.REST),
        (LOOP + "target/layer_3/mla/psum", "all-reduce-start", stages.COLLECTIVES),
        (LOOP + "target/all_gather", "all-gather", stages.COLLECTIVES),
        # The drafter has attention and collectives too, and the choice exchanges what it found.
        (LOOP + "draft/eagle3/mla/dot_general", "dot", stages.DRAFT),
        (LOOP + "extend/eagle3/mlp/psum", "all-reduce", stages.EXTEND),
        (LOOP + "accept/choose/all_gather", "all-gather", stages.ACCEPT),
        # A loop inside a stage is that stage's; the one around cycles is not.
        (LOOP + "target/layer_3/moe/while", "while", stages.EXPERTS),
        ("jit(decode)/while", "while", BETWEEN),
        ("jit(decode)/while/cond/lt", "fusion", stages.LOOP),
        ("", "copy", stages.UNATTRIBUTED),
    ],
)
def test_scopes_are_stages(scope, opcode, stage):
    assert stage_of(Operation(scope, opcode)) == stage
    assert stage in STAGES


def test_what_the_program_does_not_know_is_unattributed():
    assert stage_of(None) == stages.UNATTRIBUTED


# Milliseconds that are easily divided: a cycle of 10 as traced, 9 without what recording shows.
STEP = Timed(
    seconds={stages.ATTENTION: 0.002, stages.EXPERTS: 0.001, OUTSIDE: 0.001},
    cycle_seconds=0.004,
    events=100,
)
CYCLE = Timed(
    seconds={
        stages.DRAFT: 0.001,
        stages.ATTENTION: 0.0025,
        stages.EXPERTS: 0.0045,
        OUTSIDE: 0.001,
        TRACING: 0.001,
    },
    cycle_seconds=0.008,
    events=200,
)
FACTS = Facts(
    context=512,
    num_draft_tokens=3,
    tokens_per_cycle=2.5,
    distinct_step=4,
    distinct_verify=10.9,
    num_experts=16,
    devices=8,
    cache="replicated",
)


def test_sums_of_stages():
    assert CYCLE.traced_seconds == pytest.approx(0.010)
    assert CYCLE.stages_seconds == pytest.approx(0.009)
    assert CYCLE.verify_seconds == pytest.approx(0.007)
    assert CYCLE.fraction(stages.EXPERTS) == pytest.approx(0.5)


def test_the_verdict_names_the_largest_term_and_how_it_grew():
    assert verdict(STEP, CYCLE, FACTS) == (
        "speculation pays (2.50 tokens a cycle, break-even 2.00); experts takes 50 % of a cycle at "
        "512 tokens, 4.5 times a plain step's: up to 10.9 distinct experts of 16 a layer against 4 "
        "in a step; draft fewer tokens, cut the experts over more devices, or tune tiles "
        "(tune_tiles.py)"
    )


def test_a_step_alone_has_a_verdict_too():
    told = verdict(STEP, None, FACTS)
    assert told.startswith("attention takes 50 % of a step at 512 tokens: it reads the cache: ")
    assert "draft" not in told and "speculation" not in told


def test_the_verdict_knows_where_the_cache_lies():
    shared_out = dataclasses.replace(FACTS, cache="sequence")
    alone = dataclasses.replace(FACTS, devices=1)
    advice = "(--cache sequence)"
    told = [verdict(STEP, None, facts) for facts in (FACTS, shared_out, alone)]
    assert [advice in one for one in told] == [True, False, False]
    slow = Timed(seconds={stages.COLLECTIVES: 0.009}, cycle_seconds=0.009, events=1)
    told = [verdict(slow, None, facts) for facts in (FACTS, shared_out)]
    assert ["--cache replicated spares" in one for one in told] == [False, True]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != TRACING])
def test_every_stage_has_a_remedy(stage):
    slow = Timed(seconds={stage: 0.009, TRACING: 0.02}, cycle_seconds=0.009, events=1)
    told = verdict(STEP, slow, FACTS)
    assert told.startswith("speculation pays (2.50 tokens a cycle, break-even 2.25); ")
    assert f"{stage} takes 100 % of a cycle" in told
