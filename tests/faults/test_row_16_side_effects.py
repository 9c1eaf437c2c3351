"""Row 16: side effects of a region happen twice, and hooks do not pair up.

Code that appends an auxiliary loss to a list, logs or counts does so again in the
recompute. With early stop the last layer's forward pre-hook runs twice, its forward
hook once, so whatever is pushed in one and popped in the other is left over.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    torch_fails,
    torch_rerun,
)


class Block(nn.Module):
    """Two layers, of which the first adds to a list of auxiliary losses."""

    def __init__(self, losses: list[Tensor], guarded: bool) -> None:
        super().__init__()
        self.losses = losses
        self.guarded = guarded
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if not (self.guarded and mb.is_recomputing()):
            self.losses.append(x.detach().square().mean())
        return self.last(x)


def model_of_one_block(losses: list[Tensor], guarded: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(losses, guarded))


def log_hooks(module: nn.Module, log: list[str]) -> None:
    """Log each call of a pre-hook and a forward hook, and whether it recomputes."""

    def entry(event: str) -> None:
        log.append(f"{event} again" if mb.is_recomputing() else event)

    module.register_forward_pre_hook(lambda _m, _i: entry("pre"))
    module.register_forward_hook(lambda _m, _i, _o: entry("post"))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()


def test_row16_hooks_of_the_wrapped_module_run_once() -> None:
    model = model_of_one_block([])
    log: list[str] = []
    mb.apply(model, blocks=Block)
    log_hooks(model[0], log)
    step(model)

    assert log == ["pre", "post"]


def test_row16_hooks_that_were_there_before_run_once() -> None:
    model = model_of_one_block([])
    log: list[str] = []
    log_hooks(model[0], log)
    mb.apply(model, blocks=Block)
    step(model)

    assert log == ["pre", "post"]


def test_row16_hooks_inside_can_tell_the_recompute_from_the_forward() -> None:
    block = model_of_one_block([])[0]
    log: list[str] = []
    log_hooks(block.get_submodule("first"), log)
    mb.checkpoint(block, torch.ones(2, 4, requires_grad=True)).square().sum().backward()

    assert log == ["pre", "post", "pre again", "post again"]


def test_row16_hooks_inside_pair_up_without_early_stop() -> None:
    block = model_of_one_block([])[0]
    log: list[str] = []
    log_hooks(block.get_submodule("last"), log)
    x = torch.ones(2, 4, requires_grad=True)
    mb.checkpoint(block, x, early_stop=False).square().sum().backward()

    assert log == ["pre", "post", "pre again", "post again"]


def test_row16_auxiliary_loss_is_appended_once_when_guarded() -> None:
    losses: list[Tensor] = []
    model = model_of_one_block(losses)
    mb.apply(model, blocks=Block)
    step(model)

    assert len(losses) == 1


def test_row16_nothing_recomputes_in_forward_and_after_backward() -> None:
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        seen.append(mb.is_recomputing())
        return x.sin()

    y = mb.checkpoint(region, torch.ones(3, requires_grad=True))
    seen.append(mb.is_recomputing())
    y.sum().backward()
    seen.append(mb.is_recomputing())

    assert seen == [False, False, True, False]


@torch_fails
def test_row16_torch_runs_hooks_twice_and_leaves_them_unpaired() -> None:
    block = model_of_one_block([])[0]
    outer: list[str] = []
    inner: list[str] = []
    log_hooks(block, outer)
    log_hooks(block.get_submodule("last"), inner)
    checkpoint: Checkpoint = torch_rerun
    checkpoint(block, torch.ones(2, 4, requires_grad=True)).square().sum().backward()

    assert outer == ["pre", "post", "pre"]
    assert inner == ["pre", "post", "pre"]


@torch_fails
def test_row16_torch_appends_the_auxiliary_loss_twice() -> None:
    losses: list[Tensor] = []
    block = model_of_one_block(losses)[0]
    torch_rerun(block, torch.ones(2, 4, requires_grad=True)).square().sum().backward()

    assert len(losses) == 2
