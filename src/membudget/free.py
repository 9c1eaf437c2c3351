"""What a device has free: the budget of those who give none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import tree_iter
from membudget.errors import OptionError
from membudget.graph import StaticBytes
from membudget.memory.storage import storage_bytes

MARGIN_PERCENT = 5
"""Of what is free, for what no plan counts: the allocator's rounding and fragments."""


def free_bytes(model: Module) -> int:
    """Return what can be allocated now where a model lies, less the margin.

    Raises:
        OptionError: If it does not lie on one CUDA device.
    """
    device = _device(model)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    free = min(free, int(share * total) - reserved)
    return usable_bytes(free, reserved, torch.cuda.memory_allocated(device))


def usable_bytes(free: int, reserved: int, allocated: int) -> int:
    """Return what can be allocated, less the margin.

    Args:
        free: What the device has left.
        reserved: What the allocator took of it.
        allocated: What of that is in use.

    Example:
        >>> usable_bytes(free=700, reserved=500, allocated=200)
        950
    """
    found = free + reserved - allocated
    return found - found * MARGIN_PERCENT // 100


def budget_in_all(static: StaticBytes, optimizer: Any, usable: int) -> int:
    """Return the budget in all: what is there before the step, and what is free.

    The state of an optimizer that took no step yet is not there, and has to fit, too.

    Args:
        static: What is there in every step.
        optimizer: The optimizer, or its class, or `None`.
        usable: What can be allocated now.

    Example:
        >>> static = StaticBytes(parameters=100, buffers=0, inputs=20, optimizer=200)
        >>> budget_in_all(static, torch.optim.AdamW, 1000)
        1120
    """
    state = getattr(optimizer, "state", None)
    leaves = tree_iter(dict(state)) if isinstance(state, dict) else ()
    there = storage_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))
    absent = max(0, static.optimizer - there)
    return static.total - absent + usable


def _device(model: Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or any(device.type != "cuda" for device in devices):
        names = " and ".join(sorted(map(str, devices))) or "no device"
        raise OptionError(
            "budget=None takes what is free on the CUDA device of the model; a CPU has "
            "no budget of its own, and several devices have several. This model lies "
            f"on {names}: give bytes, such as budget='8GiB'"
        )
    return devices.pop()
