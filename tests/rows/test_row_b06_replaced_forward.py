"""Row B6: a module whose `forward` was replaced on the instance carries a region.

Accelerate's hooks, PEFT and some wrappers do that; such modules were refused.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb


class Hook:
    """What accelerate sets: it calls the forward that was there before."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = module.forward
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.before(*args, **kwargs) * 2


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def hooked() -> tuple[nn.Sequential, Hook]:
    model = nn.Sequential(block(), block())
    hook = Hook(model[0])
    model[0].forward = hook
    return model, hook


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(0, 1, 32).view(4, 8)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_row_b06_a_region_runs_around_a_replaced_forward(engine):
    model, hook = hooked()
    expected = gradients(model)
    applied = mb.apply(model, names="0", engine=engine)

    assert all(map(torch.equal, gradients(model), expected))
    assert applied.status().regions[0].recomputes == 1
    # A rerun calls what the forward called, a replay does not.
    assert hook.calls == (3 if engine == "rerun" else 2)


def test_row_b06_removing_the_region_leaves_the_replaced_forward():
    model, hook = hooked()
    before = dict(model[0].__dict__)
    expected = gradients(model)
    mb.apply(model, names="0").remove()

    assert model[0].__dict__ == before
    assert model[0].forward is hook
    assert all(map(torch.equal, gradients(model), expected))


def test_row_b06_a_forward_that_is_replaced_later_stays_after_removal():
    model, hook = hooked()
    applied = mb.apply(model, names="0")
    later = Hook(model[0])
    model[0].forward = later
    applied.remove()

    assert model[0].forward is later
    assert later.before is not hook


def test_row_b06_a_copy_has_the_replaced_forward_and_no_region():
    model, _ = hooked()
    expected = gradients(model)
    mb.apply(model, names="0")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is nn.Sequential
        assert isinstance(copied[0].forward, Hook)
        assert copied[0].forward.module is copied[0]
        assert all(map(torch.equal, gradients(copied), expected))


def test_row_b06_a_model_with_a_replaced_forward_is_fitted():
    model = nn.Sequential(*(block() for _ in range(6)))
    for module in model:
        module.forward = Hook(module)
    expected = gradients(model)
    model.zero_grad()
    fitted = mb.fit(model, torch.randn(512, 8), "70%")

    assert fitted.plan.regions
    assert fitted.audit().equal
    assert all(map(torch.equal, gradients(model), expected))
