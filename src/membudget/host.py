"""What a plan may use of the host: its memory, and the link between it and the device.

The link is measured once for each device, by copies of two sizes in both directions:

    bytes/s = (large - small) ÷ (time of large - time of small)
    latency = time of small - small ÷ bytes/s
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch

from membudget._torch_accelerator import is_on_accelerator, stream_of
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.moved import Host
from membudget.profile.devices import Device, device_of
from membudget.text import parse_bytes

Offloading = Literal["auto", False]

LARGE, SMALL = 4 << 20, 1 << 16
REPEATS = 3

FEWEST_IN_WINDOW = 2
"""The first window to try has room for as many of the largest saved tensors: one is
copied while the next is made."""

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
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream: Any = stream_of(device)
    start.record(stream)
    target.copy_(source, non_blocking=True)
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
