"""The device `emu`: an accelerator emulated on the CPU.

To import this module compiles the device, once for each torch and each change of its
sources, and registers it for the rest of the process:

    from tests.emulated import emu

    emu.configure(mode="lazy", limit_bytes=1 << 22)
    model.to("emu")  # or "emu:1": there are two

`device/queue.h` says what the modes mean, `device/memory.h` what counts as reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

# Shapes of the operators that have none in C++.
import torch._meta_registrations  # noqa: F401
from torch.utils import backend_registration

from tests.emulated import device_module
from tests.emulated.library import DEVICE

Mode = Literal["eager", "lazy", "threads"]
Attention = Literal["math", "flash", "fused"]


def _register() -> None:
    backend_registration.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    device_module.emu = _EMU
    device_module.default_generators = tuple(
        _EMU.default_generator(index) for index in range(_EMU.device_count)
    )


_EMU = DEVICE.imported("_emu")
_register()


def configure(
    *,
    mode: Mode = "lazy",
    limit_bytes: int = 0,
    fail_at: int = 0,
    segment_bytes: int = 2 << 20,
    poison: bool = True,
    attention: Attention = "math",
    flops_per_s: float = 50e12,
    bytes_per_s: float = 1e12,
    link_bytes_per_s: float = 25e9,
    link_latency_s: float = 0.0,
    launch_s: float = 5e-6,
    kernel_s: Mapping[str, float] | None = None,
) -> None:
    """Wait for the device, then let it work as the arguments say; without any, as new.

    Args:
        mode: When work runs: as it is launched, when somebody waits for it, or on a
            thread for each stream.
        limit_bytes: What a device may reserve before it raises; 0 means no limit.
        fail_at: Which allocation from now on raises; 0 means none.
        segment_bytes: What the allocator reserves for small blocks, CUDA's 2 MiB; its
            other sizes scale with it. With 0, each block is a segment of the bytes
            requested, and goes back when it is freed. A change empties the cache.
        poison: Whether fresh and freed memory is filled with NaN.
        attention: What serves attention: operators, the CPU's fused one, or the fused
            one that accelerators have; both take no dropout.
        flops_per_s: What products of matrices and convolutions cost at least.
        bytes_per_s: What a kernel costs at least, by what it reads and writes.
        link_bytes_per_s: What a copy between host and device costs.
        link_latency_s: What such a copy costs beside its bytes.
        launch_s: What the host spends on each launch.
        kernel_s: What kernels cost, by the operator's name, such as `mm`.
    """
    _EMU.configure(
        *(mode, limit_bytes, fail_at, segment_bytes, poison, attention),
        *(flops_per_s, bytes_per_s, link_bytes_per_s, link_latency_s, launch_s),
        dict(kernel_s or {}),
    )


def counters() -> dict[str, int]:
    """Return what was counted: launches, waits of the host, its virtual time, ..."""
    return dict(_EMU.counters())


def host_seconds() -> float:
    """Return the virtual time of the host."""
    return counters()["host_time_ps"] / 1e12
