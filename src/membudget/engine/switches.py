"""Switches that hold for a stretch of code in one thread.

Each is a slot of one `threading.local`, so that reading one costs an attribute. A
region reads them once, in its forward: a switch belongs to the forward, not to the
backward that comes later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Switches(threading.local):
    """What holds in this thread; class attributes are the defaults.

    Attributes:
        any: Whether any of the others may differ from its default: all that a region
            must ask in the rule.
    """

    any: bool = False
    disabled: bool = False
    early_stop: bool | None = None
    debug: bool | None = None
    collector: Callable[[Any], None] | None = None


SWITCHES = _Switches()

# The identities of threads that are inside of a recompute, once for each level. Adding
# and removing one is half as dear as counting in a `threading.local`.
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
    """Switch early stop on or off for the regions entered here, in this thread.

    It wins over the argument `early_stop` and belongs to the forward: the recompute
    of a region follows what held when the region ran.

    Args:
        enable: Whether a recompute stops once the last tensor that is needed is made.
    """
    with _switched("early_stop", enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Switch debugging on or off for the regions entered here, in this thread.

    Args:
        enabled: Wins over the argument `debug` of regions; `None` leaves it to that.
    """
    with _switched("debug", enabled):
        yield


def is_recomputing() -> bool:
    """Tell whether the code that asks runs in the recompute of a region.

    Use it to guard side effects that must happen once a step, such as appending to a
    list of auxiliary losses:

    Example:
        >>> import membudget as mb
        >>> if not mb.is_recomputing():
        ...     pass  # log, count, append
    """
    return threading.get_ident() in RECOMPUTING
