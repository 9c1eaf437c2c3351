"""Record everything a region's call depends on, and restore it for a recompute.

This module implements Rules 5 and 6 for default and reentrant reruns: it covers
arguments, random generators, reachable objects, and *ambient* state. Ambient state is
autocast with its dtypes and cache, the stacks of function and dispatch modes, the
default device and dtype, context variables, and the settings that select kernels
(`sdpa_kernel`, mkldnn, cuDNN, precisions, determinism).

A recompute runs later, inside a backward pass and possibly in another thread. State
rarely changes between forward and recompute, so the forward records it as cheaply as
possible, and the recompute restores only what differs, until a `Scope` ends. The caller
of the recompute sets the gradient mode.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from membudget import _torch, _torch_settings
from membudget._torch import is_any_autocast_enabled, without_modes
from membudget._torch_accelerator import (
    check_repeatable,
    current_stream,
    enter_stream,
)
from membudget.engine import isolation
from membudget.engine.arguments import HeldArguments
from membudget.engine.calls import Calls
from membudget.engine.comparison import Contents
from membudget.engine.isolation import DrawPlayer
from membudget.engine.messages import name_of, names_of, silently_written_error
from membudget.engine.options import RegionOptions
from membudget.engine.reach import NOTHING, Reached, reach
from membudget.engine.reads import Externals, Reads
from membudget.scope import Scope
from membudget.state.autocast import Autocast, enter_autocast
from membudget.state.rng import (
    Noted,
    Sources,
    bring_back,
    global_sources,
    note,
    private_sources,
    torch_sources,
)


class Ambient:
    """Modes, settings and context variables that were active in a forward."""

    __slots__ = ("context", "dispatch_modes", "function_modes", "settings")

    def __init__(self) -> None:
        """Record the current modes, settings and context variables."""
        self.function_modes = (
            _torch.function_modes() if _torch.function_mode_count() else ()
        )
        self.dispatch_modes = (
            _modes_of_the_user() if _torch.dispatch_mode_count() else ()
        )
        self.settings = _torch_settings.read()
        self.context = contextvars.copy_context()

    def enter(self, scope: Scope) -> None:
        """Restore modes and settings changed since the forward, until `scope` ends."""
        self.enter_settings(scope)
        if self.function_modes or _torch.function_mode_count():
            self._enter_function_modes(scope)
        if self.dispatch_modes:
            # A mode that is active only around the backward stays: a user who counts
            # operators there wants to see the recompute.
            _enter_missing(scope, self.dispatch_modes, _torch.dispatch_modes())

    def enter_for_operators(self, scope: Scope) -> None:
        """Restore settings and dispatch modes, for operators run without user code."""
        self.enter_settings(scope)
        if self.dispatch_modes:
            _enter_missing(scope, self.dispatch_modes, _torch.dispatch_modes())

    def enter_settings(self, scope: Scope) -> None:
        """Restore settings that have changed since the forward, until `scope` ends."""
        now = _torch_settings.read()
        if now != self.settings:
            _torch_settings.bring_back(self.settings, now, scope.callback)

    def _enter_function_modes(self, scope: Scope) -> None:
        active = _torch.function_modes()
        if active == self.function_modes:
            return
        had_device = any(map(_torch.is_device_context, self.function_modes))
        if not had_device and any(map(_torch.is_device_context, active)):
            # The backward runs under a default device, the forward did not.
            scope.enter_context(torch.device("cpu"))
        _enter_missing(scope, self.function_modes, active)


def operator_conditions() -> Callable[[Scope], None]:
    """Record the state that operators depend on; return a function to restore it."""
    ambient = Ambient()
    stream = current_stream()
    if stream is None:
        return ambient.enter_for_operators

    def enter(scope: Scope) -> None:
        ambient.enter_for_operators(scope)
        enter_stream(stream, scope)

    return enter


def _modes_of_the_user() -> tuple[Any, ...]:
    """Return the active dispatch modes that do not belong to membudget."""
    return tuple(
        mode
        for mode in _torch.dispatch_modes()
        if not isinstance(mode, _torch.DispatchMode)
    )


def _enter_missing(
    scope: Scope, wanted: tuple[Any, ...], active: tuple[Any, ...]
) -> None:
    present = {id(mode) for mode in active}
    for mode in wanted:
        if id(mode) not in present:
            scope.enter_context(mode)


class Surroundings:
    """The state that one region call depends on; `guards=False` records only a part.

    Attributes:
        arguments: The arguments of the call.
        reads: State, besides arguments, that the function can read; only with `guards`.
        needs_repair: Whether the function can reach running statistics in training,
            user-created generators, TorchScript or lazy modules, which a second run may
            change.
        runs_torchscript: Whether the function can reach traced or scripted code.
            TorchScript recompiles a function after its first few runs, so a second run
            may save different tensors.
        is_lazy: Whether the function can reach uninitialised parameters.
        trainable: Whether the function can reach a tensor that requires a gradient;
            used only by the reentrant variant.
        random_log: Generator state before each random operator; recorded only if
            several threads run regions.
    """

    __slots__ = (
        *("_ambient", "_autocast", "_function", "_is_checked", "_noted", "_private"),
        *("_sources", "_stream", "arguments", "is_lazy", "needs_repair", "random_log"),
        *("reads", "runs_torchscript", "trainable"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        """Record the state before the function runs."""
        self.reads: Reads | None = None
        self.trainable = True
        self.random_log: list[Tensor] | None = None
        self.needs_repair = self.runs_torchscript = self.is_lazy = False
        self._is_checked = False
        self._ambient: Ambient | None = None  # Only with guards.
        # The global generators with their states, and the states of generators that
        # users created.
        self._sources: Sources | None = None
        self._noted: Noted = []
        self._private: Noted | None = None
        self._autocast = Autocast() if is_any_autocast_enabled() else None
        # On which the forward begins; `None` without an accelerator.
        self._stream = current_stream()
        if not options.guards:
            self.arguments = arguments = HeldArguments(args, kwargs)
            if options.preserve_rng_state:
                devices = () if self._stream is None else arguments.devices()
                self._sources = sources = torch_sources(devices)
                self._noted = sources.note()
            return
        self._function = function
        self._ambient = Ambient()
        self.arguments = arguments = HeldArguments(args, kwargs)
        reached = reach(function, arguments.others)
        if options.use_reentrant:
            self.trainable = any(t.requires_grad for t in reached.tensors)
        if reached is not NOTHING:
            self._note_reached(reached)
        if options.preserve_rng_state:
            shared = isolation.is_shared()
            if shared:
                self.random_log = []
            if self._stream is not None:  # To ask for the devices takes 3 µs.
                check_repeatable(arguments.devices())
            self._sources = sources = global_sources(not shared)
            self._noted = sources.note()
            if reached.generators:
                self._private = note(private_sources(reached.generators, not shared))

    def _note_reached(self, reached: Reached) -> None:
        if reached.needs_repair():
            self.needs_repair = True
            self.runs_torchscript = reached.runs_torchscript
            self.is_lazy = reached.is_lazy
        if reached.holds_state():
            self.reads = Reads(reached)

    def begin_check(self) -> None:
        """Fingerprint arguments and reachable tensors before the function runs."""
        self._is_checked = True
        with without_modes():
            self.arguments.begin_check()
            if self.reads is not None:
                self.reads.begin_check()

    def finish(self, calls: Calls | None = None) -> None:
        """Detect what the function changed in the forward; update its call history."""
        if self._ambient is None:
            return
        if self.reads is not None:
            self.reads.finish(self._function, self.arguments.others, calls)
        for held in self.arguments.tensors:
            held.note_forward_end()
        if self._is_checked:
            with without_modes():
                self.arguments.end_check()

    def run_in_context(self, body: Callable[[], None]) -> None:
        """Call `body` with the forward's context variables."""
        if self._ambient is None:
            body()
        else:
            # Copied, because one context cannot be entered twice at a time.
            self._ambient.context.copy().run(body)

    def enter_ambient(self, scope: Scope) -> None:
        """Restore stream, random generators, modes and settings until `scope` ends."""
        if self._stream is not None:
            # First, so that what else is restored is written on the forward's stream.
            enter_stream(self._stream, scope)
        ambient, sources, log = self._ambient, self._sources, self.random_log
        # True if the forward ran before a second thread entered regions.
        unlogged = ambient is not None and sources is not None and log is None
        if unlogged and isolation.is_shared():
            scope.enter_context(isolation.OPERATOR_LOCK)
        if self._autocast is not None or is_any_autocast_enabled():
            enter_autocast(self._autocast, scope)
        if sources is not None:
            sources.enter(self._noted, scope)
        if self._private is not None:
            bring_back(self._private, scope)
        if ambient is not None:
            ambient.enter(scope)
        if log is not None:
            scope.enter_context(DrawPlayer(log))

    def enter_state(
        self, scope: Scope, hide_gradients: bool = False
    ) -> Externals | None:
        """Restore buffers and module attributes; return changed and restored storages.

        With `hide_gradients`, `.grad` is unset during the recompute, so that a backward
        pass run by the function does not accumulate gradients again.
        """
        reads = self.reads
        if reads is None:
            if self._ambient is None or not self.arguments.changed():
                return None
            reads = Reads(Reached())
        return reads.enter(scope, self._function, self.arguments, hide_gradients)

    @contextmanager
    def refusing_silent_writes(self) -> Iterator[None]:
        """Raise if the block writes to an unrestored tensor without a version bump.

        Raises:
            ChangedSinceForwardError: A tensor was written to without a version bump.
        """
        given = [held.given() for held in self.arguments.tensors]
        found = [] if self.reads is None else self.reads.not_restored()
        contents = Contents([*found, *(t for t in given if t is not None)])
        yield
        if written := contents.silently_written():
            names = names_of(self._function, self.arguments.others)
            raise silently_written_error(
                [name_of(t, names) for t in written], by_recompute=True
            )
