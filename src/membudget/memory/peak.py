"""The events of the CPU's allocator, as torch's profiler notes them.

Every allocation and every release is one, also in the threads of autograd and inside
kernels, so their running sum is what is alive. The profiler also tells some releases of
what was there before: if it saw an allocation at the address in an earlier recording.
These are left out, or the sum would fall below what is alive.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.nn import Module

from membudget._torch import is_profiling, tree_iter
from membudget.errors import OptionError


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation, or a release of what was allocated.

    Attributes:
        moment: By the clock of the events, in nanoseconds.
        bytes: Of the storage; below 0 for a release.
        thread: In which it happened.
    """

    moment: int
    bytes: int
    thread: int


@dataclass(slots=True)
class Events:
    """What the profiler noted.

    Attributes:
        memory: Allocations and releases on the CPU, in order.
        others: All else: operators, and what was marked.
    """

    memory: list[Change] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def recorded_events() -> Iterator[Events]:
    """Record what runs inside.

    Yields:
        The events, which are there when the context has ended.
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
    """Yield what happened on the CPU in order; only the tree knows the addresses."""
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
    """Hide the line that the profiler's C++ code prints when it starts and stops."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # There is no standard error to be quiet about.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peak(Generic[T]):
    """What a call needed.

    Attributes:
        peak_bytes: The most bytes alive at once of what the call allocated.
        end_bytes: What of that was still alive at the end, `result` included.
        operator: The operator that ran when the peak was reached, such as
            `"aten::addmm"`; empty if none did, or on CUDA.
        timeline: The bytes alive after each event, in order; empty on CUDA.
        reserved_bytes: On CUDA, by how much the allocator's rounding and its cached
            blocks exceeded `peak_bytes`; 0 on the CPU.
        result: What the call returned.
    """

    peak_bytes: int
    end_bytes: int
    operator: str
    timeline: tuple[int, ...]
    reserved_bytes: int
    result: T


def peak(function: Callable[..., T], *args: Any, **kwargs: Any) -> Peak[T]:
    """Call a function and measure the most bytes of tensor storage alive during it.

    What was alive before the call is not counted: add `storage_bytes` of the
    parameters, buffers, optimizer state and inputs for the total. On the CPU that holds
    also for what the call releases of it, so set old gradients to `None` before.
    Allocator rounding is not counted.

    Args:
        function: What to call. Whatever it runs in other threads of this process
            (autograd's, above all) counts, too.
        *args: Its arguments.
        **kwargs: Its keyword arguments. If a tensor or module among them, or the
            function itself, lies on a CUDA device, that device is measured; else the
            CPU.

    Returns:
        The peak, with what the function returned.

    Raises:
        OptionError: If a profiler is running: its events and ours cannot be told apart.

    Example:
        >>> x = torch.zeros(1000)  # 4,000 bytes
        >>> measured = peak(lambda: x.sin().exp().sum())
        >>> measured.peak_bytes, measured.end_bytes  # both intermediates; the sum
        (8000, 4)
    """
    device = _cuda_device(function, args, kwargs)
    if device is not None:
        return _peak_on_cuda(device, function, args, kwargs)
    if is_profiling():
        raise OptionError(
            "a profiler is running, whose events and the meter's cannot be told apart; "
            "leave it before calling membudget.peak"
        )
    with recorded_events() as events:
        result = function(*args, **kwargs)
    return _from_events(events, result)


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
    """Return the innermost operator that ran in the change's thread."""
    around = [
        event
        for event in events
        if event.start_thread_id() == change.thread
        and event.start_ns() <= change.moment <= event.end_ns()
    ]
    innermost = max(around, key=lambda event: event.start_ns(), default=None)
    return "" if innermost is None else str(innermost.name())


def _peak_on_cuda(
    device: torch.device,
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Peak[T]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    result = function(*args, **kwargs)
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    start = before.get("requested_bytes.all.current", 0)
    most = after.get("requested_bytes.all.peak", 0) - start
    end = after.get("requested_bytes.all.current", 0) - start
    reserved = after["reserved_bytes.all.peak"] - before["reserved_bytes.all.current"]
    return Peak(most, end, "", (), max(0, reserved - most), result)


def _cuda_device(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device | None:
    owner = getattr(function, "__self__", function)
    for tensor in _tensors((owner, args, kwargs)):
        if tensor.is_cuda:
            return tensor.device
    return None


def _tensors(tree: Any) -> Iterable[Tensor]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
