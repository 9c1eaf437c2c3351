"""Count how often a replay plan will use each value, so that it is freed in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from weakref import ReferenceType

from membudget.engine.replay.execute import Executor
from membudget.engine.replay.tape import Operation, ReplayHandle, TapeValue
from membudget.engine.stages import CallStages


class UseCounter(Executor):
    """Counts the uses of values by the handles of one stage, or of all.

    Attributes:
        handles: Weak references to the region's handles, in forward order.
        stages: The stages of the backward pass; `None` if there is only one.
        begins: The last operation before each turn, up to that of the stage.
    """

    __slots__ = ("_entries", "begins", "handles", "stages")

    def __init__(self, stages: CallStages | None) -> None:
        """Create a counter for a region without handles yet."""
        super().__init__()
        self.stages = stages
        self.handles: list[ReferenceType[ReplayHandle]] = []
        self.begins: tuple[int, ...] = ()
        self._entries: set[TapeValue] = set()  # What turns read from before them.

    def living(self) -> list[ReplayHandle]:
        """Return the handles that are still referenced by the autograd graph."""
        handles = [reference() for reference in self.handles]
        return [handle for handle in handles if handle is not None]

    def _wanted(self) -> list[TapeValue]:
        """Return the dropped values that the plan must recompute for live handles."""
        stage = self._stage
        return [
            handle.value
            for handle in self.living()
            if (stage == -1 or handle.stage == stage) and not handle.value.is_held()
        ]

    def _enter_turn(self) -> None:
        """Forget what only later turns read from before them."""
        stages = self.stages if self._stage >= 0 else None
        begins = () if stages is None else stages.begins_to(self._stage)
        if begins != self.begins:
            self.begins = begins
            last = begins[-1] if begins else 0
            entries = self._entries
            self._entries = {
                v for v in entries if v.operation and v.operation.number <= last
            }

    def _count_path(self) -> None:
        """Count the uses of every value that the plan reads or recomputes."""
        wanted: list[TapeValue] = []
        for value in self._wanted():
            self._count(value, wanted)
        while wanted:
            operation = wanted.pop().operation
            if operation is None or operation.plan == self._plan:
                continue
            operation.plan = self._plan
            for value in operation.inputs():
                self._count(value, wanted)
                owner = value.root or value
                if not operation.is_view:
                    owner.reads += 1
                if self.begins and self._is_entry(owner, operation):
                    self._entries.add(owner)  # Stages of the turn go on from there.
                    self._carry(owner)
            if self._stage >= 0:
                self._count_held(operation.outputs)

    def _is_entry(self, read: TapeValue, operation: Operation) -> bool:
        """Return whether an operation reads what was made before its turn."""
        if read.operation is None:
            return False
        turn = bisect_left(self.begins, operation.number)
        return bisect_left(self.begins, read.operation.number) != turn

    def _count(self, value: TapeValue, wanted: list[TapeValue]) -> None:
        """Count one use of a value, and queue the value if it must be recomputed."""
        self._add_use(value)
        if value.tensor is None:
            wanted.append(value)

    def _count_held(self, values: Iterable[ReferenceType[TapeValue]]) -> None:
        """Count an extra use of each value that the stage retains for later stages."""
        assert self.stages is not None
        held = self.stages.held_in(self._stage)
        for reference in values:
            value = reference()
            operation = None if value is None else value.operation
            if value is None or operation is None:
                continue
            if (operation.call, value.index) in held and self.stages.is_current(
                self._stage, operation.number, operation.call
            ):
                self._carry(value)

    def _carry(self, value: TapeValue) -> None:
        """Retain a value for later stages."""
        self._add_use(value)
        value.is_carried = True

    def _add_use(self, value: TapeValue) -> None:
        root = value.root
        if value.plan != self._plan:
            self._begin(value)
            if root is not None and root.plan != self._plan:
                self._begin(root)
        value.uses += 1
        if root is not None:
            root.view_uses += 1

    def _begin(self, value: TapeValue) -> None:
        value.plan = self._plan
        value.uses = value.view_uses = value.reads = 0
        value.is_carried = False
