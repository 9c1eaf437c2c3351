"""Find the places where a fault can be planted, and draw mutants at random."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from tools.mutants.operators import faults, is_skipped


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        path: The file, relative to the repository.
        line: The first line that differs.
        operator: What kind of fault it is.
        lines: The lines whose tests can notice it.
        before: The file's text as it is.
        after: The file's text with the fault.
    """

    path: str
    line: int
    operator: str
    lines: range
    before: str
    after: str

    def diff(self) -> list[str]:
        """Return the removed and added lines, without the lines around them."""
        pair = (self.before.splitlines(), self.after.splitlines())
        lines = list(difflib.unified_diff(*pair, lineterm="", n=0))
        return [line for line in lines[2:] if not line.startswith("@@")]


@dataclass(frozen=True)
class Site:
    """A node where at least one fault can be planted."""

    path: str
    line: int
    lines: range
    node: cst.CSTNode
    tree: cst.Module

    def mutants(self) -> list[Mutant]:
        """Plant each fault of this place."""
        before = self.tree.code
        found = []
        for operator, changed in faults(self.node):
            after = self.tree.deep_replace(self.node, changed).code
            if after != before:
                line = first_difference(before, after)
                place = (self.path, line, operator, self.lines)
                found.append(Mutant(*place, before, after))
        return found


def draw(root: Path, paths: Sequence[Path], seed: int, count: int) -> list[Mutant]:
    """Draw mutants of Python files, each place as likely as any other.

    A place counts once however many faults it admits, so that calls of many arguments
    do not crowd out the rest. No place is drawn twice.
    """
    generator = random.Random(seed)
    places = [site for path in paths for site in sites(root, path)]
    drawn: list[Mutant] = []
    for site in generator.sample(places, len(places)):
        if len(drawn) == count:
            break
        if mutants := site.mutants():
            drawn.append(generator.choice(mutants))
    return drawn


def sites(root: Path, path: Path) -> list[Site]:
    """Return every place of a file where a fault can be planted, in its order."""
    wrapper = MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8")))
    positions = wrapper.resolve(PositionProvider)
    name = path.relative_to(root).as_posix()
    whole = extent(wrapper.module, positions)
    return [
        Site(name, positions[node].start.line, lines, node, wrapper.module)
        for node, lines in walk(wrapper.module, whole, False, positions)
        if any(faults(node))
    ]


def walk(
    node: cst.CSTNode, lines: range, inside: bool, positions: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, range]]:
    """Yield each node that counts, with the lines whose tests can notice a fault in it.

    Inside a function those are the lines of the statement. What runs once, when the
    file is imported, concerns whoever runs any line of it; a default, whoever runs the
    function.
    """
    if is_skipped(node):
        return
    if isinstance(node, cst.FunctionDef):
        lines, inside = extent(node, positions), True
    elif inside and isinstance(node, cst.SimpleStatementLine):
        lines = extent(node, positions)
    elif inside and isinstance(body := getattr(node, "body", None), cst.IndentedBlock):
        first = extent(body.body[0], positions).start
        lines = range(extent(node, positions).start, first)
    yield node, lines
    for child in node.children:
        yield from walk(child, lines, inside, positions)


def extent(node: cst.CSTNode, positions: cst.CSTNode) -> range:
    """Return the lines that a node spans."""
    position = positions[node]
    return range(position.start.line, position.end.line + 1)


def first_difference(before: str, after: str) -> int:
    """Return the number of the first line in which two texts differ."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(pairs, start=1):
        if old != new:
            return number
    return min(before.count("\n"), after.count("\n"))
