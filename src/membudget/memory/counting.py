"""Live bytes of a device and their peak, at any time, without a profiler.

An accelerator's allocator keeps these numbers. For the CPU, a counter in C++ is put in
front of torch's allocator for as long as somebody counts.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from membudget._torch import is_fake
from membudget._torch_accelerator import FAILURES, is_on_accelerator, memory_stats
from membudget.engine.native.library import Library, NoExtensionError
from membudget.memory.peak import storage_bytes
from membudget.state.bits import living_tensors

COUNTER = Library("counter", Path(__file__).parent / "native", "the memory counter")

_OPEN: list[Counted] = []
"""Who counts; the first of the CPU's knows what was live before."""


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
        self._before_bytes = 0
        # Peaks that another's restart has ended: of live, and of bounded bytes.
        self._most_bytes = self._most_bounded_bytes = 0

    def start(self) -> None:
        """Begin to count."""
        if is_on_accelerator(self.device):
            _OPEN.append(self)
            return
        try:
            self._extension = COUNTER.imported("_counter")
        except (NoExtensionError, ImportError) as error:
            self.why_not = str(error)
            return
        # What is live already, counted by an earlier opening or not at all.
        if others := self._all_open():
            self._before_bytes = others[0]._before_bytes
        else:
            gc.collect()  # What it frees later would count for good.
            self._before_bytes = _visible_bytes() - int(self._extension.live())
        self.is_exact = self._extension.start()
        self.why_not = "" if self.is_exact else "torch has another allocator in front"
        _OPEN.append(self)

    def stop(self) -> None:
        """Count no more."""
        if self in _OPEN:
            _OPEN.remove(self)
            if not is_on_accelerator(self.device) and not self._all_open():
                self._extension.stop()
        self.is_exact = is_on_accelerator(self.device)

    def _all_open(self) -> list[Counted]:
        return [counted for counted in _OPEN if counted.device == self.device]

    def live_bytes(self) -> int:
        """Return the bytes of live tensors."""
        if is_on_accelerator(self.device):
            return memory_stats(self.device)["requested_bytes.all.current"]
        if self.is_exact:
            return self._before_bytes + int(self._extension.live())
        return _visible_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes that were live since `restart`; exact counts alone."""
        if is_on_accelerator(self.device):
            found_bytes = memory_stats(self.device)["requested_bytes.all.peak"]
        else:
            found_bytes = self._before_bytes + int(self._extension.most())
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


def _visible_bytes() -> int:
    """Return the bytes of all tensors on the CPU that Python's collector knows.

    Tensors that only C++ refers to, such as those that autograd saved, are not found.
    """
    return storage_bytes(
        t for t in living_tensors() if t.device.type == "cpu" and not is_fake(t)
    )
