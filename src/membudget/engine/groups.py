"""When recomputed tensors are freed that autograd has not unpacked.

By default, each recomputed tensor is dropped once autograd has unpacked it, and unused
recomputed tensors are dropped when the backward pass ends; a later backward pass over
the same graph recomputes them. Inside an *execution group*, recomputed tensors stay
until the group ends (or autograd frees the graph), so that several backward passes
recompute each region at most once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol
from weakref import ReferenceType, ref

from membudget._torch import at_end_of_backward, current_graph_task_id
from membudget.errors import CheckpointError


class Recomputable(Protocol):
    """One call of a region, which can recompute its dropped tensors."""

    def recompute(self) -> None:
        """Recompute every dropped tensor now."""

    def release(self) -> None:
        """Free the recomputed tensors that autograd has not unpacked."""


Frames = list["ReferenceType[Recomputable]"]

# Frames that recomputed in a backward pass, keyed by graph task id. A failed backward
# never calls back; its entry holds only weak references, and later entries evict it.
BY_BACKWARD: dict[int, Frames] = {}

_MOST_BACKWARDS = 64


class _OpenGroup(Frames):
    """An open `execution_group`: equal to itself alone, however little it holds."""

    def __eq__(self, other: object) -> bool:
        return self is other


# The open groups: while there are any, recomputed tensors stay. The list is
# process-wide, because autograd recomputes on threads of its own, which must see it. So
# what one thread recomputes may stay for a group of another, until that ends.
OPEN_GROUPS: list[_OpenGroup] = []

_OUTSIDE_BACKWARD = -1


@contextmanager
def execution_group() -> Iterator[None]:
    """Recompute each region at most once across all backward passes in the block.

    Several backward passes over one graph (one loss after another, or gradients of the
    inputs first and of the weights later) share the recomputed tensors. Recomputed
    tensors stay in memory until the group ends, or until autograd frees their graph.

    Example:
        >>> import membudget as mb, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mb.checkpoint(lambda x: x.sin().exp(), x)
        >>> with mb.execution_group():
        ...     y[0].backward(retain_graph=True)
        ...     y[1].backward()
    """
    group = _OpenGroup()
    OPEN_GROUPS.append(group)
    try:
        yield
    finally:
        OPEN_GROUPS.remove(group)
        if not OPEN_GROUPS:
            _release(group)
        else:  # The enclosing group keeps them.
            OPEN_GROUPS[-1].extend(group)


def release_in_time(frame: Recomputable) -> bool:
    """Schedule the release of the tensors that one region call recomputed.

    Returns:
        Whether a release was scheduled (only in execution groups and backward passes).
    """
    if OPEN_GROUPS:
        OPEN_GROUPS[-1].append(ref(frame))
        return True
    task = current_graph_task_id()
    if task == _OUTSIDE_BACKWARD:
        return False
    frames = BY_BACKWARD.get(task)
    if frames is None:
        frames = BY_BACKWARD[task] = []
        at_end_of_backward(lambda: _release(BY_BACKWARD.pop(task, [])))
        if len(BY_BACKWARD) > _MOST_BACKWARDS:  # Task ids increase: drop the oldest.
            del BY_BACKWARD[min(BY_BACKWARD)]
    frames.append(ref(frame))
    return True


def _release(frames: Frames) -> None:
    for reference in frames:
        frame = reference()
        if frame is not None:
            frame.release()


class GraphExecGroup:
    """Recompute each region at most once across all backward passes in the block.

    This replacement for `torch.utils.checkpoint.GraphExecGroup` also allows overlapping
    backward passes. A `GraphExecGroup` cannot be nested in another.
    """

    def __init__(self) -> None:
        """Create an execution group, to be opened by a `with` statement."""
        self._group: AbstractContextManager[None] | None = None

    def __enter__(self) -> GraphExecGroup:
        """Open the execution group.

        Raises:
            CheckpointError: Another execution group is already open.
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
        """Close the execution group and free its recomputed tensors."""
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
            self._group = None
