"""The regions that ran, for those who recompute before a backward asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, ref

from membudget.engine.switches import SWITCHES


class Recomputable(Protocol):
    """One call of a region, of either engine."""

    def recompute(self) -> None:
        """Make every dropped tensor now."""


class Regions:
    """The regions that ran in a stretch of code, held weakly.

    They live for as long as the graph to which they belong.
    """

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        """Begin with none."""
        self._frames: list[ReferenceType[Recomputable]] = []

    def add(self, frame: Recomputable) -> None:
        """Note a region that ran."""
        self._frames.append(ref(frame))

    def __len__(self) -> int:
        """Return how many are alive."""
        return len(self._alive())

    def recompute(self) -> None:
        """Make what the regions dropped, before a backward asks for it.

        The next backward takes it, and then it is gone as ever. A pipeline stage does
        so while it waits for the gradient.
        """
        for frame in self._alive():
            frame.recompute()

    def _alive(self) -> list[Recomputable]:
        frames = (reference() for reference in self._frames)
        return [frame for frame in frames if frame is not None]


@contextmanager
def collect_regions() -> Iterator[Regions]:
    """Collect the regions that run inside, in this thread.

    Example:
        >>> import membudget as mb, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> with mb.collect_regions() as regions:
        ...     y = mb.checkpoint(lambda x: x.sin().exp(), x)
        >>> regions.recompute()
        >>> y.sum().backward()
    """
    regions = Regions()
    before, any_before = SWITCHES.collector, SWITCHES.any
    SWITCHES.collector, SWITCHES.any = regions.add, True
    try:
        yield regions
    finally:
        SWITCHES.collector, SWITCHES.any = before, any_before
