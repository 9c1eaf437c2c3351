"""No budget is what a device has free; on a CPU it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import membudget as mb
from membudget import allowance
from membudget.allowance import MARGIN_PERCENT, Budget, absent_bytes, free_budget
from membudget.errors import OptionError
from membudget.fit import fit
from membudget.graph import StaticBytes
from tests.accelerators import Allocator, pretend
from tests.devices import default_device

STATIC = StaticBytes(parameters=800, buffers=30, inputs=70, optimizer=1600)


def test_without_a_budget_a_step_gets_what_is_allocated_and_most_of_what_is_free(
    monkeypatch,
):
    device = pretend(monkeypatch)  # 1,000 bytes are free on each device.
    device.allocators[0] = Allocator(requested=300, reserved=500)
    model = nn.Linear(2, 2)
    monkeypatch.setattr(allowance, "_device_of", lambda model: torch.device("cuda:0"))
    assert free_budget(model) == 300 + (1000 + 500 - 300) * 95 // 100
    # The process may use no more than 1,200 of the device's 10,000 bytes.
    device.module.get_per_process_memory_fraction = lambda device: 0.12
    assert free_budget(model) == 300 + (1200 - 300) * 95 // 100


def test_optimizer_state_that_the_first_step_makes_is_absent():
    assert absent_bytes(STATIC, torch.optim.AdamW) == 1600
    weight = nn.Parameter(torch.ones(10))
    optimizer = torch.optim.Adam([weight])
    static = StaticBytes(parameters=40, buffers=0, inputs=0, optimizer=84)
    assert absent_bytes(static, optimizer) == 84

    weight.grad = torch.ones(10)
    optimizer.step()

    assert absent_bytes(static, optimizer) == 0


def test_on_a_device_bytes_bound_all_that_the_process_reserves():
    graph = mb.profile(nn.Linear(2, 2), torch.ones(1, 2), fake=True).graph
    asked = Budget(step_bytes=2000, before_bytes=500, absent_bytes=100)
    found = asked.on_device(graph, 700, plain_bytes=5000)
    assert (found.step_bytes, found.before_bytes) == (2500 - 800, 800)


@pytest.mark.parametrize(("asked", "step_bytes"), [("50%", 2500), ("100%", 5000)])
def test_on_a_device_a_share_is_of_what_the_plain_step_reserves(asked, step_bytes):
    plain = mb.profile(nn.Linear(2, 2), torch.ones(1, 2), fake=True)
    found = Budget.of(asked, plain).on_device(plain.graph, 700, plain_bytes=5000)
    assert (found.step_bytes, found.before_bytes) == (step_bytes, 700)
    unmeasured = Budget.of(asked, plain).on_device(plain.graph, 700, plain_bytes=None)
    assert unmeasured.step_bytes == Budget.of(asked, plain).step_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_has_no_budget_of_its_own(device):
    model = nn.Linear(4, 4, device=device)
    with pytest.raises(OptionError, match=f"is on {device}: give bytes, such as"):
        fit(model, torch.ones(2, 4, device=device))


def test_a_model_on_no_device_or_on_several_needs_a_budget():
    with pytest.raises(OptionError, match="is on no device: give bytes"):
        free_budget(nn.GELU())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(OptionError, match=f"is on {default_device()} and meta: give"):
        free_budget(model)


def test_without_a_budget_no_step_is_run_on_a_cpu():
    class Never(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it ran")

    with pytest.raises(OptionError, match="budget=None"):
        fit(Never(4, 4, device="cpu"), torch.ones(2, 4, device="cpu"), None)


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
