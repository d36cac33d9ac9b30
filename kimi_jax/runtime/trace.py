"""Where the time of a compiled program goes, read from the JAX profiler's own trace.

A trace says which operation ran when. `sweep` shares out wall time: every instant of a window
belongs to the innermost operation that runs then, in equal parts if threads or streams run several,
so that the shares add up to the window. Knows nothing of models: what operations are called is the
caller's.

Recording takes time too, on a CPU about as long as the smallest operations. That of an operation's
end is in the trace; that of its beginning is measured (`recording_seconds`) and taken from the gap
before it.

On a CPU operations are thunks, on a GPU kernels, which name their operation or, inside CUDA graphs,
themselves alone.
"""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from kimi_jax.runtime.program import CALLS, Operation, Program

WINDOW = "window: "
"""How the names of `jax.profiler.TraceAnnotation`s begin that mark windows."""

TRACING = "tracing"
"""The profiler at work: not there when it does not record."""
BETWEEN = "between"
"""Nothing runs, after a window's first operation and before its last one's end."""
OUTSIDE = "outside"
"""The window before its first operation and after its last."""

# beartype, which checks annotations in tests, does not take an int where float is asked.
Number = float | int

_ENDS = "end: "


class TraceError(ValueError):
    """A trace that does not show what was to be measured."""


# The trace.


class Event(NamedTuple):
    """Something that ran, from one nanosecond of the trace's clock to another."""

    begin: Number
    end: Number
    name: str
    """Of the operation; "" where the trace does not say it."""
    kernel: str = ""


class Window(NamedTuple):
    """A marked stretch of time."""

    begin: Number
    end: Number
    name: str
    """Without `WINDOW`."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """The operations of a trace and its windows, in the order they began."""

    windows: tuple[Window, ...]
    lanes: Mapping[str, tuple[tuple[Event, ...], ...]]
    """For each device, its threads or streams."""


def read_trace(data: Any) -> Trace:
    """What ran on each device, and the windows marked by annotations named `WINDOW` + a name.

    Args:
        data: a `jax.profiler.ProfileData`.

    Raises:
        TraceError: no windows, or no operation.
    """
    windows: list[Window] = []
    lanes: dict[str, list[tuple[Event, ...]]] = {}
    host_lanes: dict[str, list[tuple[Event, ...]]] = {}
    for plane in data.planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                # The other lines of a device repeat the kernels, grouped in other ways.
                if line.name.startswith("Stream") and (events := _kernels(line)):
                    lanes.setdefault(plane.name.removeprefix("/device:"), []).append(events)
        elif plane.name.startswith("/host:"):
            for line in plane.lines:
                windows += _windows(line)
                for device, events in _thunks(line).items():
                    host_lanes.setdefault(device, []).append(events)
    # Where there are GPUs, the host's operations are launches of theirs.
    lanes = lanes or host_lanes
    if not windows:
        raise TraceError("the trace has no windows: nothing was measured while it was recorded")
    if not lanes:
        raise TraceError("the trace shows no operation: was the profiler's host tracer level 2?")
    return Trace(
        tuple(sorted(windows)), {name: tuple(each) for name, each in sorted(lanes.items())}
    )


def _windows(line: Any) -> list[Window]:
    return [
        Window(e.start_ns, e.start_ns + e.duration_ns, e.name.removeprefix(WINDOW))
        for e in line.events
        if e.name.startswith(WINDOW)
    ]


def _kernels(line: Any) -> tuple[Event, ...]:
    events = []
    for e in line.events:
        name = str(dict(e.stats).get("hlo_op", ""))
        events.append(Event(e.start_ns, e.start_ns + e.duration_ns, name, e.name))
    return tuple(sorted(events))


def _thunks(line: Any) -> dict[str, tuple[Event, ...]]:
    """A host thread's operations, by the device they are of."""
    found: dict[str, list[Event]] = {}
    device_of: dict[Any, str] = {}
    for e in line.events:
        stats = dict(e.stats)
        if e.name.startswith(_ENDS):
            # It is written just after, and inside, the operation it names.
            device, name = device_of.get(stats.get("_c")), TRACING
        elif "hlo_op" in stats:
            device, name = f"CPU:{stats.get('device_ordinal', 0)}", str(stats["hlo_op"])
            device_of[stats.get("_p")] = device
        else:
            continue
        if device is not None:
            event = Event(e.start_ns, e.start_ns + e.duration_ns, name)
            found.setdefault(device, []).append(event)
    return {device: tuple(sorted(events)) for device, events in found.items()}


# Wall time.

Label = Hashable


class Span(NamedTuple):
    """A stretch of one lane that belongs to one label."""

    begin: Number
    end: Number
    label: Label
    is_call: bool = False
    """Time in which nothing else runs, or another lane's operations do."""


def innermost(spans: Sequence[Span]) -> list[Span]:
    """A lane's spans without overlap: where they nest, the last to begin counts."""
    out: list[Span] = []
    stack: list[Span] = []
    at: Number = -math.inf
    # Of those that begin together the longest is outside; the last one of all ends the others.
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    for span in (*ordered, Span(math.inf, math.inf, None)):
        while stack and at < span.begin:
            top = stack[-1]
            if top.end <= at:
                stack.pop()
                continue
            end = min(top.end, span.begin)
            out.append(Span(at, end, top.label, top.is_call))
            at = end
        at = max(at, span.begin)
        stack.append(span)
    return out


def sweep(lanes: Sequence[Sequence[Span]], begin: Number, end: Number) -> dict[Label, Number]:
    """Nanoseconds of the window for each label, `BETWEEN` and `OUTSIDE`; their sum is the window's.

    Args:
        lanes: of one device; spans of a lane do not overlap.
    """
    changes: list[tuple[Number, int, Span]] = []
    for lane in lanes:
        for span in lane:
            first, last = max(span.begin, begin), min(span.end, end)
            if first < last:
                changes += [(first, 1, span), (last, -1, span)]
    if not changes:
        return {OUTSIDE: end - begin}
    changes.sort(key=lambda change: change[:2])
    shares: dict[Label, Number] = collections.defaultdict(float)
    shares[OUTSIDE] = (changes[0][0] - begin) + (end - changes[-1][0])
    working: collections.Counter[Label] = collections.Counter()
    calling: collections.Counter[Label] = collections.Counter()
    for (since, step, span), (until, _, _) in itertools.pairwise(changes):
        (calling if span.is_call else working)[span.label] += step
        if until == since:
            continue
        running = working if any(working.values()) else calling
        total = sum(running.values())
        if not total:
            shares[BETWEEN] += until - since
        for label, count in running.items():
            if count:
                shares[label] += (until - since) * count / total
    return dict(shares)


class Attribution(NamedTuple):
    """What a window's time went to, and how many operations it was."""

    nanoseconds: dict[Label, Number]
    """Means over the devices: each lived through the whole window."""
    num_events: Number
    """Of a device, on average."""


def attribute_windows(
    traces: Iterable[Trace],
    programs: Mapping[str, Program],
    label: Callable[[Operation | None], Label],
    *,
    recording: Number = 0,
) -> list[tuple[Window, Attribution]]:
    """Each window of these traces with where its time went.

    Args:
        programs: by the name of a window, the program that ran in it.
        label: of an operation; None is one the program does not know.
        recording: nanoseconds before each operation in which its beginning was recorded.
    """
    known = {name: (program, _labels(program, label)) for name, program in programs.items()}
    return [
        (window, _attribution(trace, window, *known[window.name], recording))
        for trace in traces
        for window in trace.windows
    ]


def _attribution(
    trace: Trace,
    window: Window,
    program: Program,
    labels: Mapping[str | None, tuple[Label, bool]],
    recording: Number,
) -> Attribution:
    every: list[dict[Label, Number]] = []
    num_events = 0
    for lanes in trace.lanes.values():
        swept = []
        for lane in lanes:
            first, last = (bisect.bisect_left(lane, (edge,)) for edge in window[:2])
            inside = lane[first:last]
            num_events += sum(e.name != TRACING for e in inside)
            # Of a kernel in a CUDA graph the trace gives the graph's name, or none.
            found = iter(program.find([e.kernel for e in inside if e.name not in labels]))
            names = [e.name if e.name in labels else next(found) for e in inside]
            spans = [
                Span(e.begin, e.end, *labels[name]) for e, name in zip(inside, names, strict=True)
            ]
            swept.append(innermost([*spans, *_beginnings(inside, recording)]))
        every.append(sweep(swept, window.begin, window.end))
    seen = dict.fromkeys(label for shares in every for label in shares)
    means = {x: sum(shares.get(x, 0.0) for shares in every) / len(every) for x in seen}
    return Attribution(means, num_events / len(every))


def _labels(program: Program, label: Callable) -> dict[str | None, tuple[Label, bool]]:
    """Of each operation its label and whether it is a call."""
    labels: dict[str | None, tuple[Label, bool]] = {
        name: (label(op), op.opcode in CALLS) for name, op in program.operations.items()
    }
    return labels | {None: (label(None), False), TRACING: (TRACING, False)}


def _beginnings(events: Sequence[Event], recording: Number) -> Iterator[Span]:
    """When beginnings were recorded: so long before each operation, but not in the one before."""
    for before, event in itertools.pairwise(events):
        free = before.end if before.end <= event.begin else before.begin
        begin = max(event.begin - recording, free)
        if event.name != TRACING and begin < event.begin:
            yield Span(begin, event.begin, TRACING)


def recording_seconds(folder: Path) -> float:
    """What recording an operation's beginning costs here, in seconds; 0 but on a CPU.

    A program of many tiny operations is run with and without the profiler, taking turns as far as
    it goes; what the trace shows as the cost of ends is taken off. A GPU's kernels are recorded
    beside them.

    Args:
        folder: for a recording.
    """
    if jax.default_backend() != "cpu":
        return 0.0
    products, passes, repeats = 32, 20, 15

    def tiny(x: jax.Array) -> jax.Array:
        def body(_: jax.Array, x: jax.Array) -> jax.Array:
            for _unused in range(products):
                x = x @ x
            return x

        return jax.lax.fori_loop(0, passes, body, x)

    run = jax.jit(tiny).lower(jnp.eye(8)).compile()

    def seconds() -> float:
        took: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            with TraceAnnotation(WINDOW + "tiny"):
                run(jnp.eye(8)).block_until_ready()
            took.append(time.perf_counter() - began)
        # The least: what other processes take of the machine is no cost of recording.
        return min(took)

    seconds()
    before = seconds()
    with recorded(folder):
        during = seconds()
    bare = min(before, seconds())
    windows = attribute_windows(
        [read_recording(folder)], {"tiny": Program(run.as_text() or "")}, lambda _: "tiny"
    )
    operations = statistics.median(spent.num_events for _, spent in windows)
    ends = statistics.median(spent.nanoseconds.get(TRACING, 0.0) for _, spent in windows)
    return max(0.0, (during - bare - 1e-9 * ends) / operations)


# Recording.


@contextlib.contextmanager
def recorded(folder: Path, *, for_perfetto: bool = False) -> Iterator[None]:
    """Records operations and windows into this folder, not the calls of Python."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    with jax.profiler.trace(folder, create_perfetto_trace=for_perfetto, profiler_options=options):
        yield


def newest(folder: Path, pattern: str) -> Path:
    """The file of the last recording in a folder."""
    return max(folder.glob(f"plugins/profile/*/{pattern}"), key=lambda path: path.stat().st_mtime)


def read_recording(folder: Path) -> Trace:
    """The last one.

    Raises:
        TraceError: as `read_trace`.
    """
    return read_trace(ProfileData.from_file(str(newest(folder, "*.xplane.pb"))))
