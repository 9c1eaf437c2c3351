"""What the plans of a loop may use of the host, and what moves tensors there.

One `Offload` serves all models of a budget. How much of its memory a plan may use is
told in halvings, so that few planners are made:

    memory given        ├───────────────────────────────┤  halved 0 times
    held by a forward   ├──────┤
    for the next one           ·├──────────────┤           halved once
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from membudget.graph import StepGraph
from membudget.host import AskedHost, Offloading, asked_host, measured_device
from membudget.offload import Offload
from membudget.offload.limits import Limits
from membudget.offload.slab import growing_pieces
from membudget.planner.moved import Host
from membudget.profile.devices import Device
from membudget.text import format_bytes

MOST_HALVINGS = 3
"""Of less than an eighth of the memory, nothing is used."""


class HostRoom:
    """The host's memory that plans of models on one device may use.

    Attributes:
        device: How fast the accelerator computes. What is recorded without memory is
            timed by that, and compared with the link.
        offload: Moves tensors, for all models of a budget.
    """

    def __init__(self, given: AskedHost, device: Device, offload: Offload):
        """Store what is given of the host, and how fast the accelerator is."""
        self.device, self.offload = device, offload
        self._given = given

    def halvings(self, parts: int) -> int | None:
        """Return how often the memory is to be halved for a plan; `None` for nothing.

        Args:
            parts: How many micro-batches share what no other holds by now.
        """
        free_bytes = (self._given.memory_bytes - self.offload.used_bytes()) // parts
        for halvings in range(MOST_HALVINGS + 1):
            if self._given.memory_bytes >> halvings <= free_bytes:
                return halvings
        return None

    def serving(self, graph: StepGraph, halvings: int | None) -> Host | None:
        """Return what plans of a step may use; `None` if they may move nothing.

        Memory consists of pieces. At the end of each, there may be no room for the next
        storage.
        """
        if halvings is None:
            return None
        host = self._given.serving(graph)
        memory_bytes = host.memory_bytes >> halvings
        largest = host.window_bytes // 2
        pieces = growing_pieces(self._given.memory_bytes)
        lost_bytes = sum(min(piece, largest) for piece in pieces)
        return self.again(memory_bytes - lost_bytes, host.window_bytes)

    def holds(self, host: Host | None, halvings: int | None) -> bool:
        """Return whether there is room for what a plan uses."""
        if host is None:
            return True
        if halvings is None:
            return False
        return host.memory_bytes <= self._given.memory_bytes >> halvings

    def again(self, memory_bytes: int, window_bytes: int) -> Host | None:
        """Return a host over the link as it is now; `None` if there is no such room."""
        if not 0 < memory_bytes <= self._given.memory_bytes:
            return None
        return Host(memory_bytes, window_bytes, *self._given.rates)

    def begin(self, host: Host | None, is_alone: bool) -> None:
        """Move by a plan's window from now on.

        Args:
            host: What the plan uses; `None` if it moves nothing.
            is_alone: Whether no forward waits for its backward pass. Else, neither its
                plan nor the next one may have more than it foresaw.
        """
        if host is None:
            return
        before = None if is_alone else self.offload.window_bytes
        now = host.window_bytes
        self.offload.window_bytes = now if before is None else min(before, now)


def host_rooms(
    asked: int | str | None, offload: Offloading, devices: Sequence[torch.device]
) -> dict[torch.device, HostRoom | None]:
    """Return what models may use of the host, by their device.

    Raises:
        OptionError: As `asked_host` does.
    """
    found: dict[torch.device, HostRoom | None] = {}
    shared: Offload | None = None
    for device in devices:
        given = asked_host(asked, offload, device)
        if given is None:
            found[device] = None
        elif device not in found:
            limits = Limits(given.memory_bytes, 0, 0, smallest_bytes=1, grows=True)
            shared = shared or Offload(limits)
            found[device] = HostRoom(given, measured_device(device), shared)
    return found


def notes_on(rooms: Iterable[HostRoom | None]) -> tuple[str, ...]:
    """Return what a user should know of the host's memory, in sentences."""
    return tuple(_notes(room for room in rooms if room is not None))


def _notes(rooms: Iterable[HostRoom]) -> Iterator[str]:
    for offload in {room.offload for room in rooms}:
        status = offload.status()
        if status.out_bytes:
            yield (
                f"{format_bytes(status.out_bytes)} were moved to the host, at most "
                f"{format_bytes(status.most_host_bytes)} at a time, in "
                f"{format_bytes(status.host_bytes)} of its memory"
            )
