"""Record and restore the state of autocast, for every device type of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from membudget._torch import is_any_autocast_enabled
from membudget.scope import Scope


class Autocast:
    """Autocast state: enabled flag and dtype per device type, and the cache flag."""

    __slots__ = ("_by_device", "_cache")

    def __init__(self) -> None:
        """Record the current autocast state."""
        self._cache = torch.is_autocast_cache_enabled()
        self._by_device = {
            device: (
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            for device in device_types()
        }

    def enter(self, scope: Scope) -> None:
        """Restore the recorded autocast state until `scope` ends."""
        for device, (enabled, dtype) in self._by_device.items():
            context = torch.autocast(device, dtype, enabled, self._cache)
            scope.enter_context(context)


def enter_autocast(state: Autocast | None, scope: Scope) -> None:
    """Restore an autocast state (`None` means disabled) until `scope` ends."""
    if state is not None:
        state.enter(scope)
    else:
        for device in device_types():
            scope.enter_context(torch.autocast(device, enabled=False))


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return whether autocast is enabled, and for which dtype, on each device type.

    It is empty outside of autocast.
    """
    if not is_any_autocast_enabled():
        return ()
    return tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in device_types()
    )


def clear_casts() -> None:
    """Drop the casts of parameters that autocast has cached, if it caches them.

    Where the cache is off, what it holds was cached before, by somebody who goes on to
    use it.
    """
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


@contextmanager
def casts_kept() -> Iterator[None]:
    """Cache no casts inside, and leave those that are cached as they are.

    Two forwards in one autocast context share the casts of their parameters, so that
    gradients are added in the lower precision: dropping casts would change their bits.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def device_types() -> tuple[str, ...]:
    """Return the device types of this machine that have an autocast state."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable autocast inside, and drop the casts of parameters that it has cached.

    A training loop leaves autocast, which drops these casts, before its backward pass.
    """
    if not is_any_autocast_enabled():
        yield
        return
    clear_casts()
    with Scope() as scope:
        enter_autocast(None, scope)
        yield
