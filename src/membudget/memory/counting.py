"""Live bytes of a device and their peak, at any time, without a profiler.

An accelerator's allocator keeps these numbers. For the CPU, a counter in C++ is put in
front of torch's allocator for as long as somebody counts; of tensors from before, it
sees when they are freed, if Python knew them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from membudget._torch import is_fake
from membudget._torch_accelerator import FAILURES, is_on_accelerator, memory_stats
from membudget.engine.native.library import Library, NoExtensionError
from membudget.memory.peak import storage_bytes
from membudget.state.bits import living_tensors, plain_parts

COUNTER = Library("counter", Path(__file__).parent / "native", "the memory counter")

_OPEN: WeakSet[Counted] = WeakSet()
"""Who counts; one that nobody refers to any more has stopped."""


class Counted:
    """Live bytes of one device, from `start()` to `stop()`.

    Attributes:
        is_exact: Whether every allocation is counted. Without a C++ compiler, the CPU's
            are not: then `live` looks through all objects, and no peak is known.
        why_not: Why it is not exact, in words; empty if it is.
    """

    def __init__(self, device: torch.device):
        """Choose the device; nothing is counted yet."""
        self.device = device
        self.is_exact = is_on_accelerator(device)
        self.why_not = ""
        self._extension: Any = None
        self._end: Callable[[], Any] | None = None
        # Peaks that another's restart has ended: of live, and of bounded bytes.
        self._most_bytes = self._most_bounded_bytes = 0

    def start(self) -> None:
        """Begin to count."""
        if is_on_accelerator(self.device):
            _OPEN.add(self)
            return
        try:
            self._extension = COUNTER.imported("_counter")
        except (NoExtensionError, ImportError) as error:
            self.why_not = str(error)
            return
        gc.collect()  # Garbage would count as live until Python collects it.
        parts = [part for tensor in _visible() for part in plain_parts(tensor)]
        storages = [part.untyped_storage()._cdata for part in parts]
        self._extension.adopt(storages, not self._all_open())
        self.is_exact = self._extension.start()
        self.why_not = "" if self.is_exact else "torch has another allocator in front"
        _OPEN.add(self)
        self._end = finalize(self, _stop_if_last, self._extension)

    def stop(self) -> None:
        """Count no more."""
        _OPEN.discard(self)
        if self._end is not None:
            self._end()
        self.is_exact = is_on_accelerator(self.device)

    def _all_open(self) -> list[Counted]:
        return [counted for counted in _OPEN if counted.device == self.device]

    def live_bytes(self) -> int:
        """Return the bytes of live tensors."""
        if is_on_accelerator(self.device):
            return memory_stats(self.device)["requested_bytes.all.current"]
        if self.is_exact:
            return int(self._extension.live())
        return storage_bytes(_visible())

    def peak_bytes(self) -> int:
        """Return the most bytes that were live since `restart`; exact counts alone."""
        if is_on_accelerator(self.device):
            found_bytes = memory_stats(self.device)["requested_bytes.all.peak"]
        else:
            found_bytes = int(self._extension.most())
        return max(found_bytes, self._most_bytes)

    def bounded_bytes(self) -> tuple[int, int]:
        """Return what a budget bounds, now and at its peak since `restart`.

        That is what an accelerator's allocator reserves; on the CPU, live tensors.
        """
        if is_on_accelerator(self.device):
            stats, kind = memory_stats(self.device), "reserved_bytes.all"
            peak_bytes = max(stats[f"{kind}.peak"], self._most_bounded_bytes)
            return stats[f"{kind}.current"], peak_bytes
        return self.live_bytes(), self.peak_bytes()

    def failures(self) -> int:
        """Return how many allocations have failed so far; exact counts alone."""
        if is_on_accelerator(self.device):
            return memory_stats(self.device)[FAILURES]
        return int(self._extension.failed()) if self.is_exact else 0

    def restart(self) -> None:
        """Let the peak begin with what is live now; those of others go on."""
        for other in self._all_open():
            other._most_bytes = other.peak_bytes()
            _, other._most_bounded_bytes = other.bounded_bytes()
        self._most_bytes = self._most_bounded_bytes = 0
        if is_on_accelerator(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)
        elif self.is_exact:
            self._extension.restart()


def _stop_if_last(extension: Any) -> None:
    """Let the CPU's allocator stand alone if nobody counts its bytes."""
    if all(is_on_accelerator(counted.device) for counted in _OPEN):
        extension.stop()


def _visible() -> Iterator[Tensor]:
    """Yield all tensors on the CPU that Python's collector knows.

    Those that only C++ refers to, such as what autograd saved, are not found.
    """
    for tensor in living_tensors():
        if tensor.device.type == "cpu" and not is_fake(tensor):
            yield tensor
