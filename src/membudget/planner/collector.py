"""Hold Python's garbage collector off while plans are made.

Planning makes many objects, and no cycles. A collection that they trigger looks through
all objects of the process, which takes 0.3 s where libraries of models are imported,
and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect no cycles in the context, in any thread; it may be entered again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
