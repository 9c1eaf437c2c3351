"""One recompute: run the function again, and give each handle its tensor.

The i-th tensor that autograd saves in the recompute belongs to the i-th handle of the
forward. The run ends by an exception of its own as soon as the last handle that is
needed has its tensor; the operator that would have used that tensor never runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from membudget._torch import pop_saved_tensors_hooks, push_saved_tensors_hooks
from membudget.callsite import CallSite, calling_frame
from membudget.engine.arguments import address_of, version_of
from membudget.engine.compare import (
    Metadata,
    describe,
    fingerprint,
    metadata,
    mismatch_error,
    same_metadata,
)
from membudget.engine.diagnosis import likely_causes, module_names
from membudget.engine.options import RegionOptions
from membudget.engine.recording import Recording
from membudget.engine.scope import Scope
from membudget.engine.surroundings import Surroundings
from membudget.engine.trace import Trace, side_by_side
from membudget.engine.watch import changed_error
from membudget.errors import CheckpointError


class _StopRecompute(BaseException):
    """Everything that is needed is there. No `except Exception` of a user eats it.

    C++ turns an exception that passes through it to text, so the text is empty.
    """

    def __init__(self, rerun: Rerun):
        self.rerun = rerun

    def __str__(self) -> str:
        return ""


class Rerun:
    """One recompute of one region.

    The graph that the recompute builds keeps this object, through its hooks, for as
    long as the user's code keeps a tensor of it. So when the run is over the object
    lets go of the region (Rule 10).
    """

    __slots__ = (
        "_cursor",
        "_failure",
        "_function",
        "_label",
        "_last_needed",
        "_nested_backward",
        "_options",
        "_pending",
        "_recording",
        "_state",
        "_surroundings",
        "_trace",
        "_watched",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        options: RegionOptions,
        surroundings: Surroundings,
        recording: Recording,
        nested_backward: bool,
        label: str,
    ):
        """Prepare a recompute.

        Args:
            function: The region's function.
            options: The region's options.
            surroundings: What the forward saw.
            recording: What the forward saved; its handles are filled.
            nested_backward: Whether the function differentiates inside, so that the
                graph of the recompute must be a whole one (Rule 7).
            label: The region's name, for errors.
        """
        self._label = label
        self._function = function
        self._options = options
        self._surroundings = surroundings
        self._recording = recording
        self._nested_backward = nested_backward
        self._last_needed = recording.last_needed()
        self._cursor = 0
        self._pending: Tensor | None = None
        self._failure: CheckpointError | None = None
        self._trace: Trace | None = None
        self._state: frozenset[int] = frozenset()
        self._watched: dict[int, str] | None = None

    def run(self, context: AbstractContextManager[Any] | None) -> None:
        """Run the function again and fill the handles.

        Args:
            context: The recompute context of `context_fn`, if there is one.

        Raises:
            ChangedSinceForwardError: See Rule 8.
            RecomputeMismatchError: See Rule 9.
        """
        try:
            self._run_in_scope(context)
        finally:
            self._failure = None
            del self._function, self._surroundings, self._recording, self._trace

    def _run_in_scope(self, context: AbstractContextManager[Any] | None) -> None:
        surroundings = self._surroundings
        with Scope() as scope:
            args, kwargs = surroundings.arguments.rebuild()
            surroundings.enter_ambient(scope)
            if surroundings.reads is not None:
                self._state = surroundings.reads.state_addresses()
                self._watched = surroundings.enter_state(scope, self._nested_backward)
            if self._recording.trace is not None:
                self._trace = Trace()
                scope.enter_context(self._trace)
            if context is not None:
                scope.enter_context(context)
            stopped = self._call(args, kwargs)
        if self._failure is not None:
            # Raised again, in case the function caught it. A local name for it would
            # tie its traceback into a reference cycle.
            raise self._failure
        if not stopped:
            self._check_count()

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Call the function; tell whether it was stopped early."""
        push_saved_tensors_hooks(self._pack, _as_it_is)
        try:
            self._function(*args, **kwargs)
            self._settle()
        except _StopRecompute as stop:
            if stop.rerun is not self:
                raise
            return True
        finally:
            pop_saved_tensors_hooks()
        return False

    def _pack(self, tensor: Tensor) -> Tensor | None:
        """Give the tensor that is being saved to the handle that it belongs to."""
        recording = self._recording
        if self._nested_backward:
            # With a whole graph, the tensor's history would keep the tensor alive;
            # otherwise it is nodes alone, and not worth the microsecond of a detach.
            tensor = tensor.detach()
        if recording.fingerprints:
            self._settle()
            self._pending = tensor
        index = self._cursor
        self._cursor = index + 1
        if index < len(recording.handles):
            made = metadata(tensor)
            if made != recording.metadata[index]:
                self._check(index, made)
            handle = recording.handles[index]()
            if handle is not None:
                if self._state or self._watched:
                    handle.version = self._version_of_external(tensor)
                else:
                    handle.version = version_of(tensor)
                handle.tensor = tensor
        if (
            index >= self._last_needed
            and self._options.early_stop
            and not recording.fingerprints  # Then the stop comes one tensor later.
            and not _fills_what_it_saved()
        ):
            raise _StopRecompute(self)
        # The graph of the recompute is used only by a backward inside the function.
        return tensor if self._nested_backward else None

    def _version_of_external(self, tensor: Tensor) -> int | None:
        """Refuse what was changed; a buffer that is put back has no version to keep."""
        address = address_of(tensor)
        if self._watched and address in self._watched:
            self._failure = changed_error([self._watched[address]])
            raise self._failure
        return None if address in self._state else version_of(tensor)

    def _check(self, index: int, made: Metadata) -> None:
        if self._options.determinism_check == "none":
            return
        saved = self._recording.metadata[index]
        if not same_metadata(saved, made):
            self._fail(index, describe(saved), describe(made), saved, made)

    def _settle(self) -> None:
        """Compare the bytes of the last saved tensor, which its operator has filled."""
        index, tensor = self._cursor - 1, self._pending
        prints = self._recording.fingerprints
        self._pending = None
        if tensor is None or index >= len(prints):
            return
        if prints[index] != fingerprint(tensor):
            data = metadata(tensor)
            text = describe(data)
            self._fail(index, text, f"{text}, with other values in it", data, data)
        if self._options.early_stop and index >= self._last_needed:
            raise _StopRecompute(self)

    def _fail(
        self, index: int, saved: str, made: str, before: Metadata, now: Metadata
    ) -> None:
        names = module_names(self._function, self._label)
        site = CallSite(calling_frame(), names)
        causes = self._causes(before, now)
        self._failure = mismatch_error(index, site, saved, made, causes, self._traces())
        raise self._failure

    def _check_count(self) -> None:
        recording = self._recording
        if not recording.finished or self._options.determinism_check == "none":
            return
        if self._cursor != len(recording.handles):
            saved, made = len(recording.handles), self._cursor
            raise mismatch_error(
                None,
                None,
                f"{saved} tensors",
                f"{made} tensors",
                self._causes(None, None),
                self._traces(),
            )

    def _causes(self, saved: Metadata | None, made: Metadata | None) -> list[str]:
        reads = self._surroundings.reads
        return likely_causes(self._function, reads, self._options, saved, made)

    def _traces(self) -> str:
        if self._recording.trace is None or self._trace is None:
            return ""
        return side_by_side(self._recording.trace, self._trace)


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
