"""Record a rerun region's forward: handles and metadata of its saved tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from membudget._torch import tree_iter
from membudget.callsite import is_internal
from membudget.engine import isolation
from membudget.engine.arguments import must_keep
from membudget.engine.calls import Calls
from membudget.engine.comparison import Fingerprints, Metadata, metadata
from membudget.engine.options import ContextPair, RegionOptions, Statistics
from membudget.engine.surroundings import Surroundings
from membudget.errors import CheckpointError, RecomputeMismatchError
from membudget.observer import Observer
from membudget.state.identity import address_of
from membudget.text import dtype_name

# Lines of a trace shown around the first difference, and of the stack at each.
_BEFORE, _AFTER, _STACK = 4, 4, 3

# Errors that stateful code may raise in its second run: an exhausted iterator, a key
# that exists already. Without RuntimeError, which torch raises when out of memory.
_STATEFUL = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
    *(OSError, StopIteration, TypeError, ValueError),
)


class RerunHandle:
    """The placeholder that autograd stores instead of a saved tensor.

    Attributes:
        tensor: The recomputed tensor, until autograd unpacks it.
        version: Version of the tensor when it was recomputed; `None` if later writes
            are allowed, or if torch tracks no version.
        address: Storage address when the tensor was recomputed, to detect `y.data =`;
            `None` without guards, or without a storage.
    """

    __slots__ = ("__weakref__", "address", "tensor", "version")

    address: int | None
    tensor: Tensor | None
    version: int | None

    def mark(self, tensor: Tensor) -> None:
        """Note a tensor that may lack a version, and has no storage."""
        self.version = None if tensor.is_inference() else tensor._version
        self.address = None


class KeptHandle(RerunHandle):
    """A handle that keeps its tensor in memory."""

    __slots__ = ("_kept",)

    def __init__(self, tensor: Tensor):
        """Keep `tensor` instead of dropping it."""
        self._kept = tensor
        self.version = tensor._version
        self.address = None

    @property
    def tensor(self) -> Tensor:
        """The saved tensor."""
        return self._kept

    @tensor.setter
    def tensor(self, value: Tensor | None) -> None:
        """Ignore the assignment by which other handles drop their tensor."""


class Trace(Observer):
    """Records every operator that runs while the trace is active.

    Attributes:
        operators: Each operator as text, in execution order.
        stacks: The user's call stack at each operator, innermost frame first.
    """

    def __init__(self) -> None:
        """Create an empty trace."""
        self.operators: list[str] = []
        self.stacks: list[str] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an operator, then run it."""
        operands = ", ".join(
            f"{dtype_name(t.dtype)}{list(t.shape)}"
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor)
        )
        self.operators.append(f"{operator}({operands})")
        self.stacks.append(_user_stack())
        return operator(*args, **kwargs)


def _user_stack() -> str:
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < _STACK:
        if not is_internal(frame.f_code):
            name = os.path.basename(frame.f_code.co_filename)
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def side_by_side(forward: Trace | None, recompute: Trace | None) -> str:
    """Return excerpts of two operator traces around the first operator that differs."""
    if forward is None or recompute is None:
        return ""
    first = _first_difference(forward.operators, recompute.operators)
    return "\n".join(
        [
            *_excerpt("operators of the forward", forward, first),
            *_excerpt("operators of the recompute", recompute, first),
        ]
    )


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _excerpt(title: str, trace: Trace, first: int) -> list[str]:
    start = max(0, first - _BEFORE)
    end = min(len(trace.operators), first + _AFTER)
    lines = [f"  {title} ({len(trace.operators)} in all, from number {start}):"]
    for i in range(start, end):
        mark = ">" if i == first else " "
        lines.append(f"  {mark} {i:4d} {trace.operators[i]}  [{trace.stacks[i]}]")
    return lines


class Recording:
    """One call of a rerun region: arguments, surrounding state and saved tensors.

    Attributes:
        function: The region's function.
        options: The region's options.
        statistics: The region's counters, if any.
        surroundings: The state that a recompute must restore.
        handles: Weak references to the handles of the saved tensors, in order; a dead
            handle needs no recompute.
        metadata: Shape, dtype, device and stride of each saved tensor.
        calls: The call history of the function; `None` without verification.
        finished: Whether the forward has ended.
        is_new: Whether the call ran unverified, and the dtypes and ranks of its saved
            tensors occurred in no verified call.
        holds: Whether saved tensors stay in memory until the forward ends, because the
            function runs, or may run, a backward pass of its own (Rule 7).
        nested_backward: Whether the function itself runs a backward pass (Rule 7).
        fingerprints: Fingerprints of the saved tensors; `None` if not compared.
        trace: Operators of the forward, recorded with `debug=True`.
        contexts: The pair of context managers from `context_fn`, if given.
        lock: The lock to hold while handles are filled or emptied.
    """

    __slots__ = (
        *("__weakref__", "calls", "contexts", "fingerprints", "finished", "function"),
        *("handles", "holds", "is_new", "lock", "metadata", "nested_backward"),
        *("options", "statistics", "surroundings", "trace"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
        calls: Calls | None = None,
    ):
        """Record everything that a recompute needs, before the function runs."""
        self.function = function
        self.options = options
        self.statistics = statistics
        self.surroundings = Surroundings(function, args, kwargs, options)
        self.handles: list[ReferenceType[RerunHandle]] = []
        self.metadata: list[Metadata] = []
        self.calls = calls
        self.lock = isolation.Lock()
        self.finished = self.holds = self.is_new = self.nested_backward = False
        self.contexts: ContextPair | None = None
        self.fingerprints: Fingerprints | None = None
        self.trace: Trace | None = None

    @property
    def has_saved(self) -> bool:
        """Whether the forward saved any tensor."""
        return bool(self.handles)

    @property
    def label(self) -> str:
        """The region's name for error messages."""
        return self.statistics.label if self.statistics is not None else ""

    def pack(self, tensor: Tensor) -> RerunHandle:
        """Return a handle for a tensor that autograd saves, and drop the tensor."""
        if tensor.is_nested and must_keep(tensor, self.surroundings.arguments):
            return KeptHandle(tensor)  # The recompute skips the same tensors.
        handle = RerunHandle()
        handle.tensor = None
        self.handles.append(ref(handle))
        try:  # As `metadata`, whose call takes 2 % of a saved tensor's time.
            data = (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
        except (RuntimeError, NotImplementedError):
            data = metadata(tensor)
        self.metadata.append(data)
        return handle

    def pack_checked(self, tensor: Tensor) -> RerunHandle:
        """Return a handle for a saved tensor; also fingerprint or retain the tensor."""
        handle = self.pack(tensor)
        if isinstance(handle, KeptHandle):
            return handle
        if self.fingerprints is not None:
            self.fingerprints.add(tensor)
        if self.holds:
            # Detached, because the tensor's history would own the handle.
            handle.tensor = tensor.detach()
            handle.version = None if tensor.is_inference() else tensor._version
            handle.address = address_of(tensor) or None
        return handle

    def last_needed(self) -> int:
        """Return the index of the last live handle without a tensor; -1 if none."""
        handles = self.handles
        for index in range(len(handles) - 1, -1, -1):
            handle = handles[index]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def empty(self) -> None:
        """Free the recomputed tensors that autograd has not unpacked."""
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.tensor = None

    def stops_early(self) -> bool:
        """Return whether a recompute may stop before the function ends."""
        calls = self.calls
        return self.options.early_stop and not (calls is not None and calls.fills_late)

    def note_verified(self, fills_late: bool) -> None:
        """Record that a recompute reproduced the saved tensors bit for bit."""
        if self.calls is not None:
            self.calls.verified(self.metadata)
            self.calls.fills_late |= fills_late

    def blame(self, error: CheckpointError) -> None:
        """Add advice to the message of an error that the region itself caused."""
        if error.remedy:  # The error comes from a region around this one.
            return
        by_region = getattr(error, "by_region", False)
        if by_region or isinstance(error, RecomputeMismatchError):
            error.add_remedy(self._replay_from_now())

    def blame_state(self, error: Exception) -> None:
        """Add advice to an error that stateful code may raise in its second run."""
        if isinstance(error, _STATEFUL):
            remedy = self._replay_from_now()
            error.add_note(f"The forward of the region raised nothing. {remedy}")

    def _replay_from_now(self) -> str:
        """Switch later calls to replay if options allow; return advice for the user."""
        if self.calls is not None and self.options.may_replay:
            self.calls.owner.replays = True
            if self.statistics is not None:
                self.statistics.switched = True
            return (
                "From its next call on, the function is replayed, which runs its "
                "Python once: drop the gradients of this step, and run the step again."
            )
        return 'Give the region engine="replay", which runs its Python once.'
