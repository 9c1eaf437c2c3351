"""What a plan may use of the host: its memory, and the link between it and the device.

The link is measured once for each device, by copies of two sizes in both directions:

    bytes/s = (large - small) ÷ (time of large - time of small)
    latency = time of small - small ÷ bytes/s
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from membudget._torch_accelerator import is_on_accelerator, stream_of
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.moved import Host
from membudget.profile.devices import Device, device_of
from membudget.text import dtype_name, parse_bytes

Offloading = Literal["auto", False]

LARGE, SMALL = 4 << 20, 1 << 16
REPEATS = 3

FEWEST_IN_WINDOW = 2
"""The first window to try has room for as many of the largest saved tensors: one is
copied while the next is made."""

FIRST_SIDE, LAST_SIDE = 256, 4096
"""Of the matrices by which a device is measured."""

LONG_S, PATIENCE_S = 1e-4, 0.02
"""Seconds of a matrix product that are enough, and of the wall's clock for some."""

_LEAST_S = 1e-9


class Rates(NamedTuple):
    """What copies between a device and its host take."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class AskedHost:
    """The host's memory that a user gives, and the link to it.

    Attributes:
        memory_bytes: The memory.
        rates: The link.
    """

    memory_bytes: int
    rates: Rates

    def serving(self, graph: StepGraph) -> Host:
        """Return what plans of a step may use of the host."""
        return Host(self.memory_bytes, _window_bytes(graph), *self.rates)


def asked_host(
    asked: int | str | None,
    offload: Offloading,
    device: torch.device,
    estimated: str | Device | None = None,
) -> AskedHost | None:
    """Return what a user gives of the host; `None` if nothing.

    Args:
        asked: Bytes of the host's memory.
        offload: `False` if nothing is to be moved in any case.
        device: The model's device, whose link is measured.
        estimated: The device for which times are estimated, if they are: then its link
            counts.

    Raises:
        OptionError: If `asked` is no number of bytes above 0, `offload` is unknown, or
            the model's device is the host itself.
    """
    if offload not in get_args(Offloading):
        raise OptionError(f"offload must be 'auto' or False; got {offload!r}")
    if asked is None or offload is False:
        return None
    memory_bytes = parse_bytes(asked)
    if memory_bytes <= 0:
        raise OptionError(f"host must be a number of bytes above 0; got {asked!r}")
    if estimated is not None:
        rate = device_of(estimated).link_bytes_per_s
        return AskedHost(memory_bytes, Rates(rate, rate, 0.0))
    if not is_on_accelerator(device):
        raise OptionError(
            f"host={asked!r} is for a model on an accelerator, and this one is on the "
            "CPU: its tensors are in the host's memory already, so to move them there "
            "frees nothing. Leave host out"
        )
    return AskedHost(memory_bytes, measured_rates(device))


def _window_bytes(graph: StepGraph) -> int:
    saved = (graph.storages[index] for index in graph.saved_on)
    return FEWEST_IN_WINDOW * max((s.bytes for s in saved if s.birth >= 0), default=0)


@cache
def measured_device(device: torch.device) -> Device:
    """Measure how fast an accelerator computes; once for each process."""
    rates = {"float32": _flops_per_s(device, torch.float32)}
    for dtype in (torch.bfloat16, torch.float16):
        with suppress(RuntimeError):  # Not every device has every type.
            rates[dtype_name(dtype)] = _flops_per_s(device, dtype)
    large_s, small_s = (_copy_within_s(device, size) for size in (LARGE, SMALL))
    bytes_per_s = 2 * (LARGE - SMALL) / max(_LEAST_S, large_s - small_s)
    link = measured_rates(device).out_bytes_per_s
    return Device(f"this {device.type}, measured", rates, bytes_per_s, link)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of the largest matrix product that was timed.

    Products grow until one takes much longer than its launch, or memory runs out.
    """
    found = 0.0
    side = FIRST_SIDE
    while side <= LAST_SIDE:
        begin_s = time.perf_counter()
        try:
            product_s = _product_s(device, dtype, side)
        except torch.OutOfMemoryError:
            if side == FIRST_SIDE:
                raise
            break
        took_s = time.perf_counter() - begin_s  # A device may be emulated.
        found = 2 * side**3 / max(_LEAST_S, product_s)
        if product_s > LONG_S or took_s > PATIENCE_S:
            break
        side *= 2
    return found


def _product_s(device: torch.device, dtype: torch.dtype, side: int) -> float:
    a, b, c = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(3))

    def launch() -> Tensor:
        with torch.no_grad():
            return torch.mm(a, b, out=c)

    return median(_seconds_of(device, launch) for _ in range(REPEATS))


def _copy_within_s(device: torch.device, size: int) -> float:
    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return median(_seconds_of(device, lambda: a.copy_(b)) for _ in range(REPEATS))


@cache
def measured_rates(device: torch.device) -> Rates:
    """Measure the link between a device and the host; once for each process."""
    seconds = {
        (is_out, size): median(_copy_s(device, size, is_out) for _ in range(REPEATS))
        for is_out in (True, False)
        for size in (LARGE, SMALL)
    }
    out_rate, in_rate = (
        (LARGE - SMALL) / max(_LEAST_S, seconds[is_out, LARGE] - seconds[is_out, SMALL])
        for is_out in (True, False)
    )
    latency_s = max(0.0, seconds[True, SMALL] - SMALL / out_rate)
    return Rates(out_rate, in_rate, latency_s)


def _copy_s(device: torch.device, size: int, is_out: bool) -> float:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    target, source = (here, there) if is_out else (there, here)
    return _seconds_of(device, lambda: target.copy_(source, non_blocking=True))


def _seconds_of(device: torch.device, launch: Callable[[], object]) -> float:
    """Return how long a device takes for what a function launches."""
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream: Any = stream_of(device)
    start.record(stream)
    launch()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
