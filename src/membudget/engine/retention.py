"""How long a recomputed tensor stays with its handle.

As a rule autograd takes it away, and what one backward recomputed but did not use is
freed when that backward ends; a later backward over the same graph recomputes again.
Inside an execution group a recomputed tensor stays until the group ends (or autograd
drops the handle), so that several backwards recompute each region at most once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol
from weakref import ReferenceType, ref

from membudget._torch import at_end_of_backward, current_graph_task_id
from membudget.engine.switches import SWITCHES
from membudget.errors import CheckpointError


class Releasable(Protocol):
    """A frame whose handles may hold recomputed tensors."""

    def release(self) -> None:
        """Let go of the recomputed tensors that nobody took."""


_Frames = list["ReferenceType[Releasable]"]

# Frames that recomputed in a backward, by the number of its graph task. A backward that
# fails never calls back; its entry holds nothing but dead references, and is dropped
# when later ones have pushed it out.
_BY_BACKWARD: dict[int, _Frames] = {}

_MOST_BACKWARDS = 64

# The groups that are open: while there are any, recomputed tensors stay. They are
# process-wide, because autograd runs on threads of its own: a recompute must see the
# group from there.
OPEN_GROUPS: list[_Frames] = []

_OUTSIDE_BACKWARD = -1


@contextmanager
def execution_group() -> Iterator[None]:
    """Recompute each region at most once over all backwards run inside.

    Several backwards over one graph (one loss after another, or gradients for the
    inputs first and for the weights later) then share the recomputed tensors. They are
    held until the group ends, or until autograd frees what they belong to.

    Example:
        >>> import membudget as mb, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mb.checkpoint(lambda x: x.sin().exp(), x)
        >>> with mb.execution_group():
        ...     y[0].backward(retain_graph=True)
        ...     y[1].backward()
    """
    frames: _Frames = []
    OPEN_GROUPS.append(frames)
    try:
        yield
    finally:
        OPEN_GROUPS.remove(frames)
        if not OPEN_GROUPS:
            _release(frames)
        else:
            OPEN_GROUPS[-1].extend(frames)


def release_in_time(frame: Releasable) -> bool:
    """See to it that `frame` is released when its recomputed tensors are out of date.

    Returns:
        Whether somebody will release it; `False` outside of any backward, where the
        caller must.
    """
    if OPEN_GROUPS:
        OPEN_GROUPS[-1].append(ref(frame))
        return True
    task = current_graph_task_id()
    if task == _OUTSIDE_BACKWARD:
        return False
    frames = _BY_BACKWARD.get(task)
    if frames is None:
        frames = _BY_BACKWARD[task] = []
        at_end_of_backward(lambda: _release(_BY_BACKWARD.pop(task, [])))
        if len(_BY_BACKWARD) > _MOST_BACKWARDS:
            del _BY_BACKWARD[min(_BY_BACKWARD)]
    frames.append(ref(frame))
    return True


def _release(frames: _Frames) -> None:
    for reference in frames:
        frame = reference()
        if frame is not None:
            frame.release()


class GraphExecGroup:
    """Recompute each region at most once over all backwards run inside.

    As `torch.utils.checkpoint.GraphExecGroup`, except that the backwards may overlap.
    Groups do not nest.
    """

    def __init__(self) -> None:
        """Make a group; enter it with `with`."""
        self._group: AbstractContextManager[None] | None = None

    def __enter__(self) -> GraphExecGroup:
        """Open the group.

        Raises:
            CheckpointError: If a group is open already.
        """
        if OPEN_GROUPS:
            raise CheckpointError(
                "GraphExecGroup contexts cannot be nested; leave the outer one first"
            )
        self._group = execution_group()
        self._group.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group and free what it held."""
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
            self._group = None


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
