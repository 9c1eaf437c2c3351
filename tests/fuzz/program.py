"""A program: a tree of statements that prints as source, and what is known of it."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tests.fuzz import world
from tests.fuzz.statements import Kind

Step = Callable[..., Any]
Passing = Literal["position", "keyword", "closure", "list"]


@dataclass(frozen=True)
class Line:
    """One statement: a kind with its operands and the name that it assigns."""

    kind: Kind
    operands: tuple[str, ...]
    target: str = ""


@dataclass(frozen=True)
class Block:
    """Statements under a header, such as `with torch.no_grad():`."""

    header: str
    body: tuple[Node, ...]
    operands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Statements that run as one region.

    Attributes:
        name: The name of its function.
        body: The statements.
        passing: How it is given what it reads.
    """

    name: str
    body: tuple[Node, ...]
    passing: Passing = "position"


Node = Line | Block | Region
_FIRST_LINES = itertools.cycle(range(5000))
Names = frozenset[str]


@dataclass(frozen=True)
class Program:
    """A whole step.

    Attributes:
        body: The forward.
        outputs: The names that enter the loss.
        between: What happens between forward and backward.
        between_reason: Why a region may refuse that; empty if it may not.
        backward: The source of the backward.
        seed: What inputs and parameters are drawn from.
        trains: Whether `y` requires a gradient.
        steps: How many steps are run.
    """

    body: tuple[Node, ...]
    outputs: tuple[str, ...]
    between: str
    between_reason: str
    backward: str
    seed: int
    trains: bool
    steps: int

    @cached_property
    def source(self) -> str:
        """The source of `step`."""
        lines, _ = render(self.body, frozenset(self.outputs))
        outputs = "".join(f"{name}, " for name in self.outputs)
        lines += [f"outputs = ({outputs.strip()})", "loss = score(*outputs)"]
        lines += ["pause(n)", *self.between.splitlines(), *self.backward.splitlines()]
        lines += ["return outputs"]
        return "def step(m, n, x, y, region):\n" + textwrap.indent(
            "\n".join(lines), "    "
        )

    def compiled(self) -> Step:
        """Return `step`, whose code equals that of no other run.

        What an engine remembers of a function, it remembers by its code; that begins
        with a line.
        """
        names: dict[str, Any] = {name: getattr(world, name) for name in world.__all__}
        source = "\n" * next(_FIRST_LINES) + self.source
        exec(compile(source, "<fuzzed program>", "exec"), names)
        step: Step = names["step"]
        return step

    @cached_property
    def reasons(self) -> frozenset[str]:
        """Why a region may refuse this program, or differ from the plain step."""
        known = {name: _Memory(()) for name in ("x", "y", _BUFFER)}
        found = set(_reasons(self.body, (), known))
        return frozenset(found | {self.between_reason} - {""})


def render(nodes: Sequence[Node], live: Names) -> tuple[list[str], Names]:
    """Return the lines of some statements, and the names that they read.

    Args:
        nodes: The statements.
        live: The names that are read after them.
    """
    lines: list[str] = []
    for node in reversed(nodes):
        printed, live = _render_node(node, live)
        lines[:0] = printed
    return lines, live


def _render_node(node: Node, live: Names) -> tuple[list[str], Names]:
    if isinstance(node, Line):
        text = node.kind.text.format(**_places(node.operands), t=node.target)
        return text.splitlines(), (live - {node.target}) | set(node.operands)
    if isinstance(node, Region):
        return _render_region(node, live)
    body, reads = render(node.body, live)
    header = node.header.format(**_places(node.operands))
    lines = [header, *_indented(body)]
    if header.startswith("if"):
        exported = sorted(defined(node.body) & live)
        if exported:
            otherwise = [f"{name} = {node.operands[0]}.clone()" for name in exported]
            lines += ["else:", *_indented(otherwise)]
        reads |= live - defined(node.body)
    return lines, reads | set(node.operands)


def _render_region(node: Region, live: Names) -> tuple[list[str], Names]:
    written = sorted(defined(node.body) & live)
    body, reads = render(node.body, frozenset(written))
    taken, given, unpacked = _passed(node.passing, sorted(reads))
    lines = [f"def {node.name}({taken}):", *_indented([*unpacked, *body])]
    call = f"region({node.name}{given})"
    if written:
        names = f"{', '.join(written)}"
        lines += [f"    return {names}", f"{names} = {call}"]
    else:
        lines += ["    return None", call]
    return lines, (live - set(written)) | reads


def _passed(passing: Passing, reads: list[str]) -> tuple[str, str, list[str]]:
    """Return the parameters, the arguments, and how the names come out of them."""
    names = ", ".join(reads)
    if passing == "closure" or not reads:
        return "", "", []
    if passing == "list":
        return "given", f", [{names}]", [f"{names}, = given"]
    if passing == "keyword":
        return names, "".join(f", {name}={name}" for name in reads), []
    return names, f", {names}", []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines or ["pass"]]


def _places(operands: Sequence[str]) -> dict[str, str]:
    return dict(zip("ab", operands, strict=False))


def defined(nodes: Sequence[Node]) -> Names:
    """Return the names that some statements assign."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, Line):
            found |= {node.target} - {""}
        else:
            found |= defined(node.body)
    return frozenset(found)


def size(nodes: Sequence[Node]) -> int:
    """Count statements and blocks."""
    return sum(1 if isinstance(n, Line) else 1 + size(n.body) for n in nodes)


@dataclass
class _Memory:
    """One tensor's memory: where it was made, and the regions that were given it."""

    path: tuple[str, ...]
    readers: set[str] = field(default_factory=set)


# Regions read it, and one statement writes it in place.
_BUFFER = "m.mean"


def _reasons(
    nodes: Sequence[Node], path: tuple[str, ...], known: dict[str, _Memory]
) -> Iterator[str]:
    """Yield why the regions around `nodes`, or earlier ones, may refuse."""
    for node in nodes:
        if isinstance(node, Region):
            yield from _reasons(node.body, (*path, node.name), known)
            continue
        text = node.kind.text if isinstance(node, Line) else ""
        for operand in [*node.operands, *[_BUFFER] * (_BUFFER in text)]:
            memory = known[operand]
            memory.readers |= set(path[_shared(memory.path, path) :])
        if isinstance(node, Block):
            yield from _reasons(node.body, path, known)
            if "no_grad" in node.header and any(map(_is_view, node.body)):
                yield "history"  # torch says of it that it requires a gradient.
            continue
        yield from _reasons_of_line(node, path, known)
        if node.target:
            is_alias = "alias" in node.kind.traits
            known[node.target] = known[node.operands[0]] if is_alias else _Memory(path)


def _reasons_of_line(
    line: Line, path: tuple[str, ...], known: dict[str, _Memory]
) -> Iterator[str]:
    traits = line.kind.traits
    yield from traits - {"alias", "writes"}
    if f"{_BUFFER}.mul_(" in line.kind.text and known[_BUFFER].readers - set(path):
        yield "written since"
    if "writes" in traits:
        memory = known[line.operands[0]]
        if memory.path[: len(path)] != path:
            yield "writes its input"
        if memory.readers - set(path):
            yield "written since"
        if memory.path != path[: len(memory.path)]:
            yield "result written since"


def _is_view(node: Node) -> bool:
    return isinstance(node, Line) and "alias" in node.kind.traits


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many regions are around both."""
    pairs = zip(one, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
    )
