"""Measure the bytes of storages, and the peak of live bytes during a call.

On the CPU, torch's profiler records every allocation and release, including those in
autograd's threads and inside kernels. The running sum of allocations and releases is
exact and reproducible to the byte. Releases of memory that was allocated before the
recording are ignored, because they would push the sum below the live bytes. On an
accelerator, the statistics of its allocator are read, beside the host's events. Memory
that does not come from torch's allocators, such as a library's own workspace, is not
counted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from membudget._torch import is_profiling
from membudget.errors import OptionError
from membudget.memory.allocator import DevicePeak, metered_devices
from membudget.state.bits import plain_parts


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that `tensors` keep alive, each storage counted once.

    A view keeps its whole base alive, so `x[:1]` counts as many bytes as `x`, and three
    chunks of one tensor count as many as the tensor. For a composite tensor (a
    `DTensor`, a sparse tensor), the storages of its parts are counted.

    Args:
        tensors: Tensors on any device; `meta` and fake tensors count as many bytes as
            equivalent real tensors.

    Example:
        >>> import torch
        >>> x = torch.zeros(6, 100)  # 2,400 bytes
        >>> storage_bytes([x[:1]]), storage_bytes(x.chunk(3))
        (2400, 2400)
        >>> storage_bytes([torch.eye(2).to_sparse()])  # two indices, two values
        40
    """
    # Keyed by storage, not by address: all meta and empty storages have address 0.
    storages: dict[Any, int] = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation or a release of memory.

    Attributes:
        moment: Time in nanoseconds on the profiler's clock.
        bytes: Size of the allocation; negative for a release.
        thread: Id of the thread that allocated or released the memory.
    """

    moment: int
    bytes: int
    thread: int


@dataclass(slots=True)
class Events:
    """The events that torch's profiler recorded.

    Attributes:
        memory: Allocations and releases on the CPU, in chronological order.
        others: All other events: operators and `record_function` blocks.
    """

    memory: list[Change] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def recorded_events() -> Iterator[Events]:
    """Record the enclosed code with torch's profiler.

    Yields:
        The profiler's events, filled in when the context exits.
    """
    events = Events()
    recorder = profile(profile_memory=True)
    with quiet_stderr():
        recorder.__enter__()
    try:
        yield events
    finally:
        with quiet_stderr():
            recorder.__exit__(None, None, None)
    results: Any = recorder.kineto_results
    events.others += (e for e in results.events() if e.name() != "[memory]")
    events.memory += _changes(results.experimental_event_tree())


def _changes(tree: list[Any]) -> Iterator[Change]:
    """Yield the allocations and releases on the CPU, in chronological order."""
    # Only the event tree has addresses, which show what was allocated before.
    alive: set[int] = set()
    for node in sorted(_allocations(tree), key=lambda node: node.start_time_ns):
        change: Any = node.extra_fields
        if change.alloc_size > 0:
            alive.add(change.ptr)
        elif change.ptr in alive:
            alive.remove(change.ptr)
        else:
            continue
        yield Change(node.start_time_ns, change.alloc_size, node.start_tid)


def _allocations(tree: list[Any]) -> Iterator[Any]:
    nodes = tree[::-1]
    while nodes:
        node = nodes.pop()
        nodes += node.children[::-1]
        if node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            yield node


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hide the lines that the profiler's C++ code prints when it starts and stops."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # It may be closed.
            sys.stderr.flush()
    with contextlib.ExitStack() as undo:
        # C++ writes to the file descriptor, not to `sys.stderr`. Its lines are shown
        # if the process has no standard error, or no descriptor is left.
        with contextlib.suppress(OSError):
            kept = os.dup(2)
            undo.callback(os.close, kept)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            undo.callback(os.close, nowhere)
            os.dup2(nowhere, 2)
            undo.callback(os.dup2, kept, 2)
        yield


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peak(Generic[T]):
    """The memory that a call needed, on one device and on those beside it.

    Attributes:
        peak_bytes: Peak of the live bytes that the call allocated.
        end_bytes: Bytes allocated by the call and live at its end, including `result`.
        operator: The operator that reached the peak, such as `"aten::addmm"`; empty on
            an accelerator, or if no operator was running.
        timeline: Live bytes after each allocation or release; empty on an accelerator.
        reserved_bytes: On an accelerator, peak of the bytes that its allocator reserved
            during the call, for rounding and cached blocks, too; 0 on the CPU.
        result: Return value of the call.
        device: The device that these bytes are of, such as `"cpu"` or `"cuda:0"`.
        host_bytes: Peak of the live bytes that the call allocated on the CPU.
        devices: What the call took on each device of the accelerator.
    """

    peak_bytes: int
    end_bytes: int
    operator: str
    timeline: tuple[int, ...]
    reserved_bytes: int
    result: T
    device: str = "cpu"
    host_bytes: int = 0
    devices: tuple[DevicePeak, ...] = ()

    @property
    def bounded_bytes(self) -> int:
        """The bytes that a budget bounds: on an accelerator, those that are reserved.

        Those run out; on the CPU, live tensors are all that a step can answer for.
        """
        return self.peak_bytes if self.device == "cpu" else self.reserved_bytes

    def less(self, size: int) -> Peak[T]:
        """Return what the call needed if so much had been in use on the device."""
        devices = [d.less(size) if d.device == self.device else d for d in self.devices]
        return replace(
            self,
            peak_bytes=self.peak_bytes - size,
            reserved_bytes=self.reserved_bytes - size,
            devices=tuple(devices),
        )


def peak(function: Callable[..., T], *args: Any, **kwargs: Any) -> Peak[T]:
    """Call a function and measure the peak of the tensor bytes that it allocates.

    The CPU is measured, and every device of the accelerator, if it is in use. The
    result is of the device on which the call allocated the most, or of the CPU if it
    allocated on no other.

    Not counted: allocator rounding, and memory allocated before the call. For the total
    peak, add `storage_bytes` of the parameters, buffers, optimizer state and inputs. On
    the CPU, releases of memory allocated before the call are ignored, so set old
    gradients to `None` before the call.

    Args:
        function: The function to call. Allocations in all threads of the process count,
            including autograd's threads.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        The measured peak, and the function's result.

    Raises:
        OptionError: If a profiler is already running, or the allocator of the
            accelerator keeps no statistics.

    Example:
        >>> x = torch.zeros(1000)  # 4,000 bytes
        >>> measured = peak(lambda: x.sin().exp().sum())
        >>> measured.peak_bytes, measured.end_bytes  # both intermediates; the sum
        (8000, 4)
    """
    found = _measured(partial(function, *args, **kwargs))
    most = max(found.devices, key=attrgetter("peak_bytes"), default=None)
    return found if most is None else _of_device(found, most)


def peak_on(device: torch.device, function: Callable[[], T]) -> Peak[T]:
    """Call a function and measure what it allocates on a device; see `peak`."""
    found = _measured(function)
    if device.type == "cpu":
        return found
    nothing = DevicePeak(str(device), 0, 0, 0, 0, 0)
    taken = (d for d in found.devices if d.device == str(device))
    return _of_device(found, next(taken, nothing))


def _measured(function: Callable[[], T]) -> Peak[T]:
    """Call a function and measure what it takes on the CPU and beside it."""
    if is_profiling():
        raise OptionError(
            "a profiler is running, whose events and the meter's cannot be told apart; "
            "leave it before calling membudget.peak"
        )
    with metered_devices() as devices, recorded_events() as events:
        result = function()
    found = _from_events(events, result)
    return replace(found, host_bytes=found.peak_bytes, devices=tuple(devices))


def _of_device(found: Peak[T], taken: DevicePeak) -> Peak[T]:
    return replace(
        found,
        peak_bytes=taken.peak_bytes,
        end_bytes=taken.end_bytes,
        operator="",
        timeline=(),
        reserved_bytes=taken.reserved_bytes,
        device=taken.device,
    )


def _from_events(events: Events, result: T) -> Peak[T]:
    alive = most = 0
    at: Change | None = None
    timeline = []
    for event in events.memory:
        alive += event.bytes
        timeline.append(alive)
        if alive > most:
            most, at = alive, event
    operator = "" if at is None else _running(events.others, at)
    return Peak(most, alive, operator, tuple(timeline), 0, result)


def _running(events: list[Any], change: Change) -> str:
    """Return the innermost operator running at the time of an allocation or release."""
    around = [
        event
        for event in events
        if event.start_thread_id() == change.thread
        and event.start_ns() <= change.moment <= event.end_ns()
    ]
    innermost = max(around, key=lambda event: event.start_ns(), default=None)
    return "" if innermost is None else str(innermost.name())
