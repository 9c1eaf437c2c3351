"""The accelerator of this process: CUDA, XPU, MPS, or one that was plugged in.

A process has one kind of accelerator, and `torch.accelerator` serves all kinds alike.
What it lacks is looked up by name in the accelerator's own module (`torch.cuda`,
`torch.xpu`, `torch.mps`, or what a backend registered), so that no other code of ours
names a kind. Only MPS needs a line of its own, because it hides its generator.

Nothing is decided at import: a backend may register later, and a process may begin to
use its accelerator at any time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils import _foreach_utils

from membudget.errors import CheckpointError, OptionError

HOST = torch.device("cpu")

Stats = dict[str, int]

UndoList = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""What a `Scope` is: functions to be called when it ends."""


def kind() -> str | None:
    """Return the type of the accelerator's devices; `None` if torch knows none."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def main_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the accelerator's device with most bytes of `tensors`, or the CPU."""
    sizes = Counter[torch.device]()
    for tensor in tensors:
        if is_on_accelerator(tensor.device):
            sizes[tensor.device] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else HOST


def is_in_use() -> bool:
    """Return whether the process has begun to use its accelerator; takes 0.1 µs."""
    found = torch.accelerator.current_accelerator()
    return found is not None and bool(_asks_whether_in_use(found.type)())


def is_on_accelerator(device: torch.device) -> bool:
    """Return whether a device is one of the accelerator's."""
    return device != HOST and device.type not in ("cpu", "meta")  # A name takes 0.2 µs.


def counts_on(device: torch.device, other: torch.device) -> bool:
    """Return whether bytes on `other` are among those of a step on `device`.

    Those of the host are not among those of an accelerator, which run out apart.
    """
    return not is_on_accelerator(device) or other == device


def in_use() -> tuple[torch.device, ...]:
    """Return the accelerator's devices on which this process holds memory."""
    name = kind()
    if name is None or not is_in_use():
        return ()
    devices = [torch.device(name, i) for i in range(torch.accelerator.device_count())]
    if len(devices) == 1:
        return tuple(devices)
    return tuple(d for d in devices if torch.accelerator.memory_reserved(d))


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work that was launched on devices of the accelerator."""
    for device in devices:
        torch.accelerator.synchronize(device)


def is_capturing() -> bool:
    """Return whether work is captured into a graph now, so that nobody may wait."""
    if not is_in_use():
        return False
    ask = getattr(_module(kind()), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def name_of(device: torch.device) -> str:
    """Return what a device of the accelerator calls itself; empty for a CPU."""
    if device.type == "cpu":
        return ""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        return str(device)
    ask = getattr(_module(device.type), "get_device_properties", None)
    described = str(device) if ask is None else str(ask(device))
    return f"{described} {getattr(torch.version, device.type, None)}"


def foreach_devices() -> list[str]:
    """Return the types of devices on which optimizers update all parameters at once."""
    return _foreach_utils._get_foreach_kernels_supported_devices()


# Random numbers.


def generators() -> tuple[Generator, ...]:
    """Return the default generator of each device; empty if none can be read."""
    name = kind()
    if name is None or not is_in_use():
        return ()
    module = _module(name)
    if name == "mps":
        return (module._get_default_mps_generator(),)
    return tuple(getattr(module, "default_generators", ()))


def generator_of(device: torch.device) -> Generator:
    """Return the generator from which operators on a device draw by default.

    Raises:
        CheckpointError: If no one can read the generator's state.
    """
    if not is_on_accelerator(device):
        return torch.default_generator
    index: Any = device.index
    if index is None and device.type == kind():
        index = torch.accelerator.current_device_index()
    found = generators() if device.type == kind() else ()
    if index is None or index >= len(found):
        raise CheckpointError(
            f"the state of the random generator of {device} cannot be read, so a "
            f"recompute could not repeat what is drawn there: torch.{device.type} has "
            "no default_generators. Pass preserve_rng_state=False and engine='rerun' "
            "for code that draws nothing"
        )
    generator: Generator = found[index]
    return generator


def check_repeatable(devices: Iterable[torch.device]) -> None:
    """Raise unless what is drawn on each of these devices can be drawn again.

    Raises:
        CheckpointError: If the state of a device's generator cannot be read.
    """
    for device in devices:
        generator_of(device)


# Streams.


def current_stream() -> Any:
    """Return the stream on which work is launched now; `None` if none is in use."""
    return torch.accelerator.current_stream() if is_in_use() else None


def stream_of(device: torch.device) -> Any:
    """Return the stream on which work on a device is launched; `None` for the CPU."""
    is_there = is_in_use() and device.type == kind()
    return torch.accelerator.current_stream(device) if is_there else None


def enter_stream(stream: Any, scope: UndoList) -> None:
    """Launch work on `stream`, and on its device, until `scope` ends.

    It runs after all that was launched on the stream that is left, which in turn waits
    for it at the end of the scope.
    """
    left = torch.accelerator.current_stream()
    if left == stream:
        return
    of_device = torch.accelerator.current_stream(stream.device_index)
    scope.append((_leave_stream, (stream, of_device, left)))
    stream.wait_stream(left)
    torch.accelerator.set_stream(stream)  # Its device becomes the current one, too.


def _leave_stream(stream: Any, of_device: Any, left: Any) -> None:
    left.wait_stream(stream)
    torch.accelerator.set_stream(of_device)
    if left != of_device:
        torch.accelerator.set_stream(left)


def lend_to_current_stream(tensor: Tensor, made_on: Any) -> None:
    """Let work that is launched now use a tensor that was made on another stream."""
    is_there = is_on_accelerator(tensor.device)
    device = tensor.device.index if is_there else made_on.device_index
    now = torch.accelerator.current_stream(device)
    if now != made_on:
        now.wait_stream(made_on)
        if is_there:
            tensor.record_stream(now)


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""What a thread that has begun a backward pass runs until the pass ends."""


def waits_in_backward(thread: int) -> bool:
    """Return whether a thread waits for a backward pass that it has begun.

    Autograd computes the gradients of each device in a thread of its own.
    """
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is _RUN_BACKWARD


# Memory.


def memory_stats(device: torch.device) -> Stats:
    """Return the statistics of a device's allocator, by torch's names.

    Raises:
        OptionError: If the allocator keeps none.
    """
    try:
        found = dict(torch.accelerator.memory_stats(device))
    except (RuntimeError, NotImplementedError) as error:
        raise OptionError(
            f"the allocator of {device} keeps no statistics, so nobody can tell what a "
            f"step takes there: {str(error).splitlines()[0]}"
        ) from error
    return {key: int(found.get(key, 0)) for key in STATISTICS}


FAILURES = "num_ooms"

STATISTICS = (
    *(
        f"{kind}_bytes.all.{when}"
        for kind in ("requested", "allocated", "reserved")
        for when in ("current", "peak")
    ),
    FAILURES,
)
"""What the meter reads: bytes asked for, rounded up to blocks, and taken from the
device, of which freed blocks are a part; and how many allocations have failed."""


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device.

    They are free on the device, within the process's share, or cached for reuse.
    """
    free, total = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    # Only some accelerators have such a limit.
    share = getattr(_module(device.type), "get_per_process_memory_fraction", None)
    if share is not None:
        free = min(free, int(share(device) * total) - reserved)
    return int(free + reserved - torch.accelerator.memory_allocated(device))


def can_be_limited(device: torch.device) -> bool:
    """Return whether this process can limit what it reserves on a device."""
    module = _module(device.type) if is_on_accelerator(device) else None
    return hasattr(module, "set_per_process_memory_fraction") and hasattr(
        module, "get_per_process_memory_fraction"
    )


@contextmanager
def limited(device: torch.device, limit_bytes: int | None) -> Iterator[None]:
    """Let allocations fail by which this process would reserve more on a device.

    Before they do, the allocator gives back the free blocks that it keeps.
    """
    if limit_bytes is None:
        yield
        return
    module = _module(device.type)
    before = module.get_per_process_memory_fraction(device)
    share = (limit_bytes + 0.5) / torch.accelerator.get_memory_info(device)[1]
    module.set_per_process_memory_fraction(min(before, share), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(before, device)


@cache
def _module(name: str | None) -> Any:
    return torch.get_device_module(name)


@cache
def _asks_whether_in_use(name: str) -> Any:
    module = _module(name)
    return getattr(module, "is_initialized", None) or module.is_available
