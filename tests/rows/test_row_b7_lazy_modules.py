"""Row B7: lazy modules, whose first forward draws their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from tests.behaviours.steps import Region, differences, region_with

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def lazy() -> nn.Sequential:
    """Return layers of which some draw their parameters, and one draws a mask."""
    return nn.Sequential(
        nn.LazyLinear(4),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.LazyBatchNorm1d(),
        nn.Linear(4, 2),
    )


def step(region: Region) -> Any:
    """Run three steps from parameters that are not there yet."""
    model, outputs = lazy(), []
    for _ in range(3):
        x = torch.randn(3, 5, requires_grad=True)
        y = region(model, x)
        y.square().sum().backward()
        outputs += [x, y]
    return model, outputs


REGIONS = {
    "auto": mb.checkpoint,
    "replay": region_with(engine="replay"),
    "unverified": region_with(engine="replay", verify=False),
    "matmuls": region_with(keep=mb.policies.matmuls),
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_row_b7_a_region_over_lazy_modules_is_plain_from_the_first_step(region) -> None:
    assert differences(step, region) == []


def test_row_b7_a_rerun_over_lazy_modules_says_what_to_do() -> None:
    model, x = lazy(), torch.randn(3, 5, requires_grad=True)
    with pytest.raises(mb.CheckpointError, match="Run one forward outside of every"):
        mb.checkpoint(model, x, engine="rerun")
    with pytest.raises(
        mb.ReentrantLimitError, match="run one forward outside of every"
    ):
        mb.checkpoint(model, x, use_reentrant=True)
    model(x)
    mb.checkpoint(model, x, engine="rerun").sum().backward()
    mb.checkpoint(model, x, use_reentrant=True).sum().backward()


@pytest.mark.parametrize("selection", [{"blocks": nn.Linear}, {"names": "0"}])
def test_row_b7_a_lazy_module_carries_no_region_before_its_first_forward(
    selection,
) -> None:
    model = lazy()
    with pytest.raises(mb.SelectionError, match=r"'0' cannot carry .* run one forward"):
        mb.apply(model, **selection)
    model(torch.randn(3, 5))
    applied = mb.apply(model, **selection)
    model(torch.randn(3, 5)).sum().backward()
    assert applied.status().regions[0].forwards == 1


def test_row_b7_a_block_with_lazy_modules_inside_carries_a_region() -> None:
    def applied_step(region: Region) -> Any:
        model = nn.Sequential(lazy(), nn.Tanh())
        if region is mb.checkpoint:
            mb.apply(model, blocks=nn.Sequential)
        x = torch.randn(3, 5, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        return x, y, list(model.parameters()), list(model.buffers())

    assert differences(applied_step) == []
