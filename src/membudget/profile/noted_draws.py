"""The random numbers that a recorded forward draws, one or a few at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from membudget._torch_observing import ITEM
from membudget.draws import AS_DRAWN, OPERATORS, is_draw


class NotedDraw(NamedTuple):
    """A draw of a forward.

    Attributes:
        moment: Number of operators that began before it.
        calls: Numbers of the module calls that it is part of.
    """

    moment: int
    calls: tuple[int, ...]


@dataclass
class NotedDraws:
    """Draws in the order of a forward.

    Attributes:
        draws: What was drawn.
        may_decide: Whether that may decide what runs: numbers of Python do, those of
            torch if the value of a tensor is read later.
        are_told: Whether `drawing` tells of all draws; else of those of Python alone.
        open_calls: Numbers of the module calls that have not ended.
        letters: Those with which the draws were chosen (`draws`); `""` if they decide
            nothing.
    """

    draws: list[NotedDraw] = field(default_factory=list)
    may_decide: bool = False
    are_told: bool = False
    open_calls: list[int] = field(default_factory=list)
    letters: str = ""

    def deciding_calls(self) -> tuple[int, ...]:
        """Return the calls with a draw that decides what runs in them."""
        if not self.letters:
            return ()
        letters = self.letters.ljust(len(self.draws), AS_DRAWN)
        pairs = zip(self.draws, letters, strict=False)
        deciding = [draw for draw, letter in pairs if letter != AS_DRAWN]
        return tuple(sorted({c for draw in deciding or self.draws for c in draw.calls}))

    def note(self, moment: int) -> None:
        """Note a draw that `drawing` tells of."""
        self.draws.append(NotedDraw(moment, tuple(self.open_calls)))
        self.may_decide = True

    def note_operator(self, operator: Any, moment: int, outputs: list[Any]) -> None:
        """Note an operator, if it draws numbers or reads one."""
        if operator is ITEM:
            self.may_decide |= bool(self.draws)
        elif operator in OPERATORS and not self.are_told and is_draw(outputs[0]):
            self.draws.append(NotedDraw(moment + 1, tuple(self.open_calls)))
