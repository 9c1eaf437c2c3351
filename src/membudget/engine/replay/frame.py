"""Run one call of a replay region, and install its saved-tensor hooks.

The pack hook replaces a saved tensor by a handle; the unpack hook asks the replayer for
the tensor. After the forward, the handles own everything that the backward pass needs,
and the recorder is discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from membudget._torch import (
    hide_from_dynamo,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from membudget.engine import isolation
from membudget.engine.groups import OPEN_GROUPS, release_in_time
from membudget.engine.messages import (
    changed_error,
    freed_error,
    inexact_inside_error,
    module_path_in,
    name_of,
    names_of,
    weakly,
)
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.replay import following
from membudget.engine.replay.checks import Checks, settle_source
from membudget.engine.replay.execute import SourceChangedError, SourceFreedError
from membudget.engine.replay.extension import EXTENSION, hooks_of
from membudget.engine.replay.forward_record import ForwardRecord
from membudget.engine.replay.native_replayer import new_replayer
from membudget.engine.replay.recorder import Recorder
from membudget.engine.replay.tape import ReplayHandle
from membudget.engine.replay.verified import verified
from membudget.engine.stages import CallStages
from membudget.engine.surroundings import operator_conditions
from membudget.errors import ChangedSinceForwardError
from membudget.ops import tensors_in
from membudget.state.bits import is_subclass
from membudget.state.identity import address_of


class ReplayFrame:
    """One call of a replay region."""

    __slots__ = (
        *("__weakref__", "_arguments", "_checks", "_function", "_inputs", "_lock"),
        *("_named", "_outer", "_recorder", "_replayer", "_statistics"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
    ):
        """Prepare one call of a replay region, before the region's function runs."""
        self._function: Callable[..., Any] | None = function
        self._named = weakly(function)
        self._statistics = statistics
        self._lock = isolation.Lock()
        tensors = list(tensors_in([*args, *kwargs.values()]))
        self._arguments = {address_of(t): i for i, t in enumerate(tensors)}
        self._inputs = None if options.offload is None else options.offload.hooks
        known = verified(options, function, args, kwargs) if options.verify else None
        unrepeatable = set() if known is None else known.unrepeatable
        policy = options.policy.begin()
        label = statistics.label if statistics is not None else ""
        module_path = module_path_in(function, label)
        stages = CallStages.of(policy.stages, policy.alignment)
        recording = ForwardRecord(
            policy, options.decisions, unrepeatable, module_path, stages
        )
        self._replayer = new_replayer(operator_conditions(), stages)
        self._recorder: Recorder | None = Recorder(recording)
        self._checks = Checks(self._recorder, options, known, statistics)
        self._recorder.sees_subclasses = any(map(is_subclass, tensors)) or (
            known is not None and known.has_subclasses
        )
        if self._inputs is None and self._checks.is_quiet():
            recording.routes = following.routes_of(options, function, known)

    # The forward.

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's function, and drop saved tensors that are not kept."""
        if EXTENSION:
            return EXTENSION[0].run_replay(self, args, kwargs)
        self.begin()
        assert self._function is not None
        try:
            result = self._function(*args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        self.end()
        return result

    def begin(self) -> None:
        """Start recording, and install the saved-tensor hooks."""
        assert self._recorder is not None
        self._outer = top_saved_tensors_hooks()
        if self._outer is None:  # First, as it may fail: the thread is as it was.
            following.set_out(self._recorder.recording, self._replayer, self._checks)
        push_saved_tensors_hooks(*hooks_of(self))
        try:
            self._recorder.__enter__()
        except BaseException:
            pop_saved_tensors_hooks()
            raise

    def is_on_top(self) -> bool:
        """Return whether this call's recorder and hooks are the innermost ones."""
        hooks, recorder = top_saved_tensors_hooks(), self._recorder
        owner = hooks and getattr(hooks[0], "__self__", None)
        return owner is self and recorder is not None and recorder.is_innermost()

    def abandon(self) -> None:
        """Stop recording, and discard what was recorded."""
        recorder = self._recorder
        if recorder is None:
            return  # `end` has failed, and has restored the thread.
        recorder.__exit__(None, None, None)
        pop_saved_tensors_hooks()
        self._recorder = self._function = self._checks.recorder = None
        recorder.recording.leave_route()  # What was saved may be asked for.
        recorder.recording.tracker.clear()

    def end(self) -> None:
        """Stop and verify the recording; prepare the tensors that a replay may read."""
        recorder = self._recorder
        assert recorder is not None
        try:
            recorder.finish()
        except BaseException:
            self._forget(recorder)
            raise
        finally:
            # Restore the thread, whatever fails.
            pop_saved_tensors_hooks()
            self._recorder = self._function = None
        self._settle(recorder)

    def _forget(self, recorder: Recorder) -> None:
        recorder.recording.tracker.clear()
        self._checks.recorder = self._outer = None

    def _settle(self, recorder: Recorder) -> None:
        """Verify what was recorded; the thread is as it was before the call."""
        try:
            self._finish(recorder)
        finally:
            self._forget(recorder)

    def _finish(self, recorder: Recorder) -> None:
        recording, outer = recorder.recording, self._outer
        policy = recording.policy
        following.arrive(recording)
        policy.warn_if_idle(recording.number, recording.kept)
        policy.end(recording.number)
        recording.tracker.clear()
        # Only the handles own values from here on: unused sources are gone.
        take = self._checks.finish(recorder, self._replayer)
        following.note_route(recording, self._replayer, self._checks.verified)
        for reference in recording.tracker.sources:
            source = reference()
            if source is None:
                continue
            hooks = self._inputs or outer if source.is_input else outer
            if source.tensor is not None and (source.is_state or hooks is not None):
                recording.join(source.tensor)  # It is about to be copied.
            settle_source(source, hooks, take)

    @property
    def has_saved(self) -> bool:
        """Whether autograd saved any tensor in the forward."""
        return bool(self._replayer.handles) or self._replayer.trip is not None

    def _pack(self, tensor: Tensor) -> ReplayHandle:
        recorder = self._recorder
        assert recorder is not None
        recorder.is_suspended = True
        try:
            handle = recorder.handle(tensor)
            self._checks.note(recorder, handle, tensor)
        finally:
            recorder.is_suspended = False
        replayer = self._replayer
        if replayer.stages is not None:
            recording = recorder.recording
            replayer.stages.put(handle, recording.number, recording.place)
        replayer.handles.append(ref(handle))
        return handle

    # The backward.

    def _unpack(self, handle: ReplayHandle) -> Tensor:
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                if handle.saved_version is not None:
                    self._checks.check_version(handle.saved_version)
                tensor = self._take(handle, bool(OPEN_GROUPS))
                if handle.fingerprint is not None:
                    self._checks.check(handle, tensor, self._replayer)
                return tensor
            # The function runs a backward of its own, inside the forward.
            self.note_backward_inside()
            if recorder.changes_formulas():
                raise inexact_inside_error()
            with recorder.suspended():
                recorder.settle()
                # An open group belongs to a backward in which this forward is rerun.
                take = functools.partial(self._take, handle, False)
                tensor = self._checks.inside(recorder, handle, self._replayer, take)
                recorder.recording.tracker.know(tensor, handle.value)
            return tensor

    def note_backward_inside(self) -> None:
        """Report a backward pass inside the forward to the enclosing rerun region."""
        owner: Any = getattr(self._outer and self._outer[1], "__self__", None)
        if hasattr(owner, "note_backward_inside"):
            owner.note_backward_inside()

    def _take(self, handle: ReplayHandle, stays: bool) -> Tensor:
        replayer = self._replayer
        # Fast path: no region to enter, nothing to catch.
        ready = replayer.take_ready(handle, stays)
        if ready is not None:
            return ready
        before = replayer.plans_run
        try:
            counted = isolation.enter()
            try:
                tensor = replayer.take(handle, stays)
            finally:
                if counted:
                    isolation.leave()
        except (SourceChangedError, SourceFreedError) as error:
            raise self.explained(error) from None
        except BaseException:
            replayer.release()
            raise
        if replayer.plans_run != before:
            self.note_run()
        return tensor

    def note_run(self) -> None:
        """Count a new plan that has run; free leftovers when the backward ends."""
        self._count_run()
        if not release_in_time(self):
            self._replayer.release()

    def _count_run(self) -> None:
        if self._statistics is not None:
            self._statistics.recomputes += 1

    def explained(self, error: BaseException) -> BaseException:
        """Release what a failed replay recomputed; return the error to raise."""
        self._replayer.release()
        if isinstance(error, SourceChangedError):
            return self._changed(error.tensor)
        return freed_error() if isinstance(error, SourceFreedError) else error

    def recompute(self) -> None:
        """Recompute all dropped tensors now, for the next backward pass."""
        with self._lock:
            before = self._replayer.plans_run
            self._replayer.prepare()
            if self._replayer.plans_run != before:
                self._count_run()

    def release(self) -> None:
        """Free recomputed tensors that autograd has not unpacked."""
        with self._lock:
            self._replayer.release()

    def _changed(self, tensor: Tensor) -> ChangedSinceForwardError:
        function = self._named()
        names = {} if function is None else names_of(function, [])
        place = self._arguments.get(address_of(tensor))
        if place is not None:
            return changed_error([f"argument {place}"])
        return changed_error([name_of(tensor, names)])


hide_from_dynamo(ReplayFrame._pack)
hide_from_dynamo(ReplayFrame._unpack)
