"""Switches that apply to a block of code in one thread.

Each is an attribute of one `threading.local`, so that reading one is cheap. A region
reads them once, in its forward: a switch belongs to the forward, not to the backward
pass that comes later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Switches(threading.local):
    """The switches of this thread; class attributes are the defaults.

    Attributes:
        any: Whether any other may differ from its default; in most calls, a region
            reads only this one.
    """

    any: bool = False
    disabled: bool = False
    early_stop: bool | None = None
    debug: bool | None = None
    collector: Callable[[Any], None] | None = None


SWITCHES = _Switches()

# The identities of threads inside a recompute, once per nesting level. Appending and
# removing costs half as much as counting in a `threading.local`.
RECOMPUTING: list[int] = []


@contextmanager
def _switched(name: str, value: object) -> Iterator[None]:
    before, any_before = getattr(SWITCHES, name), SWITCHES.any
    setattr(SWITCHES, name, value)
    SWITCHES.any = True
    try:
        yield
    finally:
        setattr(SWITCHES, name, before)
        SWITCHES.any = any_before


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run regions as plain code in this thread: nothing is dropped or recomputed.

    Example:
        >>> import membudget as mb, torch
        >>> with mb.disable_checkpointing():
        ...     y = mb.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    """
    with _switched("disabled", True):
        yield


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Enable or disable early stop for the regions entered here, in this thread.

    Overrides the argument `early_stop`, and belongs to the forward: the recompute of a
    region follows the setting under which the region ran.

    Args:
        enable: Whether a recompute stops once the last needed tensor is computed.
    """
    with _switched("early_stop", enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Enable or disable debugging for the regions entered here, in this thread.

    Args:
        enabled: Overrides the argument `debug` of regions; `None` leaves it.
    """
    with _switched("debug", enabled):
        yield


def is_recomputing() -> bool:
    """Tell whether the calling code runs in the recompute of a region.

    Use it to guard side effects that must happen once per step, such as appending to a
    list of auxiliary losses:

    Example:
        >>> import membudget as mb
        >>> if not mb.is_recomputing():
        ...     pass  # log, count, append
    """
    return threading.get_ident() in RECOMPUTING
