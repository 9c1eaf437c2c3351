"""The replayer in C++, where it serves."""

from __future__ import annotations

from collections.abc import Callable

from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import Operation, TapeValue
from membudget.engine.stages import CallStages
from membudget.scope import Scope


class NativeReplayer(Replayer):
    """A replayer that plans and runs operations in C++."""

    __slots__ = ()

    def prepare(self) -> None:
        """Recompute the values of all live handles now."""
        if self.trip is not None:
            EXTENSION[0].write_tape(self)
        super().prepare()

    def release(self) -> None:
        """Free recomputed values that autograd has not unpacked."""
        if self.trip is not None:
            EXTENSION[0].release(self.trip)
        super().release()

    def _count_path(self) -> None:
        EXTENSION[0].count_path(self)

    def _is_read_later(self, owner: TapeValue) -> bool:
        is_read: bool = EXTENSION[0].is_read_later(self, owner)
        return is_read

    def _materialise(self, value: TapeValue) -> None:
        if EXTENSION[0].materialise(self, value):
            self._count_run()
        else:
            super()._materialise(value)

    def _path_to(
        self, value: TapeValue
    ) -> tuple[list[Operation], list[TapeValue]] | None:
        path: tuple[list[Operation], list[TapeValue]] | None
        path = EXTENSION[0].path_to(self, value)
        return path

    def _run_all(self, operations: list[Operation]) -> None:
        EXTENSION[0].run_all(self, operations)


def new_replayer(enter: Callable[[Scope], None], stages: CallStages | None) -> Replayer:
    """Return a replayer, in C++ where the extension serves."""
    return (NativeReplayer if EXTENSION else Replayer)(enter, stages)
