"""The most bytes of tensor storage alive during a call, and during which operator.

On the CPU every allocation and every release of torch's allocator is an event of the
profiler, also in the threads of autograd and inside kernels; the running sum of the
events is exact and repeats to the byte. On CUDA the allocator keeps the statistics
itself. Memory that never passes through the allocator (a workspace that a library takes
from the system) is counted by neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import is_profiling, tree_iter
from membudget.errors import OptionError
from membudget.memory.events import Change, Events, recorded_events

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
