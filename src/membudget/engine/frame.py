"""One call of a region: run the function, drop what autograd would save, give it back.

While the function runs, the frame's `pack` hook gives autograd a `Handle` for each
tensor that autograd would save, and the tensor is gone. When a backward asks a handle
for its tensor, a `Rerun` fills all handles that live. The rules are in `region`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from membudget._torch import pop_saved_tensors_hooks, push_saved_tensors_hooks
from membudget.engine import isolation, retention
from membudget.engine.arguments import version_of
from membudget.engine.compare import mismatch_error
from membudget.engine.options import ContextPair, RegionOptions
from membudget.engine.recording import Handle, Recording
from membudget.engine.rerun import Rerun
from membudget.engine.scope import Scope
from membudget.engine.statistics import Statistics
from membudget.engine.surroundings import Surroundings
from membudget.engine.switches import SWITCHES
from membudget.engine.trace import Trace
from membudget.errors import ChangedSinceForwardError, CheckpointError


class Frame:
    """One call of a region.

    Attributes:
        recording: What the forward saved.
    """

    __slots__ = (
        "__weakref__",
        "_contexts",
        "_function",
        "_lock",
        "_nested_backward",
        "_options",
        "_statistics",
        "_surroundings",
        "recording",
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
        self._function = function
        self._options = options
        self._statistics = statistics
        self._surroundings = Surroundings(function, args, kwargs, options)
        self._nested_backward = False
        self._lock = threading.RLock()
        self._contexts: ContextPair | None = None
        self.recording = Recording()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and drop what autograd would save."""
        options = self._options
        if (
            options.context_fn is not None
            or options.debug
            or self._surroundings.random_log is not None
        ):
            result = self._run_in_contexts(args, kwargs)
        else:
            result = self._run_hooked(args, kwargs)
        recording = self.recording
        if recording.handles:
            recording.settle()
            self._surroundings.finish()
        recording.finished = True
        return result

    def _run_hooked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = self.recording
        by_value = self._options.determinism_check == "values"
        pack = recording.pack_with_fingerprint if by_value else recording.pack
        push_saved_tensors_hooks(pack, self._unpack)
        try:
            return self._function(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()

    def _run_in_contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = self._options
        with Scope() as scope:
            if self._surroundings.random_log is not None:
                scope.enter_context(self._surroundings.random_log.recorder())
            if options.debug:
                self.recording.trace = Trace()
                scope.enter_context(self.recording.trace)
            if options.context_fn is None:
                return self._run_hooked(args, kwargs)
            self._contexts = options.context_fn()
            with self._contexts[0]:
                return self._run_hooked(args, kwargs)
        raise CheckpointError(
            "the forward context of context_fn swallowed an exception of the function: "
            "a context of a region must let exceptions pass"
        )

    def _unpack(self, handle: Handle) -> Tensor:
        tensor = handle.tensor
        if tensor is None:
            tensor = self._recomputed(handle)
        version = handle.version
        if version is not None and version_of(tensor) != version:
            raise _changed_inside(tensor)
        if not retention.group_is_open():
            handle.tensor = None  # Rule 3.
        return tensor

    def _recomputed(self, handle: Handle) -> Tensor:
        with self._lock:
            tensor = handle.tensor
            if tensor is None:
                self._recompute()
                tensor = handle.tensor
                # With one handle there is nothing left over to be released.
                if len(self.recording.handles) > 1 and not retention.release_in_time(
                    self
                ):
                    self.release()
        if tensor is None:
            raise mismatch_error(
                None,
                None,
                f"{len(self.recording.handles)} tensors",
                "fewer tensors, and not the one that is needed",
                ["determinism_check='none' hides where the runs part"],
            )
        return tensor

    def release(self) -> None:
        """Let go of the recomputed tensors that nobody took (Rule 4).

        The lock keeps the end of one thread's backward from emptying the handles that
        another thread's recompute has just filled.
        """
        with self._lock:
            self.recording.release()

    def _recompute(self) -> None:
        # A backward of the function's own asks while the forward still runs (Rule 7).
        self._nested_backward |= not self.recording.finished
        statistics = self._statistics
        if statistics is not None:
            statistics.recomputes += 1
        rerun = Rerun(
            self._function,
            self._options,
            self._surroundings,
            self.recording,
            self._nested_backward,
            statistics.label if statistics is not None else "",
        )
        context = self._contexts[1] if self._contexts is not None else None
        quiet = isolation.enter()
        SWITCHES.recomputing += 1
        try:
            self._surroundings.run_in_context(rerun.run, context)
        except BaseException:
            self.recording.release()
            raise
        finally:
            SWITCHES.recomputing -= 1
            isolation.leave(quiet)


def _changed_inside(tensor: Tensor) -> ChangedSinceForwardError:
    shape = tuple(tensor.shape)
    return ChangedSinceForwardError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: a tensor of shape {shape} that autograd saved inside a "
        "region was changed after it was saved. Plain autograd refuses this, too; use "
        "the out-of-place operator, or change a clone.",
        [f"saved tensor of shape {shape}"],
    )
