"""No budget is what a device has free; on a CPU it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.budget import MARGIN_PERCENT, budget_in_all, free_bytes, usable_bytes
from membudget.errors import OptionError
from membudget.fit import fit
from membudget.graph import StaticBytes

STATIC = StaticBytes(parameters=800, buffers=30, inputs=70, optimizer=1600)


@pytest.mark.parametrize(
    ("free", "reserved", "allocated"),
    [(0, 0, 0), (10**10, 0, 0), (10**9, 5 * 10**8, 10**8), (0, 1000, 1000), (19, 1, 1)],
)
def test_what_is_usable_is_free_or_reserved_and_unused_less_the_margin(
    free, reserved, allocated
):
    found = usable_bytes(free, reserved, allocated)

    whole = free + reserved - allocated
    assert 0 <= found <= whole
    assert whole - found == whole * MARGIN_PERCENT // 100


def test_what_is_there_counts_in_the_budget_and_state_that_is_not_there_has_to_fit():
    assert budget_in_all(STATIC, torch.optim.AdamW, 5000) == 900 + 5000
    without = StaticBytes(parameters=800, buffers=30, inputs=70, optimizer=0)
    assert budget_in_all(without, None, 5000) == 900 + 5000


def test_state_that_an_optimizer_has_already_is_there():
    weight = nn.Parameter(torch.ones(10))
    optimizer = torch.optim.Adam([weight])
    static = StaticBytes(parameters=40, buffers=0, inputs=0, optimizer=84)
    assert budget_in_all(static, optimizer, 1000) == 40 + 1000

    weight.grad = torch.ones(10)
    optimizer.step()

    assert budget_in_all(static, optimizer, 1000) == 40 + 84 + 1000


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_has_no_budget_of_its_own(device):
    model = nn.Linear(4, 4, device=device)
    with pytest.raises(OptionError, match=f"is on {device}: give bytes, such as"):
        fit(model, torch.ones(2, 4, device=device))


def test_a_model_on_no_device_or_on_several_needs_a_budget():
    with pytest.raises(OptionError, match="is on no device: give bytes"):
        free_bytes(nn.GELU())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(OptionError, match="is on cpu and meta: give bytes"):
        free_bytes(model)


def test_without_a_budget_no_step_is_run_on_a_cpu():
    class Never(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it ran")

    with pytest.raises(OptionError, match="budget=None"):
        fit(Never(4, 4), torch.ones(2, 4), None)


@pytest.mark.cuda
def test_a_step_is_fitted_into_what_the_device_has_free():
    torch.cuda.empty_cache()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
    batch = torch.randn(32, 64, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    with fit(model, batch, optimizer=torch.optim.AdamW) as fitted:
        budget = fitted.plan.budget_bytes
    assert fitted.plan.regions == ()
    assert budget <= free * (100 - MARGIN_PERCENT) // 100 + (64 << 20)
    assert budget > free * (90 - MARGIN_PERCENT) // 100


@pytest.mark.cuda
def test_a_device_that_is_nearly_full_makes_a_plan():
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)]
    model = nn.Sequential(*layers).cuda()
    batch = torch.randn(1 << 16, 1024, device="cuda")
    plain = mb.profile(model, batch).peak_bytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    others = torch.empty(free - plain * 7 // 10, dtype=torch.uint8, device="cuda")
    with fit(model, batch) as fitted:
        assert fitted.plan.regions
        assert fitted.peak_bytes <= fitted.plan.budget_bytes < plain
    del others
