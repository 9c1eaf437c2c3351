"""Keep the state of optimizers that step inside a step which runs several times.

A step that the user wrote may train: run the forward and the backward, and then step an
optimizer. Weights are part of the model's state, momenta of the optimizer's, which the
step alone refers to. torch calls a hook before any optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from membudget._torch import is_fake
from membudget.state.snapshot import State


@contextmanager
def optimizers_kept(model: State) -> Iterator[None]:
    """Restore, on exit, the state and options of each optimizer that has stepped.

    Args:
        model: The state of the model, whose copies of weights are shared.
    """
    before: dict[Optimizer, State] = {}

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = optimizer.state, optimizer.param_groups
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        # One that is recorded on fake tensors is the profile's own.
        if optimizer not in before and not any(map(is_fake, trained)):
            before[optimizer] = State([("optimizer", held)], part_of=model)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for state in before.values():
            state.restore()
