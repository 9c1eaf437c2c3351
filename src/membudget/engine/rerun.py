"""The rerun engine: drop what autograd would save, and run the function again for it.

A `Frame` is one call of a region. While the function runs, its `pack` hook gives
autograd a `Handle` for each tensor that autograd would save, and the tensor is gone.
When a backward asks a handle for its tensor, the frame runs the function again under
other hooks: the i-th tensor that is saved then belongs to the i-th handle. Where the
rules are named, see `region`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from membudget._torch import pop_saved_tensors_hooks, push_saved_tensors_hooks
from membudget.engine import retention
from membudget.engine.arguments import address_of, version_of
from membudget.engine.compare import (
    CallSite,
    Metadata,
    calling_frame,
    describe,
    fingerprint,
    metadata,
    mismatch_error,
    same_metadata,
)
from membudget.engine.diagnosis import likely_causes, module_names
from membudget.engine.options import ContextPair, RegionOptions
from membudget.engine.scope import Scope
from membudget.engine.statistics import Statistics
from membudget.engine.surroundings import Surroundings
from membudget.engine.switches import SWITCHES
from membudget.engine.trace import Trace, side_by_side
from membudget.errors import (
    ChangedSinceForwardError,
    CheckpointError,
    RecomputeMismatchError,
)

_UNCHECKED = -2  # No version is -2: the tensor of this handle may be written to.


class Handle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        tensor: The recomputed tensor, until autograd takes it.
        version: The version of the tensor's content when it was recomputed.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    tensor: Tensor | None
    version: int


class _StopRecompute(BaseException):
    """Everything that is needed is there. No `except Exception` of a user eats it.

    C++ turns an exception that passes through it to text, so the text is empty.
    """

    def __init__(self, frame: Frame):
        self.frame = frame

    def __str__(self) -> str:
        return ""


class Frame:
    """One call of a region: what its recompute needs, and its living handles."""

    __slots__ = (
        "__weakref__",
        "contexts",
        "cursor",
        "failure",
        "finished",
        "function",
        "handles",
        "last_needed",
        "lock",
        "metadata",
        "nested_backward",
        "options",
        "prints",
        "retrace",
        "state_addresses",
        "statistics",
        "surroundings",
        "trace",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
    ):
        """Note all that a recompute will need; the function has not run yet."""
        self.function = function
        self.options = options
        self.statistics = statistics
        self.surroundings = Surroundings(function, args, kwargs, options)
        self.handles: list[ReferenceType[Handle]] = []
        self.metadata: list[Metadata] = []
        self.prints: list[tuple[int, int]] = []
        self.finished = False
        self.nested_backward = False
        self.lock = threading.RLock()
        self.contexts: ContextPair | None = None
        self.trace: Trace | None = None
        self.retrace: Trace | None = None
        self.failure: CheckpointError | None = None
        self.state_addresses: frozenset[int] = frozenset()

    # The forward.

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and drop what autograd would save."""
        options = self.options
        if options.context_fn is not None or options.debug:
            result = self._run_in_contexts(args, kwargs)
        else:
            result = self._run_hooked(args, kwargs)
        if self.handles:
            self.surroundings.finish()
        self.finished = True
        return result

    def _run_hooked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check = self.options.determinism_check
        pack = self._pack if check != "values" else self._pack_and_fingerprint
        push_saved_tensors_hooks(pack, self._unpack)
        try:
            return self.function(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()

    def _run_in_contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.debug:
            self.trace = Trace()
        if self.options.context_fn is not None:
            self.contexts = self.options.context_fn()
        with ExitStack() as scope:
            if self.trace is not None:
                scope.enter_context(self.trace)
            if self.contexts is not None:
                scope.enter_context(self.contexts[0])
            return self._run_hooked(args, kwargs)
        raise CheckpointError(
            "the forward context of context_fn swallowed an exception of the function: "
            "a context of a region must let exceptions pass"
        )

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle()
        handle.tensor = None
        self.handles.append(ref(handle))
        self.metadata.append(metadata(tensor))
        return handle

    def _pack_and_fingerprint(self, tensor: Tensor) -> Handle:
        self.prints.append(fingerprint(tensor))
        return self._pack(tensor)

    # The backward.

    def _unpack(self, handle: Handle) -> Tensor:
        tensor = handle.tensor
        if tensor is None:
            tensor = self._recomputed(handle)
        version = handle.version
        if version != _UNCHECKED and version_of(tensor) != version:
            raise _changed_inside(tensor)
        if not retention.group_is_open():
            handle.tensor = None  # Rule 3.
        return tensor

    def _recomputed(self, handle: Handle) -> Tensor:
        with self.lock:
            tensor = handle.tensor
            if tensor is None:
                self._recompute()
                tensor = handle.tensor
                # With one handle there is nothing left over to be released.
                if len(self.handles) > 1 and not retention.release_in_time(self):
                    self.release()
        if tensor is None:
            raise self._mismatch(None, None, self.cursor)
        return tensor

    def release(self) -> None:
        """Let go of the recomputed tensors that nobody took (Rule 4)."""
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.tensor = None

    def _recompute(self) -> None:
        # A backward of the function's own asks while the forward still runs (Rule 7).
        self.nested_backward |= not self.finished
        self.last_needed = self._last_needed()
        self.cursor = 0
        self.failure = None
        if self.statistics is not None:
            self.statistics.recomputes += 1
        SWITCHES.recomputing += 1
        try:
            self.surroundings.run_in_context(self._recompute_in_scope)
        except BaseException:
            self.release()
            raise
        finally:
            SWITCHES.recomputing -= 1

    def _last_needed(self) -> int:
        for index in range(len(self.handles) - 1, -1, -1):
            handle = self.handles[index]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def _recompute_in_scope(self) -> None:
        surroundings = self.surroundings
        with Scope() as scope:
            args, kwargs = surroundings.arguments.rebuild()
            surroundings.enter_ambient(scope)
            self.state_addresses = surroundings.state_addresses()
            surroundings.enter_state(scope, hide_gradients=self.nested_backward)
            if self.trace is not None:
                self.retrace = Trace()
                scope.enter_context(self.retrace)
            if self.contexts is not None:
                scope.enter_context(self.contexts[1])
            stopped = self._rerun(args, kwargs)
        if self.failure is not None:
            # Raised again here, in case the function caught it. A local name for it
            # would tie its traceback into a reference cycle.
            try:
                raise self.failure
            finally:
                self.failure = None
        if not stopped:
            self._check_count()

    def _rerun(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Run the function again; tell whether it was stopped early."""
        push_saved_tensors_hooks(self._refill, _as_it_is)
        try:
            self.function(*args, **kwargs)
        except _StopRecompute as stop:
            if stop.frame is not self:
                raise
            return True
        finally:
            pop_saved_tensors_hooks()
        return False

    def _refill(self, tensor: Tensor) -> Tensor | None:
        """Give the tensor that is being saved to the handle that it belongs to."""
        index = self.cursor
        self.cursor = index + 1
        if index < len(self.handles):
            if self.options.determinism_check != "none":
                self._check(index, tensor)
            handle = self.handles[index]()
            if handle is not None:
                handle.version = (
                    _UNCHECKED
                    if self.state_addresses
                    and address_of(tensor) in self.state_addresses
                    else version_of(tensor)
                )
                handle.tensor = tensor
        if (
            self.options.early_stop
            and index >= self.last_needed
            and not _fills_what_it_saved()
        ):
            raise _StopRecompute(self)
        # The graph of the recompute is used only by a backward inside the function.
        return tensor if self.nested_backward else None

    # Rule 9.

    def _check(self, index: int, tensor: Tensor) -> None:
        saved, made = self.metadata[index], metadata(tensor)
        if saved != made and not same_metadata(saved, made):
            self._fail(index, describe(saved), describe(made), made)
        elif self.prints and self.prints[index] != fingerprint(tensor):
            what = describe(saved)
            self._fail(index, what, f"{what}, with other values in it", made)

    def _fail(self, index: int, saved: str, made: str, data: Metadata) -> None:
        site = CallSite(calling_frame(), module_names(self.function, self._label()))
        self.failure = mismatch_error(
            index, site, saved, made, self._causes(index, data), self._traces()
        )
        raise self.failure

    def _check_count(self) -> None:
        if not self.finished or self.options.determinism_check == "none":
            return
        if self.cursor != len(self.handles):
            raise self._mismatch(None, None, self.cursor)

    def _mismatch(
        self, index: int | None, site: CallSite | None, made: int
    ) -> RecomputeMismatchError:
        return mismatch_error(
            index,
            site,
            f"{len(self.handles)} tensors",
            f"{made} tensors",
            self._causes(None, None),
            self._traces(),
        )

    def _label(self) -> str:
        return self.statistics.label if self.statistics is not None else ""

    def _causes(self, index: int | None, made: Metadata | None) -> list[str]:
        saved = None if index is None else self.metadata[index]
        reads = self.surroundings.reads
        return likely_causes(self.function, reads, self.options, saved, made)

    def _traces(self) -> str:
        if self.trace is None or self.retrace is None:
            return ""
        return side_by_side(self.trace, self.retrace)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _fills_what_it_saved() -> bool:
    """Tell whether the operator that is saving writes its saved tensor afterwards.

    RReLU saves its noise before it draws it (pytorch/pytorch#193671), so a recompute
    that stops there would hand out uninitialised memory. The call that saves is looked
    up in the Python code that made it.
    """
    caller = sys._getframe(2)
    return "rrelu" in caller.f_code.co_names


def _changed_inside(tensor: Tensor) -> ChangedSinceForwardError:
    shape = tuple(tensor.shape)
    return ChangedSinceForwardError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: a tensor of shape {shape} that autograd saved inside a "
        "region was changed after it was saved. Plain autograd refuses this, too; use "
        "the out-of-place operator, or change a clone.",
        [f"saved tensor of shape {shape}"],
    )
