"""Reads what XLA writes down about a compiled GPU program: the launches, and where each comes from.

Three texts of a dump. The launch list says what is launched and how it nests: a `kCommandBuffer` is
one CUDA graph, a `kWhile` has a condition and a body, a `kConditional` branches. The metadata name
the instruction behind each launch, and the final program gives that instruction's scope and shape.
Text only: nothing here compiles or needs JAX.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

GRAPH, LOOP, BRANCHES = "kCommandBuffer", "kWhile", "kConditional"
KERNEL = "kCustomKernel"
_GROUPING = (GRAPH, "kSequential", "kAsyncStart", "kAsyncDone")
"""Kinds that are no launch of their own: what they hold is."""
_ALL_REDUCES = ("kAllReduce", "kAllReduceStart", "kCollectiveKernel")
"""The last is XLA's own kernel for small ones, from JAX 0.12 on where GPUs have NVLink."""

_NODE = re.compile(r"^( *)(\d+): (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")
_LABEL = re.compile(r"^( *)(condition|body|\w*branch\w*):\s*$")
_KERNEL = re.compile(
    r"(\S+) grid: \[([\d, ]+)\] threads: \[(\d+)[\d, ]*\]\s+shared_memory: (\d+) bytes"
)
_LAYER = re.compile(r"(?:^|/)layer_(\d+)(?:/|$)")
_BITS = {"pred": 8, "bf16": 16, "token": 0, "c64": 64, "c128": 128}


class LaunchListError(ValueError):
    """A launch list this module cannot read; the message names the line."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What the final program says of one instruction."""

    scope: str
    """The names of the scopes it was traced in, outermost first, with slashes."""
    num_bytes: int
    """Of its result; of a collective that only starts, of what it will give."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One entry of the launch list that the device or the host acts on."""

    kind: str
    """XLA's: kCustomKernel, kCopy, kAllReduce, ..."""
    name: str = ""
    """Of a kernel."""
    grid: tuple[int, ...] = ()
    threads: int = 0
    """In a block."""
    shared_bytes: int = 0
    """Shared memory of a block."""
    number: int = 0
    """In the launch list."""
    graph: int | None = None
    """Which CUDA graph of the program it lies in, counted from 0; None outside."""
    scope: str = ""
    num_bytes: int = 0
    """Of the result, as `Instruction.num_bytes`; 0 where the program does not say."""

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, not a copy, a collective or the host's own work."""
        return self.kind == KERNEL

    @property
    def is_all_reduce(self) -> bool:
        """Whether it adds up over devices."""
        return self.kind in _ALL_REDUCES


@dataclasses.dataclass
class Node:
    """A launch list's entry and what nests in it, by part: "", "condition", "body" or a branch."""

    launch: Launch
    parts: dict[str, list["Node"]] = dataclasses.field(default_factory=dict)


def parse(text: str) -> list[Node]:
    """The tree of a launch list.

    Raises:
        LaunchListError: a line that is neither an entry nor a part of one.
    """
    top: list[Node] = []
    # (indentation, node, the part that lines further in belong to)
    open_nodes: list[tuple[int, Node, str]] = []
    for line in text.splitlines():
        if line.strip() in ("", "No thunks."):
            continue
        if found := _NODE.match(line):
            indent, node = len(found[1]), Node(_launch(found))
            while open_nodes and open_nodes[-1][0] >= indent:
                open_nodes.pop()
            if open_nodes:
                _, parent, part = open_nodes[-1]
                parent.parts.setdefault(part, []).append(node)
            else:
                top.append(node)
            open_nodes.append((indent, node, ""))
        elif found := _LABEL.match(line):
            _open_part(open_nodes, len(found[1]), found[2], line)
        else:
            raise LaunchListError(f"not a line of a launch list: {line!r}")
    return top


def _launch(found: re.Match) -> Launch:
    number, kind, rest = int(found[2]), found[3], found[4]
    if kind != KERNEL:
        return Launch(kind, number=number)
    kernel = _KERNEL.match(rest)
    if kernel is None:
        raise LaunchListError(f"a kernel without its sizes: {found[0]!r}")
    grid = tuple(map(int, kernel[2].split(",")))
    return Launch(kind, kernel[1], grid, int(kernel[3]), int(kernel[4]), number)


def _open_part(open_nodes: list[tuple[int, Node, str]], indent: int, part: str, line: str) -> None:
    # A loop's labels are indented as the loop is or less, a conditional's more than it.
    kind = LOOP if part in ("condition", "body") else BRANCHES
    while open_nodes:
        own_indent, node, _ = open_nodes.pop()
        is_owner = node.launch.kind == kind and part not in node.parts
        if is_owner and (kind == LOOP or own_indent < indent):
            node.parts[part] = []
            open_nodes.append((own_indent, node, part))
            return
    raise LaunchListError(f"a part of nothing: {line!r}")


def read_metadata(text: str) -> dict[int, str]:
    """The instruction behind each numbered launch, from `*thunk_metadata.txt`."""
    names = {}
    for block in text.split("thunk_metadata {"):
        number = re.search(r"\bthunk_id: (\d+)", block)
        name = re.search(r'\bprofile_annotation: "([^"]+)"', block)
        if number and name:
            names[int(number[1])] = name[1]
    return names


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')


def read_program(text: str, names: Iterable[str]) -> dict[str, Instruction]:
    """The named instructions of a program in HLO's text form (`*gpu_after_optimizations.txt`)."""
    wanted, found = set(names), {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match and match[1] in wanted:
            sizes = [_num_bytes(*shape) for shape in _SHAPE.findall(match[2])]
            if match[3] == "all-gather-start":
                # Its result lists the operands first.
                sizes = sizes[len(sizes) // 2 :]
            scope = _SCOPE.search(line)
            found[match[1]] = Instruction(scope[1] if scope else "", sum(sizes))
    return found


def _num_bytes(dtype: str, dimensions: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype, int(digits[0]) if digits else 0)
    count = 1
    for size in filter(None, dimensions.split(",")):
        count *= int(size)
    return count * bits // 8


def annotate(
    nodes: Iterable[Node], names: Mapping[int, str], program: Mapping[str, Instruction]
) -> list[Node]:
    """The tree with scope and bytes of each launch, where the program gives them."""
    out = []
    for node in nodes:
        known = program.get(names.get(node.launch.number, ""))
        launch = node.launch
        if known is not None and launch.kind not in _GROUPING:
            launch = dataclasses.replace(launch, scope=known.scope, num_bytes=known.num_bytes)
        parts = {part: annotate(inside, names, program) for part, inside in node.parts.items()}
        out.append(Node(launch, parts))
    return out


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one pass over a program launches, and of a program that loops, one pass of its loop.

    Of a conditional, the branch taken where its condition does not hold, as far as scopes tell the
    two apart, else the one that launches least: in the programs of this project that is greedy
    decoding, without bias, penalties or logprobs. A loop inside is counted once.
    """

    cycle: tuple[Launch, ...]
    """The whole program, or one pass over its loop's body."""
    around: tuple[Launch, ...]
    """Before and after the loop, and the loop itself with one pass over its condition."""

    @property
    def graphs(self) -> int:
        """CUDA graphs launched in `cycle`."""
        return len({launch.graph for launch in self.cycle} - {None})

    @property
    def outside_graphs(self) -> tuple[Launch, ...]:
        """What the host launches in `cycle` one by one."""
        return tuple(launch for launch in self.cycle if launch.graph is None)

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """The kernels of `cycle`, in order."""
        return tuple(launch for launch in self.cycle if launch.is_kernel)

    @property
    def all_reduces(self) -> tuple[Launch, ...]:
        """The all-reduces of `cycle`."""
        return tuple(launch for launch in self.cycle if launch.is_all_reduce)

    @property
    def all_gathers(self) -> tuple[Launch, ...]:
        """The all-gathers of `cycle`."""
        return tuple(x for x in self.cycle if x.kind in ("kAllGather", "kAllGatherStart"))

    @property
    def all_to_alls(self) -> tuple[Launch, ...]:
        """The all-to-alls of `cycle`."""
        return tuple(x for x in self.cycle if x.kind in ("kAllToAll", "kAllToAllStart"))

    def by_layer(self) -> dict[int, tuple[Launch, ...]]:
        """Launches of `cycle` that come from each layer of the model, by their scope.

        A launch whose instruction has lost its scope belongs where the one before it does.
        """
        layers: dict[int, list[Launch]] = {}
        layer = None
        for launch in self.cycle:
            if launch.scope:
                found = _LAYER.search(launch.scope)
                layer = int(found[1]) if found else None
            if layer is not None:
                layers.setdefault(layer, []).append(launch)
        return {layer: tuple(inside) for layer, inside in sorted(layers.items())}


def count_kinds(launches: Iterable[Launch]) -> dict[str, int]:
    """How many there are of each kind, most first."""
    return dict(collections.Counter(launch.kind for launch in launches).most_common())


def launches_of(nodes: Iterable[Node], *, is_loop: bool) -> Launches:
    """One pass over the tree; with `is_loop`, over the body of its outermost loop.

    Raises:
        LaunchListError: with `is_loop`, there is no loop.
    """
    nodes = list(nodes)
    graphs = iter(range(10**9))
    if not is_loop:
        return Launches(tuple(_walk(nodes, None, graphs)), ())
    loop = next((node for node in _every(nodes) if node.launch.kind == LOOP), None)
    if loop is None:
        raise LaunchListError("the program has no loop")
    body = loop.parts.pop("body", [])
    around = tuple(_walk(nodes, None, graphs))
    loop.parts["body"] = body
    is_inside = next((x.graph for x in around if x.number == loop.launch.number), None)
    return Launches(tuple(_walk(body, is_inside, graphs)), around)


def _every(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for inside in node.parts.values():
            yield from _every(inside)


def _walk(nodes: Iterable[Node], graph: int | None, graphs: Iterator[int]) -> Iterator[Launch]:
    for node in nodes:
        kind, inner = node.launch.kind, graph
        if kind == GRAPH and graph is None:
            inner = next(graphs)
        if kind not in _GROUPING:
            yield dataclasses.replace(node.launch, graph=graph)
        parts = list(node.parts.values())
        if kind == BRANCHES and parts:
            parts = [_branch(node)]
        for part in parts:
            yield from _walk(part, inner, graphs)


def _branch(node: Node) -> list[Node]:
    # How `lax.cond` names the scope of its first function.
    holds = node.launch.scope + "/branch_1_fun"
    parts = list(node.parts.values())
    others = [
        part for part in parts if not any(x.launch.scope.startswith(holds) for x in _every(part))
    ]
    return min(others or parts, key=_cost)


def _cost(nodes: list[Node]) -> tuple[int, int]:
    launches = list(_walk(nodes, None, iter(range(10**9))))
    return sum(launch.is_kernel for launch in launches), len(launches)
