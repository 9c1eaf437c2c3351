"""Cut the forward into pieces at the borders of modules.

A piece is the call of a module that runs once in the step: what a region is put on.
From the whole model downwards a call is replaced by the calls inside it, as long as
those hold most of what it saves and it saves more than a piece should: so a model is
cut into its blocks, whatever it calls them, and a plan can mix choices among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from membudget.graph import ModuleCall, StepGraph

LEAST_COVERED = 0.6
"""What the calls inside must save of it, or the cut would lose too much."""


def pieces(graph: StepGraph, most_share: float) -> list[ModuleCall]:
    """Return the pieces, in the order of the forward; they do not overlap.

    Args:
        graph: The step.
        most_share: A piece that saves a larger share of the step's activations is cut
            if it can be.
    """
    cutter = _Cutter(graph, most_share)
    found = [piece for call in cutter.outermost() for piece in cutter.cut(call)]
    return [piece for piece in found if cutter.saved_bytes(piece)]


class _Cutter:
    def __init__(self, graph: StepGraph, most_share: float):
        times = Counter(call.path for call in graph.calls)
        once = [call for call in graph.calls if times[call.path] == 1]
        self._calls = sorted(once, key=_start)
        sizes = sorted(_saved_sizes(graph))
        self._births = [birth for birth, _ in sizes]
        self._saved_before = [0, *accumulate(size for _, size in sizes)]
        self._most_bytes = most_share * self._saved_before[-1]

    def outermost(self) -> list[ModuleCall]:
        """Return the calls that are in no other."""
        return self._inside(None)

    def saved_bytes(self, call: ModuleCall) -> int:
        """Return what autograd keeps of what the call made."""
        first, end = (bisect_left(self._births, m) for m in (call.start, call.end))
        return self._saved_before[end] - self._saved_before[first]

    def cut(self, call: ModuleCall) -> list[ModuleCall]:
        """Return the call, or the pieces inside it."""
        saved = self.saved_bytes(call)
        inner = self._inside(call)
        covered = sum(map(self.saved_bytes, inner))
        if saved <= self._most_bytes or covered < LEAST_COVERED * saved:
            return [call]
        return [piece for inside in inner for piece in self.cut(inside)]

    def _inside(self, outer: ModuleCall | None) -> list[ModuleCall]:
        """Return the calls directly inside another, those of equal extent passed."""
        found: list[ModuleCall] = []
        end = 0
        first, last = 0, len(self._calls)
        if outer is not None:
            first = bisect_left(self._calls, outer.start, key=_start)
            last = bisect_left(self._calls, outer.end, key=_start)
        for call in self._calls[first:last]:
            if outer is not None and not _is_inside(call, outer):
                continue
            if call.end > call.start >= end:
                found.append(call)
                end = call.end
        return found


def _start(call: ModuleCall) -> int:
    return call.start


def _is_inside(call: ModuleCall, outer: ModuleCall) -> bool:
    same = (call.start, call.end) == (outer.start, outer.end)
    deeper = call.path != outer.path and (
        not outer.path or call.path.startswith(outer.path + ".")
    )
    return deeper and outer.start <= call.start and call.end <= outer.end and not same


def _saved_sizes(graph: StepGraph) -> list[tuple[int, int]]:
    """Return birth and bytes of each storage that autograd keeps."""
    storages = {graph.values[saved.value].storage for saved in graph.saved}
    found = [graph.storages[index] for index in sorted(storages)]
    return [(storage.birth, storage.bytes) for storage in found if storage.birth >= 0]
