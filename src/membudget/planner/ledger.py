"""Running totals of a simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from membudget.graph import StepGraph


class Ledger:
    """Running totals of a simulated step: live bytes, peak and recomputed operators.

    Attributes:
        graph: The step as profiled, without recomputation.
        ends: For each storage whose live range a block's choice changes, the op index
            at which the forward's copy is freed.
        moment: The op index that the simulation has reached.
        live_bytes: Bytes live at the current op index, without operator workspace.
        peak_bytes: The maximum of live bytes plus operator workspace so far.
        peak_moment: The op index at which the peak occurred.
        replayed: Indices of the operators run by replays, in execution order.
        reran: Indices of the operators run by reruns, in execution order.
        again_s: Time of these operators together.
        before_read: Called with what a recompute is about to read, if not `None`.
    """

    def __init__(self, graph: StepGraph):
        """Create a ledger for a step, with no live bytes."""
        self.graph = graph
        self.ends: dict[int, int] = {}
        self.moment = self.live_bytes = self.peak_bytes = self.peak_moment = 0
        self.replayed: list[int] = []
        self.reran: list[int] = []
        self.again_s = 0.0
        self.before_read: Callable[[Iterable[int]], None] | None = None

    def end_of(self, storage: int) -> int:
        """Return the op index at which the forward's copy of a storage is freed."""
        end = self.ends.get(storage)
        return self.graph.storages[storage].death if end is None else end

    def run_again(self, operator: int, ran: list[int]) -> None:
        """Note in `replayed` or `reran` that an operator runs again."""
        ran.append(operator)
        self.again_s += self.graph.operators[operator].seconds

    def read(self, storages: Iterable[int]) -> None:
        """Note that a recompute is about to read storages."""
        if self.before_read is not None:
            self.before_read(storages)

    def hold(self, storage: int, until: int) -> None:
        """Let a region hold the forward's copy of a storage until an op index.

        It cannot hold what FSDP has gathered: the storage is emptied all the same, and
        filled again before the backward.
        """
        held = self.graph.storages[storage]
        if held.kind != "outside" or held.birth < 0:
            self.ends[storage] = max(self.end_of(storage), until)

    def allocate(self, storage: int) -> None:
        """Add a storage to the live bytes."""
        self.live_bytes += self.graph.storages[storage].bytes

    def release(self, storage: int) -> None:
        """Subtract a storage from the live bytes."""
        self.live_bytes -= self.graph.storages[storage].bytes

    def update_peak(self, operator: int) -> None:
        """Update the peak for a running operator, including its workspace."""
        total = self.live_bytes + self.graph.operators[operator].workspace_bytes
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_moment = total, self.moment


class ListingLedger(Ledger):
    """A ledger that lists what it counts at a known peak.

    Attributes:
        live: How often each storage is live: the forward's copy, and recomputed ones.
        operator: The operator that runs at the peak, if a recompute reaches it.
    """

    def __init__(self, graph: StepGraph, peak_bytes: int, peak_moment: int):
        """Create a ledger that stops to count at a peak."""
        super().__init__(graph)
        self.live: Counter[int] = Counter()
        self.operator: int | None = None
        self._peak = peak_bytes, peak_moment

    def allocate(self, storage: int) -> None:
        """Add a storage to the live bytes."""
        super().allocate(storage)
        self._count(storage, 1)

    def release(self, storage: int) -> None:
        """Subtract a storage from the live bytes."""
        super().release(storage)
        self._count(storage, -1)

    def update_peak(self, operator: int) -> None:
        """Update the peak, and note the operator that reaches the known one."""
        super().update_peak(operator)
        if self.operator is None and (self.peak_bytes, self.peak_moment) == self._peak:
            self.operator = operator

    def _count(self, storage: int, copies: int) -> None:
        if self.operator is None and self.moment <= self._peak[1]:
            self.live[storage] += copies
