"""Copies between a device and the host, beside the device's other work.

    compute ──●───────────────────────────●── reads ──
              └> out: device -> host      |
                         in: host -> device ┘

Each direction has a stream of its own. On the CPU there are none, and copies are done
when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from membudget._torch_accelerator import stream_of


class Link:
    """The two directions of copies of one device. Events of the CPU are `None`.

    Attributes:
        ends: Events of the end of its latest copy, by direction.
    """

    def __init__(self, device: torch.device, sharing: list[Link]):
        """Make the streams, if the device has any.

        Args:
            device: The device.
            sharing: The links whose copies use the same host memory; joined by this.
        """
        self.ends: dict[str, Any] = {}
        self._device = device
        self._sharing = sharing
        sharing.append(self)
        has_streams = stream_of(device) is not None
        self._out = torch.Stream(device) if has_streams else None
        self._in = torch.Stream(device) if has_streams else None

    def copy_out(self, source: Tensor, target: Tensor) -> Any:
        """Copy to the host all that was written so far; return the event of its end.

        The source must not be freed before that event.
        """
        if self._out is None:
            target.copy_(source)
            return None
        self._out.wait_event(self.now().record_event())
        # Whoever had the block may still read from it, or write to it.
        for link in self._sharing:
            for end in list(link.ends.values()):
                self._out.wait_event(end)
        # The stream that reads the source may be another than it is allocated for.
        source.record_stream(self.now())
        self.ends["out"] = _copy(source, target, self._out)
        return self.ends["out"]

    def copy_in(self, source: Tensor, copied: Any) -> tuple[UntypedStorage, Any]:
        """Copy back what an event says has arrived; return the copy, and its event.

        Memory is allocated for the stream that computes, which must wait for the event.
        """
        made = torch.empty_like(source, device=self._device)
        if self._in is None:
            return made.copy_(source).untyped_storage(), None
        # What had this memory before may not have been read yet.
        self._in.wait_event(self.now().record_event())
        self._in.wait_event(copied)
        self.ends["in"] = _copy(source, made, self._in)
        return made.untyped_storage(), self.ends["in"]

    def read_in(self, size: int, read: Callable[[Tensor], None]) -> UntypedStorage:
        """Return what a function has written to memory of the device, when it has."""
        made = torch.empty(size, dtype=torch.uint8, device=self._device)
        read(made)
        return made.untyped_storage()

    def now(self) -> Any:
        """Return the stream that computes."""
        return stream_of(self._device)

    def wait(self, event: Any) -> None:
        """Let what is launched next run after an event."""
        if event is not None:
            self.now().wait_event(event)

    def lend(self, storage: UntypedStorage, made_on: Any) -> None:
        """Let the stream that computes use what was allocated for another one."""
        if self.now() != made_on:
            bytes_of(storage).record_stream(self.now())


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor."""
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage)


def _copy(source: Tensor, target: Tensor, stream: Any) -> Any:
    with stream:
        target.copy_(source, non_blocking=True)
        return stream.record_event()


def has_happened(event: Any) -> bool:
    """Return whether the host need not wait for an event."""
    return event is None or event.query()
