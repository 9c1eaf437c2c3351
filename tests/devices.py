"""The device that a run of the tests is about: `pytest --device=NAME`, or the CPU.

Tests name no device: a fixture makes theirs the default one, so that the same tests run
on each. What is about the CPU itself is marked `cpu_only`, with the reason.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from membudget.memory.allocator import RESERVED, at_rest
from tests import shares

# Of each test function, one in so many of its cases runs on a device each time, by the
# case's name; all of them under `run.py test --all`. Of the tests of whole fits and
# plans, which take long, one function in so many runs, by its name.
SHARE, OF_FITS = 10, 2


def default_generators() -> list[torch.Generator]:
    """Return the random streams of the CPU and of the accelerator in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return [torch.default_generator]
    module = torch.get_device_module(accelerator)
    return [torch.default_generator, *module.default_generators]


def rng_state() -> torch.Tensor:
    """Return the states of those streams, one after the other."""
    return torch.cat([stream.get_state() for stream in default_generators()])


def stream_name() -> str:
    """Return what reports call the stream that operators draw from."""
    return "torch CPU" if is_cpu() else f"torch {default_device()}"


def generator() -> torch.Generator:
    """Return a private generator of the device that tensors are made on."""
    return torch.Generator(torch.get_default_device())


def is_cpu() -> bool:
    """Return whether tensors are made on the CPU."""
    return device_type() == "cpu"


def default_device() -> torch.device:
    """Return the device that tensors are made on, with its index."""
    return torch.empty(0).device


def device_type() -> str:
    """Return the type of the device that tensors are made on."""
    return torch.get_default_device().type


def elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function make tensors on this thread's device when another one runs it."""
    device = torch.get_default_device()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.device(device):
            return function(*args, **kwargs)

    return function if is_cpu() else run


def held_bytes() -> int:
    """Return what the process holds on the device that tensors are made on.

    A budget in bytes counts that, whoever holds it; on the CPU, only what a step does.
    """
    if is_cpu():
        return 0
    return at_rest(default_device())[RESERVED]


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as NumPy's, to be written where torch cannot see.

    That of the emulated device is the host's.
    """
    if tensor.is_cpu:
        return tensor.numpy()
    torch.accelerator.synchronize()
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    kind = str(tensor.dtype).removeprefix("torch.")
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    return np.ndarray(tensor.shape, kind, memory, strides=strides)


def settle() -> None:
    """Wait until autograd's thread for the device has let go of every backward pass.

    A pass returns a moment before that thread frees what the pass held. A second pass
    cannot begin there until it has.
    """
    if is_cpu() or torch._C._current_graph_task_id() >= 0:
        return
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).exp().backward()


def share_out(items: list[pytest.Item], device: str, own: Path) -> None:
    """Mark tests for a run on `device`.

    Args:
        items: The tests.
        device: The device.
        own: The folder of the tests that are about this device alone.
    """
    for item in items:
        item.add_marker("emulated")
    again = [item for item in items if own not in item.path.parents]
    for item in again:
        if reason := _cpu_only(item):
            item.add_marker(pytest.mark.skip(reason=f"not on {device}: {reason}"))
    for cases in shares.by_function(again):
        shares.leave_all_but(cases, SHARE)
    of_fits = [item for item in again if item.path.parent == own.parent]
    for cases in shares.by_function(of_fits):
        if shares.hash_of(cases[0].nodeid.split("[")[0]) % OF_FITS:
            shares.leave_out(cases)


def _cpu_only(item: pytest.Item) -> str:
    """Return why a test runs on the CPU alone, or nothing."""
    if item.get_closest_marker("distributed"):
        return "the processes that it starts have no device"
    mark = item.get_closest_marker("cpu_only")
    return str(mark.args[0]) if mark else ""
