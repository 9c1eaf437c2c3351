"""The implementations of a region that the fault tests hold side by side.

A scenario is a function that takes one of these and returns what came out of a step:
gradients, buffers, counts. The same scenario runs plain, which says what is right,
with membudget, which must equal it, and with `torch.utils.checkpoint`, whose failing
outcome is asserted as the row of the table of faults describes it. So a scenario that
stops provoking the fault is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import membudget as mb

# Called as `checkpoint(function, *args, **kwargs)`; returns what `function` returns.
Checkpoint = Callable[..., Any]

ours: Checkpoint = mb.checkpoint
torch_rerun: Checkpoint = partial(
    torch.utils.checkpoint.checkpoint, use_reentrant=False
)
torch_reentrant: Checkpoint = partial(
    torch.utils.checkpoint.checkpoint, use_reentrant=True
)

# The companions assert what one release of torch does wrong; another may do better.
torch_fails = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"the fault is known of torch 2.13, this is {torch.__version__}",
)


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without a region."""
    return function(*args, **kwargs)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of each parameter's gradient by name."""
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each buffer by name."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two results are the same to the last bit.

    Results are tensors, or dicts and sequences of them; everything else is compared
    by `==`.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            are_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return bool(first == second)
