"""Measure what a call takes on the devices of the accelerator.

A device's allocator rounds what is *requested* up to blocks, which are *allocated*, and
carves blocks out of larger pieces that it has *reserved*. It keeps freed blocks for the
next request, so a request may find none that is large enough and reserve another piece:

    requested  ├─ tensors ─┤
    allocated  ├─ tensors, rounded up ─┤
    reserved   ├─ blocks in use, freed blocks, rests of pieces ─┤  what runs out

Before it runs out, it gives back the pieces that are free as a whole.

The allocator counts exactly, in all threads; the order of allocations decides, so that
the same call takes the same bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from membudget._torch_accelerator import Stats, in_use, memory_stats

RESERVED = "reserved_bytes.all.current"
"""What is reserved now, among an allocator's statistics."""


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The memory that a call needed on one device of the accelerator.

    Attributes:
        device: The device, such as `"cuda:0"`.
        peak_bytes: Peak of the bytes that the call requested.
        end_bytes: Requested bytes that are live at its end.
        allocated_bytes: Peak of the bytes allocated for these requests, rounded up.
        reserved_bytes: Peak of the bytes that the allocator reserved during the call.
        before_bytes: Bytes that were reserved before the call, without free blocks.
    """

    device: str
    peak_bytes: int
    end_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    before_bytes: int

    @property
    def fragmented_bytes(self) -> int:
        """Bytes that were reserved at the peak, and in no block that was allocated."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    def less(self, size: int) -> DevicePeak:
        """Return what the call took if so much had been in use before it."""
        return replace(
            self,
            peak_bytes=self.peak_bytes - size,
            allocated_bytes=self.allocated_bytes - size,
            reserved_bytes=self.reserved_bytes - size,
            before_bytes=self.before_bytes + size,
        )


@contextmanager
def metered_devices() -> Iterator[list[DevicePeak]]:
    """Measure what the enclosed code takes on each device of the accelerator.

    Free blocks are given back to the devices before it runs: what it reserves is then
    what it would reserve in a new process.

    Yields:
        The devices on which it allocated anything, filled in when the context exits.
    """
    found: list[DevicePeak] = []
    before = {device: at_rest(device) for device in in_use()}
    yield found
    # The code may be the first to use the accelerator.
    for device in in_use():
        torch.accelerator.synchronize(device)
        stats = memory_stats(device)
        taken = _taken(device, before.get(device, dict.fromkeys(stats, 0)), stats)
        if taken.peak_bytes or taken.reserved_bytes:
            found.append(taken)


def at_rest(device: torch.device) -> Stats:
    """Return a device's statistics, and begin to count peaks, without free blocks.

    Garbage is collected first: tensors in reference cycles would otherwise be freed
    while a peak is counted, which would be too low by their bytes.
    """
    gc.collect()
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    return memory_stats(device)


def _taken(device: torch.device, before: Stats, after: Stats) -> DevicePeak:
    def more(kind: str, when: str = "peak") -> int:
        start = before[f"{kind}_bytes.all.current"]
        return max(0, after[f"{kind}_bytes.all.{when}"] - start)

    return DevicePeak(
        device=str(device),
        peak_bytes=more("requested"),
        end_bytes=more("requested", "current"),
        allocated_bytes=more("allocated"),
        reserved_bytes=more("reserved"),
        before_bytes=before[RESERVED],
    )
