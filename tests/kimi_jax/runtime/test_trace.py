"""Programs read for their scopes, recordings for what ran when, and wall time shared out."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from kimi_jax.runtime import trace
from kimi_jax.runtime.program import Operation, Program
from kimi_jax.runtime.trace import (
    BETWEEN,
    OUTSIDE,
    TRACING,
    Event,
    Span,
    TraceError,
    attribute_windows,
    innermost,
    read_trace,
    sweep,
)

# A loop of two passes: (begin, end, what) as the profiler writes them.
NESTED = [
    Span(10, 90, "loop"),
    Span(20, 40, "a"),
    Span(25, 30, "inside a"),
    Span(40, 60, "b"),
    Span(70, 80, "a"),
]


def test_of_nested_events_the_innermost_counts():
    assert innermost(NESTED) == [
        Span(10, 20, "loop"),
        Span(20, 25, "a"),
        Span(25, 30, "inside a"),
        Span(30, 40, "a"),
        Span(40, 60, "b"),
        Span(60, 70, "loop"),
        Span(70, 80, "a"),
        Span(80, 90, "loop"),
    ]


def test_of_events_that_begin_together_the_shorter_is_inside():
    assert innermost([Span(0, 2, "in"), Span(0, 5, "out")]) == [Span(0, 2, "in"), Span(2, 5, "out")]


def test_one_lane_is_shared_out_whole():
    # 100 in all: 10 before and 10 after, nothing between since the loop is an event.
    assert sweep([innermost(NESTED)], 0, 100) == {
        OUTSIDE: 20,
        "loop": 30,
        "a": 25,
        "inside a": 5,
        "b": 20,
    }


def test_lanes_that_run_together_share_the_time():
    lanes = [[Span(0, 10, "a"), Span(20, 30, "b")], [Span(5, 10, "c")]]
    # 5 of a alone, 5 of a and c, 10 of nothing, 10 of b, 2 after.
    assert sweep(lanes, 0, 32) == {"a": 7.5, "c": 2.5, BETWEEN: 10, "b": 10, OUTSIDE: 2}


def test_a_call_leaves_the_time_to_what_other_lanes_run():
    lanes = [[Span(0, 10, "loop", is_call=True)], [Span(2, 6, "a")]]
    assert sweep(lanes, 0, 10) == {"loop": 6, "a": 4, OUTSIDE: 0}


def test_what_reaches_out_of_the_window_is_cut():
    assert sweep([[Span(0, 10, "a")]], 4, 6) == {"a": 2, OUTSIDE: 0}


def test_an_empty_window_is_all_outside():
    assert sweep([[Span(0, 10, "a")]], 20, 25) == {OUTSIDE: 5}
    assert sweep([], 20, 25) == {OUTSIDE: 5}


spans = st.builds(
    lambda begin, length, label, is_call: Span(begin, begin + length, label, is_call),
    st.integers(0, 40),
    st.integers(0, 20),
    st.sampled_from("abc"),
    st.booleans(),
)


@given(lanes=st.lists(st.lists(spans, max_size=8), max_size=3), window=st.integers(0, 30))
def test_shares_are_the_window_and_what_a_slow_sweep_says(lanes, window):
    begin, end = window, window + 20
    flat = [innermost(lane) for lane in lanes]
    for lane in flat:
        assert all(a.end <= b.begin for a, b in zip(lane, lane[1:], strict=False))
    shares = sweep(flat, begin, end)
    # An instant at a time; all times are whole numbers.
    slow: dict = {}
    running = {}
    for t in range(80):
        there = [s for lane in flat for s in lane if s.begin <= t < s.end]
        running[t] = [s.label for s in there if not s.is_call] or [s.label for s in there]
    busy = [t for t in range(begin, end) if running[t]]
    for t in range(begin, end):
        labels = running[t]
        if not labels:
            labels = [BETWEEN if busy and busy[0] < t < busy[-1] else OUTSIDE]
        for label in labels:
            slow[label] = slow.get(label, 0) + 1 / len(labels)
    assert {k: v for k, v in shares.items() if v} == pytest.approx(slow)


PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %exp.1 = f32[4]{0} exponential(%param_0), metadata={op_name="jit(f)/while/body/early/exp"}
  ROOT %sin.1 = f32[4]{0} sine(%exp.1), metadata={op_name="jit(f)/while/body/late/sin"}
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %gte.1 = f32[4]{0} get-tuple-element(%arg), index=1
  %copy.1 = f32[4]{0} copy(%gte.1)
  %norm.1 = f32[4]{0} custom-call(%copy.1), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/while/body/first/norm"}, backend_config={name = "norm_kernel"}
  %loop_sine_fusion.7 = f32[4]{0} fusion(%norm.1), kind=kLoop, calls=%fused
  %norm.2 = f32[4]{0} custom-call(%loop_sine_fusion.7), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/while/body/second/norm"}, \
backend_config={name = "norm_kernel"}
  %all-reduce-start.1 = f32[4]{0} all-reduce-start(%norm.2), to_apply=%add, \
metadata={op_name="jit(f)/while/body/second/psum"}
  %cumsum.1 = f32[4]{0} negate(%loop_sine_fusion.7), metadata={op_name="cumsum"}
  %copy.2 = s32[] copy(%gte.1)
  ROOT %tuple.1 = (s32[], f32[4]{0}) tuple(%gte.1, %all-reduce-start.1)
}

ENTRY %main (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="x"}
  %while.1 = (s32[], f32[4]{0}) while(%x.1), condition=%cond, body=%body, \
metadata={op_name="jit(f)/while"}
  ROOT %copy.9 = f32[4]{0} copy(%x.1)
}
"""


def test_operations_have_their_own_scope_or_a_neighbour_s():
    operations = Program(PROGRAM).operations
    assert operations["norm.1"] == Operation("jit(f)/while/body/first/norm", "custom-call")
    # A fusion that has none: of its root. A copy: of what it is made for; what it copies has none.
    assert operations["loop_sine_fusion.7"].scope == "jit(f)/while/body/late/sin"
    assert operations["copy.1"].scope == "jit(f)/while/body/first/norm"
    assert operations["while.1"].scope == "jit(f)/while"
    # A name alone says nothing of where; and what has no neighbour is of the loop it is in.
    assert operations["cumsum.1"].scope == "jit(f)/while/body/late/sin"
    assert operations["copy.2"].scope == "jit(f)/while"
    assert operations["copy.9"].scope == ""
    assert operations["all-reduce-start.1"].opcode == "all-reduce-start"


def test_kernels_are_told_apart_by_their_order():
    found = Program(PROGRAM).find(
        ["norm_kernel", "loop_sine_fusion_7", "norm_kernel", "ncclDevKernel"] * 2
    )
    assert found == ["norm.1", "loop_sine_fusion.7", "norm.2", None] * 2


def test_every_scope_of_a_compiled_program_is_found():
    def f(x):
        def body(carry):
            i, x = carry
            with jax.named_scope("product"):
                y = x @ x
            with jax.named_scope("rest"):
                return i + 1, jnp.tanh(y).sort()

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))

    text = jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text()
    operations = Program(text).operations
    for scope in ("product", "rest"):
        assert any(scope in op.scope.split("/") for op in operations.values())
    assert any(op.opcode == "while" for op in operations.values())


# Recordings in the profiler's own format.


class Line:
    """A thread's or stream's events, as text of the profiler's format."""

    def __init__(self, name: str):
        self.name = name
        self.events: list[tuple[str, int, int, dict]] = []

    def add(self, name, begin, end, **stats) -> "Line":
        self.events.append((name, begin, end, stats))
        return self

    def text(self) -> str:
        names = list(dict.fromkeys(name for name, *_ in self.events))
        kinds = list(dict.fromkeys(kind for *_, stats in self.events for kind in stats))
        out = f'lines {{ name: "{self.name}" timestamp_ns: 0\n'
        for name, begin, end, stats in self.events:
            told = "".join(
                f"stats {{ metadata_id: {kinds.index(kind) + 1} "
                + (
                    f'str_value: "{value}" }}'
                    if isinstance(value, str)
                    else f"int64_value: {value} }}"
                )
                for kind, value in stats.items()
            )
            out += (
                f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {1000 * begin} "
                f"duration_ps: {1000 * (end - begin)} {told} }}\n"
            )
        out += "}\n"
        for at, name in enumerate(names, 1):
            out += f'event_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }}\n'
        for at, name in enumerate(kinds, 1):
            out += f'stat_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }}\n'
        return out


def trace_of(*planes: tuple[str, Line]) -> trace.Trace:
    text = "".join(f'planes {{ name: "{name}" {line.text()} }}\n' for name, line in planes)
    data = ProfileData.text_proto_to_serialized_xspace(text)
    return read_trace(ProfileData.from_serialized_xspace(data))


HOST, GPU = "/host:CPU", "/device:GPU:{}"


def last_scope(operation: Operation | None) -> str:
    return "unknown" if operation is None else ["", *operation.scope.split("/")][-2]


def test_a_thread_s_operations_and_their_recording_are_read():
    marks = Line("python").add("window: step", 0, 100).add("other", 0, 5)
    thread = (
        Line("worker")
        .add("while.1", 10, 90, hlo_op="while.1", device_ordinal=3, _p=1)
        .add("norm.1", 20, 40, hlo_op="norm.1", device_ordinal=3, _p=2)
        .add("end: norm.1", 36, 39, _c=2)
        .add("ThreadpoolListener", 50, 50)
    )
    found = trace_of((HOST, marks), ("/host:threads", thread))
    assert [tuple(w) for w in found.windows] == [(0, 100, "step")]
    assert found.lanes == {
        "CPU:3": ((Event(10, 90, "while.1"), Event(20, 40, "norm.1"), Event(36, 39, TRACING)),)
    }
    program = Program(PROGRAM)
    [(window, shares)] = attribute_windows([found], {"step": program}, last_scope)
    assert window.name == "step" and shares.num_events == 2
    # The loop's own scope is "jit(f)/while".
    assert shares.nanoseconds == {OUTSIDE: 20, "jit(f)": 60, "first": 17, TRACING: 3}


def test_the_recording_of_beginnings_comes_out_of_the_gap_before():
    marks = Line("python").add("window: step", 0, 100)
    thread = Line("worker")
    for name, begin, end in (("while.1", 10, 90), ("norm.1", 11, 40), ("norm.2", 45, 80)):
        thread.add(name, begin, end, hlo_op=name, device_ordinal=0)
    found = trace_of((HOST, marks), ("/host:threads", thread))
    programs = {"step": Program(PROGRAM)}
    [(_, shares)] = attribute_windows([found], programs, last_scope, recording=3)
    # 1 of the 3 before norm.1, since its loop began then; all 3 of the 5 before norm.2.
    assert shares.nanoseconds == {
        OUTSIDE: 20,
        TRACING: 4,
        "first": 29,
        "jit(f)": 2 + 10,
        "second": 35,
    }


def test_recording_costs_something_and_little(tmp_path):
    # An event of the profiler is a write to memory; a millisecond would be another thing.
    assert 0 <= trace.recording_seconds(tmp_path) < 1e-3


def test_kernels_name_operations_or_in_graphs_themselves():
    marks = Line("python").add("window: step", 0, 100)
    named = (
        Line("Stream #13(Compute)")
        .add("norm_kernel", 10, 20, hlo_op="norm.1")
        .add("loop_sine_fusion_7", 20, 30, hlo_op="loop_sine_fusion.7")
        .add("norm_kernel", 30, 50, hlo_op="norm.2")
    )
    graph = (
        Line("Stream #13(Compute)")
        .add("norm_kernel", 10, 20, hlo_op="command_buffer_1")
        .add("loop_sine_fusion_7", 20, 30)
        .add("norm_kernel", 30, 50)
        .add("MemcpyD2D", 60, 90)
    )
    # The host's are launches of these kernels.
    launches = Line("worker").add("norm_kernel", 5, 9, hlo_op="norm.1")
    found = trace_of(
        (HOST, marks), (HOST, launches), (GPU.format(0), named), (GPU.format(1), graph)
    )
    assert list(found.lanes) == ["GPU:0", "GPU:1"]
    [(_, shares)] = attribute_windows([found], {"step": Program(PROGRAM)}, last_scope)
    # Means of the two devices; the second one's copy is not of the program.
    assert shares.nanoseconds == {
        OUTSIDE: (60 + 20) / 2,
        "first": 10,
        "late": 10,
        "second": 20,
        BETWEEN: 10 / 2,
        "unknown": 30 / 2,
    }


def test_lines_that_repeat_kernels_are_left_out():
    marks = Line("python").add("window: step", 0, 100)
    line = Line("XLA Ops").add("norm.1", 0, 9)
    with pytest.raises(TraceError, match="no operation"):
        trace_of((HOST, marks), (GPU.format(0), line))


def test_a_trace_without_windows_is_refused():
    thread = Line("worker").add("norm.1", 20, 40, hlo_op="norm.1", device_ordinal=0)
    with pytest.raises(TraceError, match="no windows"):
        trace_of((HOST, thread))
