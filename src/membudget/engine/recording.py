"""What a rerun region's forward leaves behind: handles, and what they stood for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from threading import RLock
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from membudget._torch import tree_iter
from membudget.callsite import is_internal
from membudget.engine.arguments import must_keep
from membudget.engine.calls import Calls
from membudget.engine.comparison import Fingerprints, Metadata, metadata
from membudget.engine.options import ContextPair, RegionOptions, Statistics
from membudget.engine.surroundings import Surroundings
from membudget.errors import CheckpointError, RecomputeMismatchError
from membudget.observer import Observer
from membudget.state.identity import address_of

# Lines of a trace shown around the first difference, and of the stack at each.
_BEFORE, _AFTER, _STACK = 4, 4, 3

# Errors of code that runs twice: an exhausted iterator, a key that exists already.
# Running out of memory is not among them; it is a RuntimeError of torch's.
_STATEFUL = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
    *(OSError, StopIteration, TypeError, ValueError),
)


class RerunHandle:
    """What autograd stores in place of a saved tensor.

    Attributes:
        tensor: The recomputed tensor, until autograd takes it.
        version: The version of the tensor's content when it was recomputed; `None` if
            it may be written to, or torch keeps none.
        address: The address of its storage at that time, because `y.data =` swaps it;
            `None` without guards, or without a storage.
    """

    __slots__ = ("__weakref__", "address", "tensor", "version")

    address: int | None
    tensor: Tensor | None
    version: int | None


class KeptHandle(RerunHandle):
    """A handle whose tensor is kept in memory."""

    __slots__ = ("_kept",)

    def __init__(self, tensor: Tensor):
        """Keep a tensor."""
        self._kept = tensor
        self.version = tensor._version
        self.address = None

    @property
    def tensor(self) -> Tensor:
        """The saved tensor."""
        return self._kept

    @tensor.setter
    def tensor(self, value: Tensor | None) -> None:
        """Ignore the assignment that empties a handle once its tensor is taken."""


class Trace(Observer):
    """Records every operator that runs inside.

    Attributes:
        operators: Each operator as text, in order.
        stacks: The user's stack at each operator, innermost line first.
    """

    def __init__(self) -> None:
        """Start with an empty list."""
        self.operators: list[str] = []
        self.stacks: list[str] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record the operator and run it."""
        operands = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
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


def side_by_side(forward: Trace, recompute: Trace) -> str:
    """Return both traces around the first operator that differs."""
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
    """One call of a region: its arguments, its surroundings, what it saved.

    Attributes:
        function: The region's function.
        options: The region's options.
        statistics: The region's counters, if any.
        surroundings: The state that a recompute must restore.
        handles: The handle of each saved tensor, in order; weak, because a dead handle
            needs no recompute.
        metadata: Shape, dtype, device and stride of each saved tensor.
        calls: The history of the function's calls; `None` without verification.
        finished: Whether the forward has ended.
        is_new: Whether the call was not verified, and took a path that no verified call
            has taken.
        holds: Whether saved tensors stay in memory until the forward ends, because the
            function is known to differentiate inside, or may be found to (Rule 7).
        nested_backward: Whether the function differentiates inside (Rule 7).
        fingerprints: The fingerprints of the saved tensors, if they are to be compared.
        trace: The operators of the forward, with `debug=True`.
        contexts: What `context_fn` returned, if there is one.
        lock: Held while handles are filled or emptied.
    """

    # No slots: class attributes cost nothing in the calls that leave them unchanged.
    finished = holds = is_new = nested_backward = False
    contexts: ContextPair | None = None
    fingerprints: Fingerprints | None = None
    trace: Trace | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
        calls: Calls | None = None,
    ):
        """Record everything a recompute will need; the function has not run yet."""
        self.function = function
        self.options = options
        self.statistics = statistics
        self.surroundings = Surroundings(function, args, kwargs, options)
        self.handles: list[ReferenceType[RerunHandle]] = []
        self.metadata: list[Metadata] = []
        self.calls = calls
        self.lock = RLock()

    @property
    def has_saved(self) -> bool:
        """Whether the forward saved anything."""
        return bool(self.handles)

    @property
    def label(self) -> str:
        """The region's name, for errors."""
        return self.statistics.label if self.statistics is not None else ""

    def pack(self, tensor: Tensor) -> RerunHandle:
        """Return a handle for a tensor that autograd saves, and drop the tensor."""
        if tensor.is_nested and must_keep(tensor, self.surroundings.arguments):
            return KeptHandle(tensor)
        handle = RerunHandle()
        handle.tensor = None
        self.handles.append(ref(handle))
        self.metadata.append(metadata(tensor))
        return handle

    def pack_checked(self, tensor: Tensor) -> RerunHandle:
        """Return a handle; also fingerprint the tensor, or hold it."""
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
        """Return the last index whose handle is live and empty, or -1."""
        handles = self.handles
        for index in range(len(handles) - 1, -1, -1):
            handle = handles[index]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def empty(self) -> None:
        """Free the recomputed tensors that autograd has not taken."""
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.tensor = None

    def stops_early(self) -> bool:
        """Tell whether a recompute may stop before the function's end."""
        calls = self.calls
        return self.options.early_stop and not (calls is not None and calls.fills_late)

    def note_verified(self, fills_late: bool) -> None:
        """Record that a recompute gave the saved tensors bit for bit.

        Args:
            fills_late: Whether an operator fills what it saves only after saving it.
        """
        if self.calls is not None:
            self.calls.verified(self.metadata)
            self.calls.fills_late |= fills_late

    def blame(self, error: CheckpointError) -> None:
        """Add a remedy to an error that the region itself caused."""
        if error.remedy:  # The error comes from a region around this one.
            return
        by_region = getattr(error, "by_region", False)
        if by_region or isinstance(error, RecomputeMismatchError):
            error.add_remedy(self._replay_from_now())

    def blame_state(self, error: Exception) -> None:
        """Add a remedy to an error of code that found its own state advanced."""
        if isinstance(error, _STATEFUL):
            remedy = self._replay_from_now()
            error.add_note(f"The forward of the region raised nothing. {remedy}")

    def _replay_from_now(self) -> str:
        """Stop rerunning the function, if its options leave the engine open.

        Returns:
            A remedy for an error message.
        """
        if self.calls is not None and self.options.may_replay:
            self.calls.owner.replays = True
            return (
                "From its next call on, the function is replayed, which runs its "
                "Python once: drop the gradients of this step, and run the step again."
            )
        return 'Give the region engine="replay", which runs its Python once.'
