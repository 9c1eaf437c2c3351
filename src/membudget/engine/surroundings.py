"""Everything a call of a region depends on: recorded before it, restored later.

This implements Rules 5 and 6, for both variants of rerun: arguments, random sources,
ambient state, and what the function can reach. `Surroundings` gives the guarantees of
torch's own checkpoint; `GuardedSurroundings` all of the rules. What is restored lasts
until a `Scope` ends. The caller enables gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from membudget._torch import is_any_autocast_enabled, without_modes
from membudget.engine import isolation
from membudget.engine.ambient import Ambient, Autocast, enter_autocast
from membudget.engine.arguments import HeldArguments
from membudget.engine.calls import Calls
from membudget.engine.changes import Contents, name_of, names_of, silently_written_error
from membudget.engine.isolation import RandomLog
from membudget.engine.options import RegionOptions
from membudget.engine.reach import Reached, reach
from membudget.engine.reads import Externals, Reads
from membudget.scope import Scope
from membudget.state.rng import (
    Noted,
    bring_back,
    global_sources,
    note,
    private_sources,
    torch_sources,
)


class Surroundings:
    """Arguments, torch's random streams and autocast of one call.

    Attributes:
        arguments: Its arguments.
        reads: What else it could read; `None` if nothing, or without guards.
        needs_repair: Whether it can reach running statistics that it will write,
            private generators, TorchScript or lazy modules, whose state a replay need
            not restore.
        runs_torchscript: Whether it can reach traced or scripted code. TorchScript
            compiles a function by what its earlier runs have seen, so a second run may
            save other tensors than the first.
        is_lazy: Whether it can reach parameters that its forward will initialise.
        trainable: Whether it can reach a tensor that requires a gradient; only the
            reentrant variant reads this.
        random_log: The random operators, where several threads run regions.
    """

    reads: Reads | None = None
    trainable = True
    random_log: RandomLog | None = None
    needs_repair = False
    runs_torchscript = False
    is_lazy = False

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        """Record the state; the function has not run yet."""
        self.arguments = arguments = HeldArguments(args, kwargs)
        self._autocast = Autocast() if is_any_autocast_enabled() else None
        self._noted: Noted = (
            note(torch_sources(arguments.cuda_devices))
            if options.preserve_rng_state
            else []
        )

    def begin_check(self) -> None:
        """Prepare to find what the function writes behind the version counters."""

    def finish(self, calls: Calls | None = None) -> None:
        """Find out, after the function ran, what it changed itself.

        Args:
            calls: The history of the function's calls, which is updated.
        """

    def run_in_context(self, body: Callable[[], None]) -> None:
        """Call `body` with the context variables of the forward."""
        body()

    def enter_ambient(self, scope: Scope) -> None:
        """Restore random sources, modes and settings until `scope` ends."""
        if self._autocast is not None or is_any_autocast_enabled():
            enter_autocast(self._autocast, scope)
        bring_back(self._noted, scope)

    def enter_state(
        self, scope: Scope, hide_gradients: bool = False
    ) -> Externals | None:
        """Restore buffers, attributes and flags until `scope` ends.

        Args:
            scope: Where undoing is registered.
            hide_gradients: Whether the function runs a backward of its own, whose
                gradients must not be accumulated again.

        Returns:
            The storages that differ from the forward, if any.
        """
        return None

    def refusing_silent_writes(self) -> AbstractContextManager[None]:
        """Return a context that raises on exit if a recompute wrote memory unseen."""
        return nullcontext()


class GuardedSurroundings(Surroundings):
    """The whole state that one call of a region saw."""

    _is_checked = False

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        """Record the state; the function has not run yet."""
        self._function = function
        self._autocast = Autocast() if is_any_autocast_enabled() else None
        self._ambient = Ambient()
        self.arguments = arguments = HeldArguments(args, kwargs)
        reached = reach(function, arguments.others)
        if reached.needs_repair():
            self.needs_repair = True
            self.runs_torchscript = reached.runs_torchscript
            self.is_lazy = reached.is_lazy
        if options.use_reentrant:
            self.trainable = any(t.requires_grad for t in reached.tensors)
        if reached.holds_state():
            self.reads = Reads(reached)
        self._noted = []
        if options.preserve_rng_state:
            shared = isolation.is_shared()
            if shared:
                self.random_log = RandomLog()
            self._noted = note(global_sources(not shared))
            if reached.generators:
                self._noted += note(private_sources(reached.generators, not shared))

    def begin_check(self) -> None:
        """Prepare to find what the function writes behind the version counters."""
        self._is_checked = True
        with without_modes():
            self.arguments.begin_check()
            if self.reads is not None:
                self.reads.begin_check()

    def finish(self, calls: Calls | None = None) -> None:
        """Find out, after the function ran, what it changed itself."""
        if self.reads is not None:
            self.reads.finish(calls)
        for held in self.arguments.tensors:
            held.note_forward_end()
        if self._is_checked:
            with without_modes():
                self.arguments.end_check()

    def run_in_context(self, body: Callable[[], None]) -> None:
        """Call `body` with the context variables of the forward."""
        # Copied, because one context cannot be entered twice at a time.
        self._ambient.context.copy().run(body)

    def enter_ambient(self, scope: Scope) -> None:
        """Restore random sources, modes and settings until `scope` ends."""
        if self._noted and self.random_log is None and isolation.is_shared():
            # This forward ran before a second thread did.
            scope.enter_context(isolation.OPERATOR_LOCK)
        super().enter_ambient(scope)
        self._ambient.enter(scope)
        if self.random_log is not None:
            scope.enter_context(self.random_log.player())

    def enter_state(
        self, scope: Scope, hide_gradients: bool = False
    ) -> Externals | None:
        """Restore buffers, attributes and flags until `scope` ends."""
        reads = self.reads
        if reads is None:
            if not self.arguments.changed():
                return None
            reads = Reads(Reached())
        return reads.enter(scope, self._function, self.arguments, hide_gradients)

    @contextmanager
    def refusing_silent_writes(self) -> Iterator[None]:
        """Fingerprint what a recompute reads and does not restore, before and after.

        Raises:
            ChangedSinceForwardError: Some of it was written without a version bump; the
                error names it.
        """
        given = [held.given() for held in self.arguments.tensors]
        found = [] if self.reads is None else self.reads.not_put_back()
        contents = Contents([*found, *(t for t in given if t is not None)])
        yield
        if written := contents.silently_written():
            names = names_of(self._function, self.arguments.others)
            raise silently_written_error(
                [name_of(t, names) for t in written], by_recompute=True
            )
