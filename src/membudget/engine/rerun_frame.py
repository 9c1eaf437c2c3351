"""One call of a rerun region: run the function and drop its saved tensors.

While the function runs, the `pack` hook returns a `RerunHandle` for each tensor that
autograd would save, so that the tensor is freed. When the backward pass unpacks a
handle, a `Rerun` fills all live handles. The module `region` lists the engine's rules.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NoReturn

from torch import Tensor

from membudget._torch import (
    may_read_bytes,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    storage_address,
)
from membudget.engine import isolation
from membudget.engine.arguments import packed_arguments
from membudget.engine.comparison import Fingerprints
from membudget.engine.controls import RECOMPUTING
from membudget.engine.groups import OPEN_GROUPS, release_in_time
from membudget.engine.isolation import DrawRecorder
from membudget.engine.messages import mismatch_error, overwritten_error
from membudget.engine.native import RERUN
from membudget.engine.recording import Recording, RerunHandle, Trace
from membudget.engine.rerun import Rerun
from membudget.errors import CheckpointError
from membudget.scope import Scope


class RerunFrame(Recording):
    """A recorded call with the hooks that autograd calls to pack and unpack tensors."""

    __slots__ = ()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and drop the tensors that autograd would save."""
        if RERUN:
            return RERUN[0].run(self, args, kwargs)
        calls = self.calls
        is_due = calls is not None and calls.begin(self.options.verify is True)
        return self._run_begun(args, kwargs, is_due)

    def _run_begun(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_due: bool
    ) -> Any:
        calls, surroundings = self.calls, self.surroundings
        if self.options.offload is not None:
            hooks = self.options.offload.hooks
            surroundings.arguments = packed_arguments(args, kwargs, hooks)
        if calls is not None:
            if is_due and self._may_verify():
                self.fingerprints = Fingerprints()
                surroundings.begin_check()
            self.holds = self.fingerprints is not None or calls.owner.differentiates
        if (
            self.holds
            or self.options.is_instrumented
            or surroundings.random_log is not None
        ):
            result = self._run_in_contexts(args, kwargs)
        else:
            result = self._run_hooked(args, kwargs)
        if self.handles:
            surroundings.finish(calls)
            if calls is not None:
                self.nested_backward |= calls.owner.adds_gradients
                if calls.paths.get(len(self.metadata)) != self.metadata:
                    self._note_new()
        if self.holds:
            self.empty()
        self.finished = True
        return result

    def _note_new(self) -> None:
        """Note saved tensors that the last call with as many did not have."""
        if self.calls is not None and self.calls.end(self.metadata):
            self.is_new = self.fingerprints is None and self._may_verify()

    def _may_verify(self) -> bool:
        """Return whether this call of the region can be verified.

        No call inside a recompute can be verified: no backward unpacks its tensors.
        """
        return get_ident() not in RECOMPUTING and may_read_bytes()

    def _run_in_contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function under the observers and contexts that its options need."""
        options = self.options
        with Scope() as scope:
            if self.surroundings.random_log is not None:
                scope.enter_context(DrawRecorder(self.surroundings.random_log))
            if options.debug:
                self.trace = Trace()
                scope.enter_context(self.trace)
            if options.context_fn is None:
                return self._run_hooked(args, kwargs)
            self.contexts = options.context_fn()
            with self.contexts[0]:
                return self._run_hooked(args, kwargs)
        raise CheckpointError(
            "the forward context of context_fn swallowed an exception of the function: "
            "a context of a region must let exceptions pass"
        )

    def _run_hooked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pack = self.pack
        if self.options.determinism_check == "values":
            self.fingerprints = Fingerprints()
        if self.fingerprints is not None or self.holds:
            pack = self.pack_checked
        push_saved_tensors_hooks(pack, self._unpack)
        try:
            return self.function(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            if self.fingerprints is not None:
                self.fingerprints.settle()

    def _unpack(self, handle: RerunHandle) -> Tensor:
        finished = self.finished
        if not finished:  # An unpack during the forward.
            self.note_backward_inside()
        tensor = handle.tensor
        if tensor is None:
            tensor = self._recomputed(handle)
        version, address = handle.version, handle.address
        # `y.data =` exchanges the storage.
        if (version is not None and tensor._version != version) or (
            address is not None and storage_address(tensor) != address
        ):
            raise overwritten_error(f"a saved tensor of shape {tuple(tensor.shape)}")
        if not OPEN_GROUPS and (finished or not self.holds):
            handle.tensor = None  # Rule 3.
        return tensor

    def note_backward_inside(self) -> None:
        """Record that the function itself runs a backward pass (Rule 7)."""
        # Replay regions inside this region call it, too.
        self.nested_backward = True
        if self.calls is not None:
            self.calls.owner.differentiates = True

    def _recomputed(self, handle: RerunHandle) -> Tensor:
        with self.lock:
            tensor = handle.tensor  # Another thread may have filled the handle by now.
            if tensor is None:
                self._recompute()
                tensor = handle.tensor
                # With one handle nothing is left over to be freed.
                if len(self.handles) > 1 and not release_in_time(self):
                    self.empty()
        if tensor is None:
            self._missing()
        return tensor

    def _missing(self) -> NoReturn:
        raise mismatch_error(
            None,
            None,
            f"{len(self.handles)} tensors",
            "fewer tensors, and not the one that is needed",
            ["determinism_check='none' hides where the runs diverge"],
        )

    def release(self) -> None:
        """Free the recomputed tensors that autograd has not unpacked (Rule 4).

        The lock keeps the end of one thread's backward pass from emptying handles that
        another thread's recompute has just filled.
        """
        with self.lock:
            self.empty()

    def recompute(self) -> None:
        """Recompute all dropped tensors now, for use in the next backward pass."""
        with self.lock:
            if self.last_needed() >= 0:
                self._recompute()

    def _recompute(self) -> None:
        if self.statistics is not None:
            self.statistics.recomputes += 1
        counted = self.options.guards and isolation.enter()
        me = get_ident()
        RECOMPUTING.append(me)
        try:
            self.surroundings.run_in_context(Rerun(self).run)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            RECOMPUTING.remove(me)
            if counted:
                isolation.leave()

    def _give_up(self, error: BaseException) -> None:
        # A retry must not mix tensors of two recomputes.
        self.empty()
        if isinstance(error, CheckpointError):
            self.blame(error)
