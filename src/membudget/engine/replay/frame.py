"""One call of a replay region: record it, drop what the policy does not keep.

The frame has the hooks that autograd calls. `pack` gives a handle that stands for the
tensor's value; `unpack` asks the replayer. When the forward ends, what only a running
forward needs is dropped; what is left of the recording hangs on the handles.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget._torch import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from membudget.engine import retention
from membudget.engine.held import stride_of
from membudget.engine.identity import version_of
from membudget.engine.policy import as_policy
from membudget.engine.replay.recorder import Recorder
from membudget.engine.replay.replayer import Handle, Replayer, SourceChanged
from membudget.engine.replay.tracker import copy_of
from membudget.engine.replay.values import Value
from membudget.engine.retention import OPEN_GROUPS
from membudget.engine.options import RegionOptions
from membudget.engine.statistics import Statistics
from membudget.errors import ChangedSinceForwardError


class ReplayFrame:
    """One call of a replay region."""

    __slots__ = (
        "__weakref__",
        "_function",
        "_lock",
        "_recorder",
        "_replayer",
        "_statistics",
        "_stream",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        options: RegionOptions,
        statistics: Statistics | None,
    ):
        """Prepare; the function has not run yet."""
        self._function = function
        self._statistics = statistics
        self._lock = RLock()
        self._replayer = Replayer()
        self._recorder: Recorder | None = Recorder(
            as_policy(options.keep), set(), _no_path
        )
        self._stream = _current_stream()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and drop what the policy does not keep."""
        recorder = self._recorder
        assert recorder is not None
        outer = top_saved_tensors_hooks()
        push_saved_tensors_hooks(self._pack, self._unpack)
        try:
            with recorder:
                result = self._function(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            self._recorder = None
        self._finish(recorder, outer)
        return result

    def _finish(self, recorder: Recorder, outer: tuple[Any, Any] | None) -> None:
        """Settle the sources that are needed; all else of the recording is gone."""
        recorder.tracker.table.clear()
        for reference in recorder.tracker.sources:
            source = reference()
            if source is not None and source.tensor is not None:
                _settle(source, outer)
        if outer is not None:
            self._replayer.unpack = outer[1]

    def _pack(self, tensor: Tensor) -> Handle:
        recorder = self._recorder
        assert recorder is not None
        recorder.is_suspended = True
        try:
            handle = Handle(recorder.tracker.read(tensor))
        finally:
            recorder.is_suspended = False
        self._replayer.handles.append(ref(handle))
        return handle

    def _unpack(self, handle: Handle) -> Tensor:
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                return self._take(handle)
            # A backward of the function's own, while the forward still runs.
            recorder.is_suspended = True
            try:
                tensor = self._take(handle)
                recorder.tracker.note(tensor, handle.value)
            finally:
                recorder.is_suspended = False
            return tensor

    def _take(self, handle: Handle) -> Tensor:
        replayer = self._replayer
        before = replayer.operators_run
        try:
            with self._stream():
                tensor = replayer.take(handle, bool(OPEN_GROUPS))
        except SourceChanged as error:
            raise _changed(error.tensor) from None
        except BaseException:
            replayer.release()
            raise
        if replayer.operators_run != before:
            if self._statistics is not None:
                self._statistics.recomputes += 1
            if not retention.release_in_time(self):
                replayer.release()
        return tensor

    def release(self) -> None:
        """Let go of the values that were made again and not taken."""
        with self._lock:
            self._replayer.release()


def _settle(source: Value, outer: tuple[Any, Any] | None) -> None:
    """Note the version of a source, or hand it to the hooks around the region."""
    tensor = source.tensor
    assert tensor is not None
    if source.is_state:
        # The next call of the function writes it again, before the backward of this.
        tensor = source.tensor = copy_of(tensor)
    if tensor.requires_grad or outer is None:
        source.version = version_of(tensor)
    else:
        source.packed = (outer[0](tensor), stride_of(tensor))
        source.tensor = None


def _no_path() -> str:
    return ""


def _current_stream() -> Callable[[], Any]:
    return _same_stream


class _same_stream:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def _changed(tensor: Tensor) -> ChangedSinceForwardError:
    shape = tuple(tensor.shape)
    return ChangedSinceForwardError(f"changed {shape}", [f"tensor of shape {shape}"])
