"""The operations of a compiled program, and in which named scopes each was traced.

Reads the text of any backend's program, `jax.stages.Compiled.as_text()`; nothing runs. A fusion is
one operation, in the scope of its root.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

CALLS = ("while", "conditional", "call")
"""Operations that do nothing themselves: while others run, the time is those others'."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a program says of one operation."""

    scope: str
    """The names of the scopes it was traced in, outermost first, with slashes; "" if none is known.
    Where the compiler gave none, that of what it computes, else of a neighbour, else of the loop
    it is in."""
    opcode: str
    """As XLA spells it: fusion, dot, all-reduce, while, ..."""


class Program:
    """The operations of a compiled program, from `jax.stages.Compiled.as_text()`."""

    def __init__(self, text: str):
        self._lines: dict[str, _Line] = {}
        bodies: dict[str, list[str]] = {}
        entry = body = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                body = found[2]
                entry = body if found[1] else entry
                bodies[body] = []
            elif found := _INSTRUCTION.match(line):
                bodies.setdefault(body, []).append(found[2])
                self._lines[found[2]] = _Line.read(found, line)
        self._bodies = bodies
        self._users: dict[str, list[str]] = {}
        for name, line in self._lines.items():
            for operand in line.operands:
                self._users.setdefault(operand, []).append(name)
        self._body_of = {name: body for body, names in bodies.items() for name in names}
        self._caller_of = {body: name for name, line in self._lines.items() for body in line.called}
        self.operations = {
            name: Operation(self._scope(name), line.opcode) for name, line in self._lines.items()
        }
        self._place = {name: at for at, name in enumerate(self._run(entry))}
        self._by_kernel: dict[str, list[str]] = {}
        for name in self._place:
            for kernel in {_as_kernel(name), *self._lines[name].kernels}:
                self._by_kernel.setdefault(kernel, []).append(name)

    def _scope(self, name: str) -> str:
        # A copy the compiler put in: that of what it copies, else of what it is copied for.
        caller = self._caller_of.get(self._body_of[name])
        return (
            self._own_scope(name)
            or self._along(name, lambda x: self._lines[x].operands)
            or self._along(name, lambda x: self._users.get(x, []))
            or ("" if caller is None else self._scope(caller))
        )

    def _own_scope(self, name: str) -> str:
        line = self._lines[name]
        if line.scope or line.is_call:
            return line.scope
        # Of a fusion's body the root, which is the last; else whatever has a scope.
        inside = (x for body in line.called for x in reversed(self._bodies.get(body, [])))
        return next((self._lines[x].scope for x in inside if self._lines[x].scope), "")

    def _along(self, name: str, step: Callable[[str], Sequence[str]]) -> str:
        """The scope of the nearest neighbour in one direction that has one."""
        seen, front = {name}, [name]
        while front:
            front = [x for near in front for x in step(near) if x in self._lines and x not in seen]
            seen.update(front)
            # A constant may be shared by operations of any scope.
            told = (self._own_scope(x) for x in front if self._lines[x].opcode != "constant")
            if scope := next(filter(None, told), ""):
                return scope
        return ""

    def _run(self, body: str) -> Iterator[str]:
        """Operations in the order in which they run, each body of a call once."""
        for name in self._bodies.get(body, []):
            yield name
            if self._lines[name].is_call:
                for inner in self._lines[name].called:
                    yield from self._run(inner)

    def find(self, kernels: Sequence[str]) -> list[str | None]:
        """The operation behind each kernel of one stream, in the order they ran; None if unknown.

        Operations share kernels; which it was follows from the order, that of the program.
        """
        found: list[str | None] = []
        at = -1
        for kernel in kernels:
            names = self._by_kernel.get(kernel) or self._by_kernel.get(_COUNTER.sub("", kernel), [])
            later = [name for name in names if self._place[name] > at]
            # None later: the loop has begun again.
            name = (later or names or [None])[0]
            at = at if name is None else self._place[name]
            found.append(name)
        return found


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_NAME = re.compile(r"%([\w.\-]+)")
_WORD = re.compile(r"[\w.\-]+")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_KERNEL = re.compile(r'\bname\\?"?\s*[:=]\s*\\?"([\w.\-]+)\\?"')
_COUNTER = re.compile(r"_+\d+$")


def _as_kernel(name: str) -> str:
    """How XLA:GPU calls the kernel of an operation."""
    return re.sub(r"[.\-]", "_", name)


@dataclasses.dataclass(frozen=True)
class _Line:
    opcode: str
    scope: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    kernels: tuple[str, ...]
    """Names its configuration gives the kernel."""

    @property
    def is_call(self) -> bool:
        return self.opcode in CALLS

    @classmethod
    def read(cls, found: re.Match, line: str) -> "_Line":
        opcode, rest = found[4], found[5]
        scope = _SCOPE.search(line)
        # A name alone is an argument's, or of an operation that was traced before, elsewhere.
        path = "" if scope is None or "/" not in scope[1] else scope[1]
        operands = rest.partition(")")[0]
        called = [name for each in _CALLED.findall(rest) for name in _WORD.findall(each)]
        kernels = _KERNEL.findall(rest) if opcode == "custom-call" else []
        return cls(
            opcode,
            path,
            tuple(_NAME.findall(operands)),
            tuple(called),
            tuple(map(_as_kernel, kernels)),
        )
