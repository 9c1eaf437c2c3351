"""A pretended accelerator, for tests of what is asked of one; nothing can run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from membudget import _torch_accelerator as accelerator
from membudget.engine.replay import accelerated
from membudget.state import rng
from tests.devices import is_cpu

GIVEN_BYTES = 4096


@dataclass
class Stream:
    """A stream by its name, which notes for whom it waits."""

    name: str
    asked: list[str] = field(repr=False)
    device_index: int = 0

    def wait_stream(self, other: Stream) -> None:
        self.asked.append(f"{self.name} waits for {other.name}")


@dataclass
class Allocator:
    """Counts as the allocator of a device does."""

    requested: int = 100
    reserved: int = GIVEN_BYTES
    requested_peak: int = 100
    reserved_peak: int = GIVEN_BYTES

    def allocate(self, requested: int, reserved: int) -> None:
        self.requested += requested
        self.reserved += reserved
        self.requested_peak = max(self.requested_peak, self.requested)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def reset_peak(self) -> None:
        self.requested_peak, self.reserved_peak = self.requested, self.reserved

    def stats(self) -> dict[str, int]:
        return {
            "requested_bytes.all.current": self.requested,
            "requested_bytes.all.peak": self.requested_peak,
            "allocated_bytes.all.current": self.requested,
            "allocated_bytes.all.peak": self.requested_peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved_peak,
        }


class Accelerator:
    """Devices as `torch.accelerator` shows them.

    Attributes:
        asked: What was asked of the devices, in order.
        is_used: Whether the process uses them.
        current: Index of the current device.
        streams: The current stream of each device.
        generators: Their generators, which lie on the CPU.
        allocators: Their allocators.
        module: What torch has under the accelerator's name.
    """

    def __init__(self, kind: str, devices: int):
        self.kind = kind
        self.asked: list[str] = []
        self.is_used = True
        self.current = 0
        self.streams = [Stream(f"main {i}", self.asked, i) for i in range(devices)]
        self.generators = [torch.Generator().manual_seed(i) for i in range(devices)]
        self.allocators = [Allocator() for _ in range(devices)]
        self.module: Any = SimpleNamespace(
            is_initialized=lambda: self.is_used, default_generators=self.generators
        )

    def stream(self, name: str, device: int = 0) -> Stream:
        return Stream(name, self.asked, device)

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return torch.device(self.kind)

    def device_count(self) -> int:
        return len(self.streams)

    def current_device_index(self) -> int:
        return self.current

    def current_stream(self, device: Any = None) -> Stream:
        return self.streams[self._index(device)]

    def set_stream(self, stream: Stream) -> None:
        self.asked.append(f"on {stream.name}")
        self.current = stream.device_index
        self.streams[stream.device_index] = stream

    def synchronize(self, device: Any = None) -> None:
        self.asked.append(f"synchronize {self._index(device)}")

    def empty_cache(self) -> None:
        self.asked.append("empty cache")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.asked.append(f"reset {self._index(device)}")
        self.allocators[self._index(device)].reset_peak()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        self.asked.append(f"stats {self._index(device)}")
        return self.allocators[self._index(device)].stats()

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocators[self._index(device)].reserved

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocators[self._index(device)].requested

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        return 1000, 10_000

    def _index(self, device: Any) -> int:
        if device is None:
            return self.current
        return int(device if isinstance(device, int) else device.index)


def pretend(
    monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", devices: int = 2
) -> Accelerator:
    """Let torch have an accelerator until the test ends."""
    if not is_cpu():
        pytest.skip("there is an accelerator, so none can be pretended")
    pretended = Accelerator(kind, devices)
    for name in dir(Accelerator):
        if not name.startswith("_") and hasattr(torch.accelerator, name):
            monkeypatch.setattr(torch.accelerator, name, getattr(pretended, name))
    monkeypatch.setattr(accelerator, "_module", lambda name: pretended.module)
    is_used: Callable[[], bool] = lambda: pretended.is_used  # noqa: E731
    monkeypatch.setattr(accelerator, "_asks_whether_in_use", lambda name: is_used)
    # C++ asks torch itself for a stream, so that frames are made in Python.
    monkeypatch.setattr(accelerated, "EXTENSION", [])
    rng._default_source.cache_clear()
    return pretended
