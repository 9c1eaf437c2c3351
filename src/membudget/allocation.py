"""Recognise the exceptions by which torch says that an allocation failed."""

from __future__ import annotations

import torch

# The CPU's allocator raises a plain RuntimeError; there is nothing but its text.
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports a failed allocation, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _TEXTS)
