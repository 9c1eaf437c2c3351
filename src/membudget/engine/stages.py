"""Stages of a region's backward pass, and which of them serves a saved tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from membudget.engine.alignment import Alignment

Output = tuple[int, int]
"""An operator's number in the region's call, from 1, and the index of its output."""

Begin = tuple[int, int]
"""The number of an operator, and how many tensors it saves once it has run."""

_MOST_TURNS = 64
_MOST_RECENT = 64


class Staged(Protocol):
    """What stands for a saved tensor, in a stage."""

    stage: int


@dataclass(frozen=True)
class Stages:
    """Stages of a region's backward pass, each with its own recompute.

    A stage frees its recomputed tensors when it ends, except those that later stages
    need, so fewer recomputed tensors are live at once.

    Attributes:
        firsts: For each stage, the last operator before it, with the number of tensors
            saved after that operator which are still of the stage before.
        held: For each stage, the operator outputs that it retains for later stages.
    """

    firsts: Sequence[Begin]
    held: Sequence[Collection[Output]]

    def of(self, operator: int, saved: int) -> int:
        """Return the index of the stage that recomputes a saved tensor.

        Args:
            operator: The number of the latest operator.
            saved: How many tensors were saved since that operator ran.
        """
        return max(0, bisect_right(self.firsts, (operator, saved)) - 1)


class CallStages:
    """The stages of one call of a region.

    A call may have counterparts of the plan's operators once more, as those of a layer
    that was dropped when the plan was made. Each such *turn* has stages of its own, or
    all turns would be recomputed at once. From some turn on they are: a loop may take
    turns without end.
    """

    __slots__ = ("_operator", "_plan", "_recent", "_returns", "_saved")

    def __init__(self, plan: Stages, alignment: Alignment | None):
        """Begin before the first saved tensor."""
        self._plan = plan
        self._returns = [] if alignment is None else alignment.returns
        self._operator = self._saved = 0
        # The last saved tensors, with how many operators had run, and `_saved` then.
        self._recent: deque[tuple[ref[Staged], int, int]] = deque(maxlen=_MOST_RECENT)

    @classmethod
    def of(cls, plan: Stages | None, alignment: Alignment | None) -> CallStages | None:
        """Return the stages of a call; `None` if there is only one."""
        return None if plan is None else cls(plan, alignment)

    def put(self, handle: Staged, count: int, operator: int) -> None:
        """Assign the next saved tensor to its stage.

        Args:
            handle: What stands for the tensor.
            count: How many operators have run.
            operator: The number of the latest one in the plan.
        """
        if count != self._operator:
            self._operator, self._saved = count, 0
        self._recent.append((ref(handle), count, self._saved))
        handle.stage = self._stage(operator, self._saved)
        self._saved += 1

    def move(self, lost: int, count: int, operator: int) -> None:
        """Assign anew what was saved while operators had numbers that were wrong.

        An operator saves its inputs before its number is known.

        Args:
            lost: The first such operator.
            count: How many operators have run.
            operator: The number of the latest one in the plan.
        """
        for reference, before, saved in self._recent:
            handle = reference()
            if handle is not None and before >= lost - 1:
                handle.stage = self._stage(operator - (count - before), saved)

    def _stage(self, operator: int, saved: int) -> int:
        turn = min(len(self._returns), _MOST_TURNS)
        return turn * len(self._plan.firsts) + self._plan.of(operator, saved)

    @property
    def held(self) -> tuple[tuple[Output, ...], ...]:
        """What each stage of a turn retains for later ones, by the plan's numbers."""
        return tuple(map(tuple, self._plan.held))

    def held_in(self, stage: int) -> Collection[Output]:
        """Return what a stage retains for later ones, by the numbers of the plan."""
        return self._plan.held[stage % len(self._plan.held)]

    def begins_to(self, stage: int) -> tuple[int, ...]:
        """Return the last operation before each turn, up to that of a stage."""
        turn = stage // len(self._plan.firsts)
        return tuple(begin for begin, _ in self._returns[:turn])

    def is_current(self, stage: int, operation: int, number: int) -> bool:
        """Return whether an operation is the one that a stage knows by a number.

        It is the last before the stage that has this number.

        Args:
            stage: The stage.
            operation: The position of the operation on the tape.
            number: Its number in the plan.
        """
        if not self._returns:
            return True
        turn = stage // len(self._plan.firsts)
        last = len(self._returns) if turn == _MOST_TURNS else turn
        own = bisect_left(self._returns, (operation,))
        return own <= last and all(number < to for _, to in self._returns[own:last])
