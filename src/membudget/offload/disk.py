"""A file that takes bytes for which the host has no room.

It has its full size from the beginning and no name, so that nothing is left of it
whichever way the process ends. Where the system can, reads and writes bypass its cache
of files, which would take the host memory that is to be saved.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

from membudget.errors import OptionError
from membudget.offload.extents import Extent, Extents
from membudget.text import format_bytes

BLOCK = 4096
"""Addresses, offsets and sizes of uncached reads and writes are multiples of this."""

CHUNK = 1 << 22
"""Bytes of one read or write."""

_NEEDED = ("posix_fallocate", "preadv", "pwrite")
"""Functions of `os` that not every system has: Windows lacks all, macOS the first."""


class Disk:
    """A file of an exact size, cut into parts.

    Attributes:
        size: Its bytes.
    """

    def __init__(self, size: int, folder: str | None):
        """Make the file in a folder, by default that of temporary files.

        Raises:
            OptionError: If the folder cannot be written to, or has not that much room,
                or the system lacks a function that is needed.
        """
        missing = [name for name in _NEEDED if not hasattr(os, name)]
        if missing:
            raise OptionError(
                f"disk= needs os.{missing[0]}, which Python lacks on {sys.platform}: "
                "leave disk= out, and give more host memory"
            )
        self.size = size
        self._extents = Extents(BLOCK)
        self._extents.add(0, size // BLOCK * BLOCK)
        self._lock = Lock()
        where = folder or tempfile.gettempdir()
        try:
            self._descriptor = _without_name(where)
            finalize(self, os.close, self._descriptor)
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise OptionError(
                f"no file of {format_bytes(size)} can be made in {where!r} for "
                f"offloaded tensors: {error.strerror}. Pass a smaller disk=, or a "
                "folder= with more room"
            ) from error
        _bypass_cache(self._descriptor)
        memory = torch.empty(CHUNK + BLOCK, dtype=torch.uint8, device="cpu")
        self._chunk = memory[-memory.data_ptr() % BLOCK :][:CHUNK]
        address = self._chunk.data_ptr()
        self._view = memoryview((ctypes.c_char * CHUNK).from_address(address)).cast("B")

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that are taken."""
        return self._extents.used_bytes

    def write(self, content: Tensor) -> Extent | None:
        """Write bytes; return where they are, `None` if the file is full."""
        with self._lock:
            place = self._extents.take(content.nbytes)
            if place is None:
                return None
            for begin, end, rounded in _chunks(content.nbytes):
                self._chunk[: end - begin].copy_(content[begin:end])
                done = 0
                while done < rounded:
                    part = self._view[done:rounded]
                    done += os.pwrite(self._descriptor, part, place[1] + begin + done)
            return place

    def read(self, place: Extent, target: Tensor) -> None:
        """Read bytes into a tensor of any device; return when they are there."""
        with self._lock:
            for begin, end, rounded in _chunks(target.nbytes):
                done = 0
                while done < rounded:
                    part = self._view[done:rounded]
                    done += os.preadv(self._descriptor, [part], place[1] + begin + done)
                target[begin:end].copy_(self._chunk[: end - begin])

    def give_back(self, place: Extent, size: int) -> None:
        """Let other bytes have the place of so many, without waiting for a thread."""
        self._extents.give_back(place, size)


def _chunks(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each read or write begins and ends, and its bytes in whole blocks."""
    for begin in range(0, size, CHUNK):
        end = min(begin + CHUNK, size)
        yield begin, end, -(-(end - begin) // BLOCK) * BLOCK


def _without_name(folder: str) -> int:
    """Open a file that no folder shows."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # Not every file system can.
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return descriptor


def _bypass_cache(descriptor: int) -> None:
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        import fcntl  # Windows has none.

        with suppress(OSError):  # Not every file system can.
            before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before | flag)
