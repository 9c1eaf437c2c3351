"""One recompute: run the function again, and fill each handle with its tensor.

The i-th tensor that autograd saves in the recompute belongs to the i-th handle of the
forward. With `early_stop`, a private exception ends the run as soon as the last needed
handle has its tensor, so that the remaining operators never run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    set_grad_enabled,
    storage_address,
)
from membudget.callsite import (
    CallSite,
    calling_frame,
    fills_what_it_saved,
    naming_frame,
)
from membudget.engine.arguments import must_keep
from membudget.engine.comparison import (
    Metadata,
    RecomputedFingerprints,
    describe,
    metadata,
    same_metadata,
)
from membudget.engine.messages import (
    changed_error,
    likely_causes,
    mismatch_error,
    module_names,
)
from membudget.engine.native import RERUN
from membudget.engine.reads import Externals
from membudget.engine.recording import Recording, RerunHandle, Trace, side_by_side
from membudget.errors import CheckpointError
from membudget.scope import Scope


class StopRecompute(BaseException):
    """Raised to end a recompute once all needed tensors are available.

    Deriving from `BaseException` keeps the user's `except Exception` from catching this
    exception. The exception takes no argument, which C++ code would lose by converting
    exceptions to text; each `Rerun` itself records that it has stopped.
    """


class Rerun:
    """One recompute of one region.

    As long as user code keeps a tensor of the recompute's graph, the hooks of that
    graph keep the `Rerun` alive. A `Rerun` therefore drops its references to the
    forward's recording and handles when the run ends (Rule 10).
    """

    __slots__ = (
        *("_cursor", "_externals", "_failure", "_fingerprints", "_handles"),
        *("_is_guarded", "_last_needed", "_may_stop", "_metadata", "_recording"),
        *("_site", "_stopped", "_trace"),
    )

    def __init__(self, recording: Recording):
        """Prepare to fill the handles of `recording`."""
        self._cursor = 0
        self._stopped = False
        self._failure: CheckpointError | None = None
        self._trace: Trace | None = None
        self._externals: Externals | None = None
        self._site: CallSite | None = None
        self._recording = recording
        self._handles = recording.handles
        self._metadata = recording.metadata
        self._last_needed = recording.last_needed()
        self._is_guarded = recording.options.guards
        forward = recording.fingerprints
        self._fingerprints = (
            None if forward is None else RecomputedFingerprints(forward)
        )
        self._may_stop = recording.stops_early()

    def run(self) -> None:
        """Run the function again and fill the handles.

        Raises:
            ChangedSinceForwardError: A tensor that the function reads was changed.
            RecomputeMismatchError: A recomputed tensor differs from the saved one.
        """
        recording = self._recording
        surroundings = recording.surroundings
        gradients_were_on = torch.is_grad_enabled()
        scope = Scope()
        try:
            set_grad_enabled(True)
            try:  # A `with` statement would take longer.
                args, kwargs = surroundings.arguments.rebuild()
                surroundings.enter_ambient(scope)
                nested = recording.nested_backward
                self._externals = surroundings.enter_state(scope, nested)
                if recording.trace is not None:
                    self._trace = Trace()
                    scope.enter_context(self._trace)
                if recording.contexts is not None:
                    scope.enter_context(recording.contexts[1])
                if recording.is_new:
                    with surroundings.refusing_silent_writes():
                        self._call(args, kwargs)
                else:
                    self._call(args, kwargs)
            finally:
                scope.close()
            self._check_end()
        finally:
            set_grad_enabled(gradients_were_on)
            self._release()

    def _check_end(self) -> None:
        if self._failure is not None:
            # Raised again, in case the function caught it. A local variable would tie
            # its traceback into a reference cycle.
            raise self._failure
        if not self._stopped:
            self._check_count()
        if self._fingerprints is not None and self._recording.finished:
            self._recording.note_verified(self._fingerprints.waited)

    def _release(self) -> None:
        self._failure = self._trace = None
        del self._recording, self._handles, self._metadata, self._fingerprints

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Run the function once; stop early when every needed tensor is available."""
        push_saved_tensors_hooks(self._pack_hook(), as_it_is)
        try:
            self._recording.function(*args, **kwargs)
            if self._fingerprints is not None:
                self._fingerprints.settle()
                self._compare(self._fingerprints)
        except StopRecompute:
            if not self._stopped:
                raise  # It ends an outer recompute.
        except Exception as error:
            self._judge(error)
        finally:
            pop_saved_tensors_hooks()

    def _judge(self, error: Exception) -> None:
        """Raise an exception of the function, unless it is what stopped it."""
        try:
            # TorchScript's interpreter replaces an exception of a hook by its own.
            if self._failure is not None:
                raise self._failure from None
            if not self._stopped:
                self._recording.blame_state(error)
                raise error
        finally:
            del error  # Its traceback leads here.

    def _pack_hook(self) -> Callable[[Tensor], Tensor | None]:
        if self._recording.nested_backward:
            return self._pack_whole
        if self._fingerprints is not None:
            return self._pack_with_fingerprint
        return RERUN[0].fill_hook(self) if RERUN else self._pack

    def _pack(self, tensor: Tensor) -> None:
        """Fill the next handle with the tensor that autograd is saving.

        Autograd itself receives `None`, because the recompute's graph is never used.
        """
        if tensor.is_nested and self._is_kept(tensor):
            return
        handles = self._handles
        index = self._cursor
        self._cursor = index + 1
        if index < len(handles):  # `_check_count` reports surplus tensors.
            try:  # As in `Recording.pack`.
                made = (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
            except (RuntimeError, NotImplementedError):
                made = metadata(tensor)
            if made != self._metadata[index]:
                self._check(index, made)
            handle = handles[index]()
            if handle is not None:
                handle.tensor = tensor
                try:
                    handle.address = (
                        storage_address(tensor) if self._is_guarded else None
                    )
                    handle.version = tensor._version
                except (RuntimeError, NotImplementedError):
                    handle.mark(tensor)
                if self._externals is not None:
                    self._check_external(handle, self._externals)
        if (
            index >= self._last_needed
            and self._may_stop
            and not fills_what_it_saved(sys._getframe(1))
        ):
            # Unless an operator has yet to fill a tensor it saved.
            if self._fingerprints is None or self._fingerprints.is_filled():
                self._stopped = True
                raise StopRecompute
            self._site = self._site or self._site_now()

    def _pack_with_fingerprint(self, tensor: Tensor) -> None:
        """Fill the next handle, and compare new fingerprints with the forward's."""
        if tensor.is_nested and self._is_kept(tensor):
            return
        self._give_and_compare(tensor, sys._getframe(1))

    def _give_and_compare(self, tensor: Tensor, caller: FrameType) -> None:
        # `_pack` cannot see the caller.
        stops = self._recording.stops_early()
        self._may_stop = stops and not fills_what_it_saved(caller)
        if self._fingerprints is not None:
            self._fingerprints.add_saved_by(naming_frame(caller).f_code, tensor)
            self._compare(self._fingerprints)
        self._pack(tensor)

    def _pack_whole(self, tensor: Tensor) -> Tensor:
        """Fill the next handle, and return the tensor for use by autograd (Rule 7)."""
        # The graph owns the tensor, and the tensor's history would own the graph.
        tensor = tensor.detach()
        self._give_and_compare(tensor, sys._getframe(1))
        return tensor

    def _is_kept(self, nested: Tensor) -> bool:
        return must_keep(nested, self._recording.surroundings.arguments)

    def _check_external(self, handle: RerunHandle, externals: Externals) -> None:
        """Raise if other code changed a storage; clear a restored buffer's version."""
        if handle.address in externals.changed:
            self._failure = changed_error([externals.changed[handle.address]])
            raise self._failure
        if handle.address in externals.restored:
            handle.version = None

    def _check(self, index: int, made: Metadata) -> None:
        if self._recording.options.determinism_check == "none":
            return
        saved = self._metadata[index]
        if not same_metadata(saved, made):
            self._fail(index, describe(saved), describe(made), saved, made)

    def _compare(self, fingerprints: RecomputedFingerprints) -> None:
        """Raise if the bytes of a recomputed tensor differ from the forward's."""
        index = fingerprints.difference()
        if index is not None:
            data = self._metadata[index]
            text = describe(data)
            self._fail(index, text, f"{text}, with other values in it", data, data)

    def _fail(
        self, index: int, saved: str, made: str, before: Metadata, now: Metadata
    ) -> None:
        site = self._site or self._site_now()
        causes = self._causes(before, now)
        self._failure = mismatch_error(index, site, saved, made, causes, self._traces())
        raise self._failure

    def _site_now(self) -> CallSite:
        names = module_names(self._recording.function, self._recording.label)
        return CallSite(calling_frame(), names)

    def _check_count(self) -> None:
        recording = self._recording
        if not recording.finished or recording.options.determinism_check == "none":
            return
        if self._cursor != len(recording.handles):
            saved, made = f"{len(recording.handles)} tensors", f"{self._cursor} tensors"
            causes = self._causes(None, None)
            raise mismatch_error(None, None, saved, made, causes, self._traces())

    def _causes(self, saved: Metadata | None, made: Metadata | None) -> list[str]:
        recording = self._recording
        reads = recording.surroundings.reads
        grown = () if reads is None else reads.grown
        return likely_causes(recording.function, grown, recording.options, saved, made)

    def _traces(self) -> str:
        return side_by_side(self._recording.trace, self._trace)


def as_it_is(tensor: Tensor) -> Tensor:
    """Return what autograd was given: the unpack hook of a recompute."""
    return tensor
