"""The faults that can be planted at a node of the syntax tree, and where none is.

mutmut provides the table of operators. Two are added, for the faults that reviews of
this library miss most: a call that is left out, and a condition turned around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst
from libcst import matchers as m
from mutmut.mutation.mutators import mutation_operators

# A name in this form that is assigned stands for a type.
ALIAS = m.Name(m.MatchRegex("[A-Z][a-z][A-Za-z]*"))
# Evaluated for readers, type checkers or messages alone: faults there change no result.
SKIPPED = (
    m.Annotation()
    | m.Decorator()
    | m.FormattedString()
    | m.Import()
    | m.ImportFrom()
    | m.Raise()
    | m.If(test=m.Name("TYPE_CHECKING"))
    | m.Assign(targets=[m.AssignTarget(m.Name("__slots__") | m.Name("__all__"))])
    | m.Assign(value=m.Call(func=m.Name("TypeVar") | m.Name("ParamSpec")))
    | m.Assign(targets=[m.AssignTarget(ALIAS)])
    | m.Arg(keyword=m.Name("repr"))
    | m.Call(func=m.Name("cast") | m.Attribute(attr=m.Name("cast")))
    | m.Call(func=m.Attribute(value=m.Name("warnings")))
)
PROSE = (
    m.SimpleString(value=m.MatchIfTrue(lambda text: " " in text))
    | m.FormattedString()
    | m.ConcatenatedString()
)


def is_skipped(node: cst.CSTNode) -> bool:
    """Return whether no fault is planted in a node, nor below it."""
    return bool(m.matches(node, SKIPPED | PROSE))


def faults(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    """Yield each fault at a node: the operator's name and what replaces the node."""
    for kind, operator in OPERATORS:
        if isinstance(node, kind):
            name = operator.__name__.removeprefix("operator_")
            for changed in operator(node):
                if not loses_prose(node, changed):
                    yield name, changed


def loses_prose(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether a fault drops what a call says to a person."""
    if not isinstance(node, cst.Call) or not isinstance(changed, cst.Call):
        return False
    lost = [argument for argument in node.args if argument not in changed.args]
    return any(m.matches(argument.value, PROSE) for argument in lost)


def drop_call(node: cst.Expr) -> Iterator[cst.CSTNode]:
    """Leave out a call whose result nobody uses."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


def negate_condition(node: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    """Turn a condition around."""
    space = cst.SimpleWhitespace(" ")
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    negated = cst.UnaryOperation(cst.Not(whitespace_after=space), test)
    # In parentheses, for `if(x)` has no space before its test.
    negated = negated.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=negated)


Operator = Callable[..., Iterator[cst.CSTNode]]
OPERATORS: list[tuple[type, Operator]] = [
    *mutation_operators,
    (cst.Expr, drop_call),
    *((kind, negate_condition) for kind in (cst.If, cst.While, cst.CompIf)),
]
