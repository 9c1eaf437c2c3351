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

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def optimizers_kept() -> Iterator[None]:
    """Restore, on exit, the state and options of each optimizer that has stepped."""
    before: dict[Optimizer, tuple[dict[Any, Any], list[dict[str, Any]]]] = {}

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in before:
            state = {of: deepcopy(kept) for of, kept in optimizer.state.items()}
            groups = [_options(group) for group in optimizer.param_groups]
            before[optimizer] = state, deepcopy(groups)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, (state, groups) in before.items():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                group.update(options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
