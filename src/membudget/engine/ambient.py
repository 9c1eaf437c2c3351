"""Ambient state: what changes a call's result although it is not an argument.

A recompute happens later, inside a backward pass, perhaps in another thread. It needs
the ambient state of the forward: autocast with its dtypes and cache, the stacks of
function and dispatch modes, the default device and dtype, context variables, and the
settings that choose kernels (`sdpa_kernel`, mkldnn, cuDNN, precisions, determinism).

Usually nothing has changed by then, so the forward records the state as cheaply as it
can, and the recompute restores only what differs.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch

from membudget import _torch, _torch_settings
from membudget.scope import Scope


class Autocast:
    """The state of autocast: enabled and dtype per device type, and the cache flag."""

    __slots__ = ("_by_device", "_cache")

    def __init__(self) -> None:
        """Read the state."""
        self._cache = torch.is_autocast_cache_enabled()
        self._by_device = {
            device: (
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            for device in _device_types()
        }

    def _enter(self, scope: Scope) -> None:
        for device, (enabled, dtype) in self._by_device.items():
            scope.enter_context(
                torch.autocast(
                    device, dtype=dtype, enabled=enabled, cache_enabled=self._cache
                )
            )


def enter_autocast(state: Autocast | None, scope: Scope) -> None:
    """Restore a state of autocast, `None` for off, until `scope` ends."""
    if state is not None:
        state._enter(scope)
    else:
        for device in _device_types():
            scope.enter_context(torch.autocast(device, enabled=False))


def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class Ambient:
    """Modes, settings and context variables of a forward."""

    __slots__ = ("context", "dispatch_modes", "function_modes", "settings")

    def __init__(self) -> None:
        """Record the current state."""
        self.function_modes = (
            _torch.function_modes() if _torch.function_mode_count() else ()
        )
        self.dispatch_modes = (
            _modes_of_the_user() if _torch.dispatch_mode_count() else ()
        )
        self.settings = _torch_settings.read()
        self.context = contextvars.copy_context()

    def enter(self, scope: Scope) -> None:
        """Restore what differs now, until `scope` ends."""
        self.enter_settings(scope)
        if self.function_modes or _torch.function_mode_count():
            self._enter_function_modes(scope)
        if self.dispatch_modes:
            # A mode that is active only around the backward stays: a user who counts
            # operators there wants to see the recompute.
            _enter_missing(scope, self.dispatch_modes, _torch.dispatch_modes())

    def enter_for_operators(self, scope: Scope) -> None:
        """Restore what operators depend on, where no user code runs."""
        self.enter_settings(scope)
        if self.dispatch_modes:
            _enter_missing(scope, self.dispatch_modes, _torch.dispatch_modes())

    def enter_settings(self, scope: Scope) -> None:
        """Restore settings that differ now, until `scope` ends."""
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
    """Record the conditions on which operators depend; return what restores them."""
    ambient = Ambient()
    if not torch.cuda.is_initialized():
        return ambient.enter_for_operators
    stream = torch.cuda.current_stream()

    def enter(scope: Scope) -> None:
        ambient.enter_for_operators(scope)
        scope.enter_context(torch.cuda.stream(stream))

    return enter


def _modes_of_the_user() -> tuple[Any, ...]:
    """Return the dispatch modes that are not the engine's."""
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
