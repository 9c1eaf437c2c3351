"""What a program controls for a block of code: which regions run, and how.

A *switch* is an attribute of one `threading.local`, so that reading one is cheap. A
region reads them once, in its forward: a switch belongs to the forward, not to the
backward pass that comes later.

By default autograd takes a recomputed tensor, and those that one backward pass did not
use are freed when it ends; a later backward over the same graph recomputes again.
Inside an *execution group* a recomputed tensor stays until the group ends (or autograd
drops the handle), so that several backward passes recompute each region at most once.
`collect_regions` lets a program recompute before a backward pass asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol
from weakref import ReferenceType, ref

from membudget._torch import at_end_of_backward, current_graph_task_id
from membudget.errors import CheckpointError


class _Switches(threading.local):
    """The switches of this thread; class attributes are the defaults.

    Attributes:
        any: Whether any other may differ from its default; in most calls, a region
            reads only this one.
    """

    any: bool = False
    disabled: bool = False
    early_stop: bool | None = None
    debug: bool | None = None
    collector: Callable[[Any], None] | None = None


SWITCHES = _Switches()

# The identities of threads inside a recompute, once per nesting level. Appending and
# removing costs half as much as counting in a `threading.local`.
RECOMPUTING: list[int] = []


@contextmanager
def _switched(name: str, value: object) -> Iterator[None]:
    before, any_before = getattr(SWITCHES, name), SWITCHES.any
    setattr(SWITCHES, name, value)
    SWITCHES.any = True
    try:
        yield
    finally:
        setattr(SWITCHES, name, before)
        SWITCHES.any = any_before


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run regions as plain code in this thread: nothing is dropped or recomputed.

    Example:
        >>> import membudget as mb, torch
        >>> with mb.disable_checkpointing():
        ...     y = mb.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    """
    with _switched("disabled", True):
        yield


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Enable or disable early stop for the regions entered here, in this thread.

    Overrides the argument `early_stop`, and belongs to the forward: the recompute of a
    region follows the setting under which the region ran.

    Args:
        enable: Whether a recompute stops once the last needed tensor is computed.
    """
    with _switched("early_stop", enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Enable or disable debugging for the regions entered here, in this thread.

    Args:
        enabled: Overrides the regions' `debug` argument; `None` leaves it unchanged.
    """
    with _switched("debug", enabled):
        yield


def is_recomputing() -> bool:
    """Tell whether the calling code runs in the recompute of a region.

    Use it to guard side effects that must happen once per step, such as appending to a
    list of auxiliary losses:

    Example:
        >>> import membudget as mb
        >>> if not mb.is_recomputing():
        ...     pass  # log, count, append
    """
    return threading.get_ident() in RECOMPUTING


class Recomputable(Protocol):
    """One call of a region, of either engine."""

    def recompute(self) -> None:
        """Recompute every dropped tensor now."""

    def release(self) -> None:
        """Free the recomputed tensors that autograd has not taken."""


_Frames = list["ReferenceType[Recomputable]"]

# Frames that recomputed in a backward pass, by the number of its graph task. A backward
# that fails never calls back; its entry holds only dead references, and is evicted by
# later ones.
_BY_BACKWARD: dict[int, _Frames] = {}

_MOST_BACKWARDS = 64

# The open groups: while there are any, recomputed tensors stay. The list is
# process-wide, because autograd recomputes on threads of its own, which must see it.
OPEN_GROUPS: list[_Frames] = []

_OUTSIDE_BACKWARD = -1


@contextmanager
def execution_group() -> Iterator[None]:
    """Recompute each region at most once over all backward passes run inside.

    Several backward passes over one graph (one loss after another, or gradients of the
    inputs first and of the weights later) then share the recomputed tensors. These stay
    in memory until the group ends, or until autograd frees their graph.

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


def release_in_time(frame: Recomputable) -> bool:
    """Arrange for `frame` to be released when its recomputed tensors expire.

    Returns:
        `False` outside every backward pass, where the caller must release it.
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
    """Recompute each region at most once over all backward passes run inside.

    As `torch.utils.checkpoint.GraphExecGroup`, except that the backward passes may
    overlap. Groups do not nest.
    """

    def __init__(self) -> None:
        """Create a group; `with` opens it."""
        self._group: AbstractContextManager[None] | None = None

    def __enter__(self) -> GraphExecGroup:
        """Open the group.

        Raises:
            CheckpointError: A group is open already.
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
        """Close the group and free its recomputed tensors."""
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
            self._group = None


class Regions:
    """The regions that ran inside a `collect_regions` block, weakly referenced.

    They live as long as the graph they belong to.
    """

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        """Start with none."""
        self._frames: _Frames = []

    def add(self, frame: Recomputable) -> None:
        """Add a region that ran."""
        self._frames.append(ref(frame))

    def __len__(self) -> int:
        """Return how many are live."""
        return len(self._alive())

    def recompute(self) -> None:
        """Recompute what the regions dropped, before a backward pass asks for it.

        The next backward takes the tensors and frees them as usual. A pipeline stage
        can recompute while it waits for the gradient.
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
    with _switched("collector", regions.add):
        yield regions
