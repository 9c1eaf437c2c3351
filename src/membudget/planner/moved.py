"""Simulate the copies between a device and its host in one step.

A block may move storages that it keeps to the host. Two queues copy beside what the
device computes, one in each direction; each copies one storage at a time, in the order
in which the copies begin. The rules are those of the lane that runs a plan
(`offload.lane`):

1. A copy out begins once the operator has run that first saves the storage. If the
   host has no room for it, the storage stays on the device.
2. The window holds what is on its way out and what was copied back, until autograd has
   freed it. If it is over `window_bytes`, the oldest storage on its way out is let go,
   and the device waits for the end of its copy. Until then it stays.
3. Autograd, or a recompute, asks for a storage. What was let go is copied back and
   waited for. Then what will be asked for next is copied back ahead of time, in order,
   as long as the window has room.
4. A storage is live on the device until the forward has released it and it is let go,
   and again from the beginning of the copy back until autograd has freed it. If it was
   not let go by then, the device waits for the end of its copy out.

    device    ├── a ──┤· · · · · · · · ├── a ──┤     dotted: on the host alone
    out            ├──────┤
    in                                 ├──────┤
    forward   makes a, saves a  │ backward   waits, reads a, frees a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from membudget.planner.ledger import Ledger
from membudget.planner.timeline import PlainStep

ALIGNMENT = 64
"""Storages take a multiple of this many bytes of the host's memory."""


EIGHTHS = 3
"""Host memory is allocated in eighths of the next power of two."""


@dataclass(frozen=True)
class Host:
    """What a plan may use of the host, and the link to it.

    Attributes:
        memory_bytes: Memory of the host for what is moved there.
        window_bytes: Bytes of the device for what is on its way, in either direction.
        out_bytes_per_s: Rate of copies to the host.
        in_bytes_per_s: Rate of copies back.
        latency_s: What a copy takes beside its bytes.
    """

    memory_bytes: int
    window_bytes: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def out_s(self, size: int) -> float:
        """Return the time of a copy to the host."""
        return self.latency_s + size / self.out_bytes_per_s

    def in_s(self, size: int) -> float:
        """Return the time of a copy back."""
        return self.latency_s + size / self.in_bytes_per_s

    def allocated_bytes(self, used_bytes: int, largest_bytes: int) -> int:
        """Return the memory to allocate so that as many bytes find room in its pieces.

        Page-locked memory consists of pieces whose sizes are powers of two. At the end
        of each but a single one, less than the largest storage may be left. A few large
        pieces waste little.
        """
        unit = 1 << max(0, used_bytes.bit_length() - EIGHTHS)
        found = (used_bytes // unit + 1) * unit
        while (pieces := found.bit_count()) > 1:
            if found - pieces * largest_bytes >= used_bytes:
                break
            found += unit
        return min(self.memory_bytes, found)


@dataclass(frozen=True)
class Moves:
    """What the copies of a simulated step take.

    Attributes:
        out_bytes: Bytes copied to the host.
        host_bytes: The most bytes of the host's memory in use.
        largest_bytes: Those of the largest storage that is moved there.
        link_s: Time for which the link is busy, in both directions together.
        wait_s: Time for which the device waits for a copy.
    """

    out_bytes: int = 0
    host_bytes: int = 0
    largest_bytes: int = 0
    link_s: float = 0.0
    wait_s: float = 0.0


NO_MOVES = Moves()


class Moving:
    """The storages that a step moves, as the simulation goes through the step.

    Attributes:
        ledger: The running totals of the step.
        wait_s: Time for which the device has waited for a copy so far.
    """

    def __init__(
        self, ledger: Ledger, plain: PlainStep, host: Host, order: Sequence[int]
    ):
        """Begin with no copies.

        Args:
            ledger: The running totals of the step.
            plain: The step without recomputation.
            host: The host and its link.
            order: The order in which storages will be asked for.
        """
        self.wait_s = 0.0
        self._asked: set[int] = set()
        self._storages = ledger.graph.storages
        self.ledger, self._plain, self._host = ledger, plain, host
        self._coming = iter(order)
        self._leaving: dict[int, None] = {}  # The oldest first.
        self._away: set[int] = set()
        self._arrives_s: dict[int, float] = {}  # By storage: the end of its last copy.
        self._in_window: set[int] = set()
        self._on_host: set[int] = set()
        self._window_bytes = self._host_bytes = 0
        self._out_free_s = self._in_free_s = 0.0
        self._out_bytes = self._most_host_bytes = self._largest_bytes = 0
        self._link_s = 0.0
        self._next: int | None = next(self._coming, None)

    def moves(self) -> Moves:
        """Return what the copies have taken so far."""
        held = self._most_host_bytes, self._largest_bytes
        return Moves(self._out_bytes, *held, self._link_s, self.wait_s)

    # Out.

    def leave(self, storage: int) -> None:
        """Begin to copy a storage to the host, if that has room for it."""
        taken = _aligned(self._bytes(storage))
        if self._host_bytes + taken > self._host.memory_bytes:
            return
        self._on_host.add(storage)
        self._host_bytes += taken
        self._most_host_bytes = max(self._most_host_bytes, self._host_bytes)
        self._largest_bytes = max(self._largest_bytes, taken)
        self._out_bytes += self._bytes(storage)
        copy_s = self._host.out_s(self._bytes(storage))
        self._link_s += copy_s
        self._out_free_s = max(self._out_free_s, self._now_s()) + copy_s
        self._arrives_s[storage] = self._out_free_s
        self._leaving[storage] = None
        self._count(storage)
        while self._leaving and self._window_bytes > self._host.window_bytes:
            self._let_go(next(iter(self._leaving)))

    def _let_go(self, storage: int) -> None:
        self._wait_for(storage)
        del self._leaving[storage]
        self._discount(storage)
        self._away.add(storage)
        released = self._storages[storage].released
        if released is not None and self.ledger.moment >= released:
            self.ledger.release(storage)

    def release(self, storage: int) -> None:
        """Note that the forward releases a storage."""
        if storage in self._away:
            self.ledger.release(storage)

    # Back.

    def ask(self, storage: int) -> None:
        """Wait until a storage is on the device; copy back what is asked for next."""
        self._asked.add(storage)
        if storage in self._away:
            self._load(storage)
        if storage not in self._leaving:
            self._wait_for(storage)
        while self._next is not None:
            if self._next in self._away and self._next not in self._asked:
                size = self._bytes(self._next)
                if self._window_bytes + size > self._host.window_bytes:
                    break
                self._load(self._next)
            self._next = next(self._coming, None)

    def _load(self, storage: int) -> None:
        self._away.remove(storage)
        self.ledger.allocate(storage)
        self._count(storage)
        copy_s = self._host.in_s(self._bytes(storage))
        self._link_s += copy_s
        begin_s = max(self._in_free_s, self._now_s(), self._arrives_s[storage])
        self._arrives_s[storage] = self._in_free_s = begin_s + copy_s

    def free(self, storage: int) -> None:
        """Free a storage that autograd has freed, wherever it is."""
        if storage in self._leaving:
            self._let_go(storage)
        elif storage not in self._away:
            self.ledger.release(storage)
        self._away.discard(storage)
        self._discount(storage)
        if storage in self._on_host:
            self._on_host.remove(storage)
            self._host_bytes -= _aligned(self._bytes(storage))

    # Bytes and seconds.

    def _bytes(self, storage: int) -> int:
        return self._storages[storage].bytes

    def _count(self, storage: int) -> None:
        self._in_window.add(storage)
        self._window_bytes += self._bytes(storage)

    def _discount(self, storage: int) -> None:
        if storage in self._in_window:
            self._in_window.remove(storage)
            self._window_bytes -= self._bytes(storage)

    def _wait_for(self, storage: int) -> None:
        self.wait_s += max(0.0, self._arrives_s.get(storage, 0.0) - self._now_s())

    def _now_s(self) -> float:
        """Return the time since the step began."""
        ledger = self.ledger
        return self._plain.begins_s[ledger.moment] + ledger.again_s + self.wait_s


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
