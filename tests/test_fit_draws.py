"""`fit` where random numbers decide what a step runs: the budget holds for each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from membudget import attempt

LAYERS, WIDTH = 6, 32


class Block(nn.Module):
    """A block of an MLP, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and what the block makes of it."""
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Dropping(nn.Module):
    """Blocks of which each is dropped with a probability of a half."""

    def __init__(self, on_cpu: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.device = "cpu" if on_cpu else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs."""
        for block in self.blocks:
            if torch.rand((), device=self.device) > 0.5:
                x = block(x)
        return self.head(x).sum()


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu's stream", "own stream"])
@pytest.mark.parametrize("percent", [40, 70])
def test_a_budget_holds_whichever_layers_are_dropped(percent: int, on_cpu: bool):
    torch.manual_seed(0)
    model, batch = Dropping(on_cpu), torch.randn(256, WIDTH)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)  # Two of six blocks run where `fit` begins.
    fitted = mb.fit(model, batch, f"{percent}%", measure="none")
    assert fitted.profile.draws == "L" * LAYERS
    assert "those with which it allocates most" in fitted.report()
    assert len([r for r in fitted.status().regions if r.differences]) == 0
    # A region on the model would run other operators in other steps.
    assert all(region.path.startswith("blocks.") for region in fitted.plan.regions)
    plain_peaks = []
    for seed in range(12):
        peaks, gradients = [], []
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(seed)
            peaks.append(mb.peak(lambda each=each: each(batch).backward()).peak_bytes)
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert peaks[0] <= fitted.plan.budget_bytes
        plain_peaks.append(peaks[1])
        for one, other in zip(*gradients, strict=True):
            assert one is other is None or torch.equal(one, other)
    assert max(plain_peaks) > fitted.plan.budget_bytes


def test_a_region_where_chance_decides_is_said_of_a_plan_that_has_one(monkeypatch):
    class Bare(Dropping):
        def __init__(self) -> None:
            super().__init__(True)
            self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _ in self.blocks:
                if torch.rand(()) > 0.5:
                    x = F.linear(x, self.square).relu()
            return self.head(x).sum()

    torch.manual_seed(0)
    tried, try_plan = [], attempt.try_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        return try_plan(*args, **kwargs)

    monkeypatch.setattr("membudget.recorded.try_plan", counted)
    # What its layers keep is of the model's own operators.
    fitted = mb.fit(Bare(), torch.randn(256, WIDTH), "60%", measure="none")
    assert [region.path for region in fitted.plan.regions] == [""]
    assert "no plan fits that leaves those modules without a region" in fitted.report()
    # No step ran under a plan that was known not to fit.
    assert len(tried) == len(fitted.attempts)
