"""Failed allocations: recognise them, free what they hold, and make them rarer.

glibc serves a block of up to 32 MiB from its heap, once a block of that size was freed.
An aligned block, as torch asks for, then does not fit where one of the same size was
freed: the heap grows by up to the bytes that a step allocates in all, and a process
under a limit (`ulimit -v`) runs out of address space at half of it. So under a limit
each block is mapped by itself, and returned to the system as soon as it is freed.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from membudget.errors import MembudgetError, OutOfMemoryError

# `errors.py` must not import torch, whose error a handler for any device expects.
OutOfMemoryError.__bases__ = (MembudgetError, torch.OutOfMemoryError)

# The CPU's allocator raises a plain RuntimeError; there is nothing but its text.
_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory: you tried",
    "std::bad_alloc",
    "could not create a primitive",  # Of oneDNN, whose kernels are compiled in memory.
)

_NOTE = "membudget: "
"""How our notes begin."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # In malloc.h.
_LEAST_MAPPED_BYTES = 128 * 1024
"""glibc's own threshold, until a larger block is freed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports a failed allocation, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _TEXTS)


def note_shortage(error: BaseException, text: str | Callable[[], str]) -> None:
    """Add a note of ours to an error, if it reports a failed allocation and has none.

    A note that cannot be written, for want of memory or for any other reason, is left
    out: nothing takes the place of the error.
    """
    notes = getattr(error, "__notes__", ())
    if is_out_of_memory(error) and not any(n.startswith(_NOTE) for n in notes):
        with suppress(Exception):
            error.add_note(_NOTE + (text if isinstance(text, str) else text()))


def let_go(error: BaseException) -> None:
    """Free the tensors of a step that ran out of memory, if this is such an error.

    The traceback refers to the frames of the step, and those to its tensors. While they
    live, there may not be the memory to restore what the step has changed.
    """
    if is_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)


@contextmanager
def without_shortage() -> Iterator[None]:
    """Leave the context, without an error, where an allocation fails in it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def map_blocks_if_limited() -> bool:
    """Make glibc return freed blocks to the system, if the process's memory is limited.

    So it is if there is a limit on its address space or its data. From then on, blocks
    of 128 KiB and more are mapped, for as long as the process lives, because the steps
    of the training run under the same limit. The price is a page fault for each 4 KiB
    that a new block is written to.

    Returns:
        Whether blocks are mapped so.
    """
    if not _is_limited():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _LEAST_MAPPED_BYTES)
    libc.malloc_trim(0)
    return True


def _is_limited() -> bool:
    if sys.platform != "linux":
        return False
    import resource  # Windows has no such module.

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(n)[0] != resource.RLIM_INFINITY for n in limits)
