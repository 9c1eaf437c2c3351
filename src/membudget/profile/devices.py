"""Look up optimizers, and the peak rates of GPUs and of this CPU, by name.

`DEVICES` lists the vendors' figures for dense matrices at boost clock:

* H100 SXM5, H200 SXM: NVIDIA H100 and H200 Tensor Core GPU data sheets (with the
  sparse figures halved).
* A100 SXM4 80 GB: NVIDIA A100 Tensor Core GPU data sheet.
* L4: NVIDIA L4 Tensor Core GPU data sheet (with the sparse figures halved).
* RTX 4090: NVIDIA Ada GPU Architecture white paper, appendix A (half precision with
  single-precision accumulation).
* MI300X: AMD Instinct MI300X accelerator data sheet.

Each host link is taken to be 16 PCI Express lanes, in one direction: 31.5 GB/s for
generation 4, and 63 GB/s for generation 5 (PCI-SIG).
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from mmap import mmap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from membudget.errors import OptionError


@dataclass(frozen=True)
class Device:
    """The peak compute rates and bandwidths of a device.

    Attributes:
        name: Name of the device in reports.
        flops_per_s: Floating-point operations per second for each dtype, such as
            `{"bfloat16": 989e12}`; unlisted dtypes use the rate of `"float32"`.
        bytes_per_s: Memory bandwidth in bytes per second.
        link_bytes_per_s: Bandwidth to the host in bytes per second, in one direction.
        memory_bytes: Size of the device's memory in bytes; 0 if unknown.
        launch_s: Seconds that each operator takes beside its kernel; 0 where kernels
            hide them, as on an accelerator.

    Raises:
        OptionError: If a rate is not positive, or `"float32"` has no rate.
    """

    name: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: int = 0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        """Reject rates that are missing or not positive."""
        if "float32" not in self.flops_per_s:
            raise OptionError(
                f"device {self.name!r} has no rate for 'float32', which all dtypes "
                "without a rate of their own use"
            )
        rates = {f"flops_per_s[{d!r}]": rate for d, rate in self.flops_per_s.items()}
        rates["bytes_per_s"] = self.bytes_per_s
        rates["link_bytes_per_s"] = self.link_bytes_per_s
        for name, rate in rates.items():
            if not rate > 0:
                raise OptionError(
                    f"device {self.name!r} has {name} = {rate}; a rate must be positive"
                )

    def seconds(self, flops: int, moved_bytes: int, dtype: str) -> float:
        """Return the duration of one operator in seconds: its launch, and its kernel.

        The kernel's is a lower bound, the roofline (Williams, Waterman and Patterson
        2009): the larger of compute time and memory time.
        """
        rate = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        return self.launch_s + max(flops / rate, moved_bytes / self.bytes_per_s)


_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30


def _nvidia(half: float, tf32: float, single: float) -> dict[str, float]:
    """Return a GPU's rates by dtype; by default, torch uses no TF32 for float32."""
    return {
        "float16": half * _TERA,
        "bfloat16": half * _TERA,
        "tf32": tf32 * _TERA,
        "float32": single * _TERA,
    }


DEVICES: dict[str, Device] = {
    "h100": Device(
        "H100 SXM5", _nvidia(989.4, 494.7, 66.9), 3.35 * _TERA, 63 * _GIGA, 80 * _GIB
    ),
    "h200": Device(
        "H200 SXM", _nvidia(989.4, 494.7, 66.9), 4.8 * _TERA, 63 * _GIGA, 141 * 10**9
    ),
    "a100": Device(
        "A100 SXM4 80 GB",
        _nvidia(312, 156, 19.5),
        2.039 * _TERA,
        31.5 * _GIGA,
        80 * _GIB,
    ),
    "l4": Device("L4", _nvidia(121, 60, 30.3), 0.3 * _TERA, 31.5 * _GIGA, 24 * _GIB),
    "rtx4090": Device(
        "RTX 4090", _nvidia(165.2, 82.6, 82.6), 1.008 * _TERA, 31.5 * _GIGA, 24 * _GIB
    ),
    "mi300x": Device(
        "MI300X",
        {
            "float16": 1307.4 * _TERA,
            "bfloat16": 1307.4 * _TERA,
            "float32": 163.4 * _TERA,
        },
        5.3 * _TERA,
        63 * _GIGA,
        192 * 10**9,
    ),
}


def device_of(device: str | Device) -> Device:
    """Look up a device by its name in `DEVICES`; for `"cpu"`, measure this CPU.

    Raises:
        OptionError: If no device has that name.
    """
    if isinstance(device, Device):
        return device
    key = device.lower().replace(" ", "").replace("-", "")
    if key == "cpu":
        return this_processor()
    if key not in DEVICES:
        known = ", ".join([*DEVICES, "cpu"])
        raise OptionError(
            f"there is no device {device!r} in the table: it has {known}. Pass a "
            "membudget.Device with the rates of yours"
        )
    return DEVICES[key]


@cache
def this_processor() -> Device:
    """Measure this CPU: a matrix product, a copy of 32 MiB, and a step of small layers.

    Their memory is not of torch's allocator, but for some hundred bytes: training under
    a budget may have begun.
    """
    size = 512
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        a, b, product = (_floats(size * size).view(size, size) for _ in range(3))
        rate = 2 * size**3 / _seconds_of(lambda: torch.mm(a, b, out=product))
        block, target = _floats(1 << 23), _floats(1 << 23)
        speed = 2 * block.nbytes / _seconds_of(lambda: target.copy_(block))
    # The CPU's memory is the host's, so a copy to the host is a copy in memory.
    rates = {"float32": rate}
    return Device("this CPU, measured", rates, speed, speed, launch_s=launch_seconds())


@cache
def launch_seconds() -> float:
    """Measure what launching an operator takes on this CPU."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        return _seconds_of(small_step(), repeats=50) / SMALL_OPERATORS


SMALL_OPERATORS = 14
"""Operators of `small_step`."""


def small_step() -> Callable[[], Tensor]:
    """Return a step of small layers, whose kernels compute next to nothing.

    What they take is what launching operators takes: the dispatcher, autograd, Python.
    """
    x, weight, bias = _floats(32).view(4, 8), _floats(64).view(8, 8), _floats(8)
    read = weight.requires_grad_(), bias.requires_grad_()

    @torch.enable_grad()
    def step() -> Tensor:
        y = F.gelu(F.layer_norm(F.linear(x, *read), (8,), bias, bias))
        return torch.autograd.grad(y, read, x)[0]

    return step


def _floats(count: int) -> Tensor:
    """Return ones in memory that is mapped for them alone."""
    return torch.frombuffer(mmap(-1, 4 * count), dtype=torch.float32).fill_(1.0)


@cache
def processor_name() -> str:
    """Return what this machine calls its processors, and how many it has."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{os.cpu_count()} × {platform.machine()} {processor_model()} {capability}"


def processor_model() -> str:
    """Return the model of this machine's processors; empty if nothing tells it."""
    with suppress(OSError):  # Only Linux has this file.
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor()


def _seconds_of(function: Callable[[], object], repeats: int = 7) -> float:
    function()  # The first call starts threads and touches new pages.
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)  # Other load only adds.


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    """Look up an optimizer class of `torch.optim` by name, ignoring case.

    Raises:
        OptionError: If `torch.optim` has no optimizer of that name.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    del classes["optimizer"]
    if name.lower() not in classes:
        raise OptionError(
            f"torch.optim has no optimizer {name!r}: it has {', '.join(classes)}"
        )
    return classes[name.lower()]
