"""The registry of the operator-level cases that the replay engine is held to.

A case is a small function on tensors with one trait that is awkward to record or to
replay. They are kept apart from the zoo: what a region that runs its function *again*
makes of them is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.zoo import Call, Case


@dataclass(frozen=True)
class OperatorCase(Case):
    """One trait of the operators that a function calls.

    Attributes:
        hidden: What writes a tensor behind the dispatcher, so that nothing but a
            comparison of values can notice. Without one, replay cannot be right.
        not_double_on_devices: Why it cannot on one with a thread of autograd.
        not_by_leaf: Why it cannot go backward to one leaf alone.
        not_again: Why the function cannot run once more, as a region around needs.
    """

    hidden: str = ""
    not_double_on_devices: str = ""
    not_by_leaf: str = ""
    not_again: str = ""


OPERATORS: list[OperatorCase] = []


def operators(**expected: Any) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Enter the decorated builder among the cases under its own name.

    Args:
        **expected: The attributes of `OperatorCase` that are not the default.
    """

    def enter(make: Callable[[], Call]) -> Callable[[], Call]:
        OPERATORS.append(OperatorCase(make.__name__, make, **expected))
        return make

    return enter
