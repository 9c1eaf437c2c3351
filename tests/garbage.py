"""Tell what lives on only because the garbage collector has not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

from torch import Tensor

from tests.devices import settle


@contextmanager
def no_collector() -> Iterator[None]:
    """Switch the garbage collector off, so that only reference counts free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cyclic_garbage() -> list[object]:
    """Return what only the garbage collector could free and membudget has to do with.

    Called with the collector off, after what made the garbage has returned.
    """
    settle()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [thing for thing in gc.garbage if _is_ours(thing)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


def is_made_by_a_region(thing: object) -> bool:
    """Return whether an object is of a type of the engines."""
    return module_of(thing).startswith("membudget.engine")


def module_of(thing: object) -> str:
    """Return the module of an object's type."""
    # A metaclass of Cython's gives no string.
    return str(type(thing).__module__)


def _is_ours(thing: object) -> bool:
    if isinstance(thing, Tensor):
        return True
    if isinstance(thing, FrameType):
        return str(thing.f_globals.get("__name__")).startswith("membudget")
    if isinstance(thing, FunctionType):
        return thing.__module__.startswith("membudget")
    return module_of(thing).startswith("membudget")
