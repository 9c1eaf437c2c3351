"""`torch.emu`: what torch and its users ask of the module of a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C

Device = torch.device | str | int | None

# torch looks these up by name: whether the device has begun to work, and in a process
# that was forked from one that had.
_initialized = True

memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache

default_generators: tuple[torch.Generator, ...] = ()


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(_C._accelerator_hooks_device_count())


def current_device() -> int:
    return int(_C._accelerator_hooks_get_current_device())


def set_device(device: Device) -> None:
    _C._accelerator_hooks_set_current_device(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    return torch.Stream(torch.device("emu", _index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event("emu", enable_timing=enable_timing)


def stream(stream: torch.Stream) -> Any:
    """Return the context in which `stream` is the current one."""
    return stream


class device:  # noqa: N801
    """The context in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = _C._accelerator_hooks_maybe_exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        _C._accelerator_hooks_maybe_exchange_device(self._before)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


# The device in C++, set by `emu.py`.
emu: Any = None


def get_per_process_memory_fraction(device: Device = None) -> float:
    total = mem_get_info(device)[1]
    return (emu.allowed() or total) / total


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    emu.allow(int(fraction * mem_get_info(device)[1]) if fraction < 1 else 0)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Device = "emu") -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: Tensor, device: Device = "emu") -> None:
    default_generators[_index(device)].set_state(state)


def _index(device: Device) -> int:
    """Return the index of a device, the current one unless it says another."""
    index = (
        device
        if isinstance(device, int) or device is None
        else torch.device(device).index
    )
    return current_device() if index is None else index
