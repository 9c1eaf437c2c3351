"""Keep the state of optimizers that step inside a step which runs several times.

A step that the user wrote may train: run the forward and the backward, and then step an
optimizer. Weights are part of the model's state, momenta of the optimizer's, which the
step alone refers to. torch calls a hook before any optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from membudget._torch import is_fake, without_dispatch_modes

_Pairs = dict[str, tuple[Any, Any]]  # Each value with a copy.


@contextmanager
def optimizers_kept() -> Iterator[None]:
    """Restore, on exit, the state and options of each optimizer that has stepped."""
    before: dict[Optimizer, tuple[dict[Any, _Pairs], list[_Pairs]]] = {}

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in before:
            state = {of: _copied(kept) for of, kept in optimizer.state.items()}
            groups = [_copied(group, "params") for group in optimizer.param_groups]
            before[optimizer] = state, groups

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, (state, groups) in before.items():
            optimizer.state.clear()
            optimizer.state.update({of: _restored(kept) for of, kept in state.items()})
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                group.update(_restored(options))


def _copied(values: dict[str, Any], without: str = "") -> _Pairs:
    return {k: (v, _copy(v)) for k, v in values.items() if k != without}


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if is_fake(value):  # Of an optimizer that is recorded on fake tensors.
        return value
    with without_dispatch_modes():
        return value.detach().clone()


def _restored(values: _Pairs) -> dict[str, Any]:
    """Return the values: tensors as they were, others as copies."""
    for value, copy in values.values():
        if isinstance(value, Tensor) and value is not copy:
            with torch.no_grad():
                value.copy_(copy)
    return {k: v if isinstance(v, Tensor) else copy for k, (v, copy) in values.items()}
