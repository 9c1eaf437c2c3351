"""What `debug=True` adds: the operators of the forward beside those of the recompute.

Each operator is noted with its operands' shapes and the user's line. A message shows
both lists only around the place where they part, so that it fits a screen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from membudget._torch import tree_iter
from membudget.callsite import is_internal
from membudget.observer import Observer

_BEFORE = 4
_AFTER = 4
_STACK = 3


class Trace(Observer):
    """Note every operator that runs inside.

    Attributes:
        operators: Each as text, in order.
        stacks: The user's lines under which each ran, innermost first.
    """

    def __init__(self) -> None:
        """Begin with an empty list."""
        self.operators: list[str] = []
        self.stacks: list[str] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note the operator and let it run."""
        operands = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor)
        )
        self.operators.append(f"{operator}({operands})")
        self.stacks.append(_user_stack())
        return operator(*args, **kwargs)


def _user_stack() -> str:
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < _STACK:
        if not is_internal(frame.f_code):
            name = os.path.basename(frame.f_code.co_filename)
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def side_by_side(forward: Trace, recompute: Trace) -> str:
    """Return both traces around the first operator in which they differ."""
    first = _first_difference(forward.operators, recompute.operators)
    return "\n".join(
        [
            *_excerpt("operators of the forward", forward, first),
            *_excerpt("operators of the recompute", recompute, first),
        ]
    )


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _excerpt(title: str, trace: Trace, first: int) -> list[str]:
    start = max(0, first - _BEFORE)
    end = min(len(trace.operators), first + _AFTER)
    lines = [f"  {title} ({len(trace.operators)} in all, from number {start}):"]
    for i in range(start, end):
        mark = ">" if i == first else " "
        lines.append(f"  {mark} {i:4d} {trace.operators[i]}  [{trace.stacks[i]}]")
    return lines
