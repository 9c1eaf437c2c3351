"""Make a failing program small, and print it so that it runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.fuzz.check import Verdict, check, plain
from tests.fuzz.frames import BACKWARDS
from tests.fuzz.program import Block, Line, Node, Program, Region, defined

Nodes = tuple[Node, ...]


def shrink(program: Program, name: str, verdict: Verdict) -> tuple[Program, Verdict]:
    """Return a smaller program that fails in the same way under the engine `name`."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(program):
            if found := _same_failure(candidate, name, verdict):
                program, verdict, is_smaller = candidate, found, True
                break
    return program, verdict


def _same_failure(program: Program, name: str, verdict: Verdict) -> Verdict | None:
    expected = plain(program)
    if expected.error is not None:
        return None
    found = check(program, name, expected)
    is_same = found.word == verdict.word and _head(found) == _head(verdict)
    return found if is_same else None


def _head(verdict: Verdict) -> str:
    """Return what two equal failures have in common: the kind of error."""
    return "" if verdict.word == "wrong" else verdict.detail.partition(":")[0]


def _smaller(program: Program) -> Iterator[Program]:
    for body, renamed in _shorter(program.body):
        outputs = {renamed.get(name, name) for name in program.outputs}
        kept = outputs & (defined(body) | {"x", "y"})
        yield replace(program, body=body, outputs=tuple(sorted(kept or {"x"})))
    if program.between:
        yield replace(program, between="", between_reason="")
    if program.backward != BACKWARDS[0]:
        yield replace(program, backward=BACKWARDS[0])
    for name in program.outputs[:-1] if len(program.outputs) > 1 else ():
        rest = tuple(other for other in program.outputs if other != name)
        yield replace(program, outputs=rest)
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)
    if program.trains:
        yield replace(program, trains=False)


def _shorter(nodes: Nodes) -> Iterator[tuple[Nodes, dict[str, str]]]:
    """Yield the statements less one; names that are gone become others."""
    for i, node in enumerate(nodes):
        before, after = nodes[:i], nodes[i + 1 :]
        if isinstance(node, Line):
            yield (*before, *after), {}
            for operand in node.operands if node.target else ():
                renamed = {node.target: operand}
                yield (*before, *_renamed(after, renamed)), renamed
            continue
        yield (*before, *after), {}
        yield (*before, *node.body, *after), {}
        for body, renamed in _shorter(node.body):
            inside = replace(node, body=body)
            yield (*before, inside, *_renamed(after, renamed)), renamed


def _renamed(nodes: Sequence[Node], names: dict[str, str]) -> Nodes:
    return tuple(_renamed_node(node, names) for node in nodes)


def _renamed_node(node: Node, names: dict[str, str]) -> Node:
    if isinstance(node, Region):
        return replace(node, body=_renamed(node.body, names))
    operands = tuple(names.get(name, name) for name in node.operands)
    if isinstance(node, Block):
        return replace(node, body=_renamed(node.body, names), operands=operands)
    return replace(node, operands=operands)


def snippet(program: Program, name: str) -> str:
    """Return source that shows the failure when it is run."""
    return (
        "from tests.fuzz.found import differences\n"
        "from tests.fuzz.world import *\n\n"
        f"{program.source}\n\n"
        f'print(differences(step, "{name}", seed={program.seed}, '
        f"steps={program.steps}, trains={program.trains}))\n"
    )
