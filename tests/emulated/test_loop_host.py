"""Loops under a budget whose plans move tensors to the host, on the device.

Each keeps the bits of the plain loop, the budget of the device, and the bound of the
host. The link is taken to be fast where plans are made, and is not: what is live does
not depend on when copies end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import host
from membudget.host import Rates, measured_device
from membudget.loop import host_room
from membudget.profile.devices import Device
from tests.emulated import emu

HOST_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans take copies to be fast, and kernels to be slow."""
    device = Device("slow", {"float32": 1e9}, 1e9, 1e12)
    monkeypatch.setattr(host, "measured_rates", lambda _: Rates(1e12, 1e12, 0.0))
    monkeypatch.setattr(host_room, "measured_device", lambda _: device)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4))).to("emu")


Batches = Sequence[int]
Train = Callable[[nn.Module, Batches], None]


def accumulating(model: nn.Module, batches: Batches) -> None:
    """Add up the gradients of two micro-batches before each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number, rows in enumerate(batches):
        model(inputs(rows, number)).square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def pairing(model: nn.Module, batches: Batches) -> None:
    """Run two forwards before each backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, rows in enumerate(batches):
        one, other = (model(inputs(rows, 2 * number + k)) for k in range(2))
        (one - other).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def inputs(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator).to("emu")


def settled_bytes() -> int:
    """Return what is live on the device, and let its peak begin there."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def trained(
    train: Train,
    batches: Batches,
    budget: int = 0,
    plan: Path | None = None,
    host_bytes: int = HOST_BYTES,
) -> tuple[list[Tensor], int, mb.Budgeted | None]:
    """Train; return the weights, the peak beside what lived before, and the budget."""
    emu.configure(segment_bytes=0, launch_s=0, link_bytes_per_s=1e8)
    before = settled_bytes()
    model, fitted = mlp(), None
    if budget:
        known = plan if plan and plan.exists() else None
        fitted = mb.budget(model, budget + before, host=host_bytes, plan=known)
        with fitted:
            train(model, batches)
        if plan is not None:
            fitted.save(plan)
    else:
        train(model, batches)
    torch.accelerator.synchronize()
    peak_bytes = torch.accelerator.max_memory_allocated() - before
    return [p.detach().cpu() for p in model.parameters()], peak_bytes, fitted


def moved(fitted: mb.Budgeted | None, host_bytes: int = HOST_BYTES) -> bool:
    """Check the bound of the host; return whether anything was moved there."""
    assert fitted is not None
    (room,) = {root.host for root in fitted._roots}
    assert room is not None
    status = room.offload.status()
    assert status.most_host_bytes <= status.host_bytes <= host_bytes
    return status.out_bytes > 0


SAME, CHANGING = (512,) * 4, (512, 384, 448, 320, 512, 256)


@pytest.mark.parametrize(
    ("train", "batches"),
    [
        (accumulating, CHANGING),
        (pairing, SAME),
        pytest.param(accumulating, SAME, marks=pytest.mark.slow),
        pytest.param(pairing, CHANGING, marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_moves_tensors_keeps_its_bits_and_both_bounds(train, batches):
    plain, plain_bytes, _ = trained(train, batches)
    budget = int(0.6 * plain_bytes)
    found, peak_bytes, fitted = trained(train, batches, budget)
    assert all(map(torch.equal, found, plain))
    assert peak_bytes <= budget
    assert moved(fitted)
    assert "moved to the host, at most" in str(fitted)


def test_a_saved_plan_moves_tensors_from_the_first_micro_batch_on(tmp_path):
    batches, plan = SAME, tmp_path / "plan.json"
    plain, plain_bytes, _ = trained(accumulating, batches)
    budget = int(0.6 * plain_bytes)
    for _ in range(2):
        found, peak_bytes, fitted = trained(accumulating, batches, budget, plan)
        assert all(map(torch.equal, found, plain))
        assert peak_bytes <= budget
        assert moved(fitted)
    assert fitted is not None
    assert all(situation.plans == 0 for situation in fitted.status().situations)


def test_where_the_host_has_less_than_a_saved_plan_needs_another_is_made(tmp_path):
    batches, plan = SAME, tmp_path / "plan.json"
    plain, plain_bytes, _ = trained(accumulating, batches)
    budget = int(0.6 * plain_bytes)
    trained(accumulating, batches, budget, plan)
    less = (accumulating, batches, budget, plan, HOST_BYTES // 8)
    found, peak_bytes, fitted = trained(*less)
    assert all(map(torch.equal, found, plain))
    assert peak_bytes <= budget
    moved(fitted, HOST_BYTES // 8)  # Checks the bound; whether it moves is its choice.
    assert fitted is not None
    assert any(situation.plans > 0 for situation in fitted.status().situations)


def test_without_the_host_a_plan_that_was_saved_with_it_is_left_aside(tmp_path):
    plan = tmp_path / "plan.json"
    trained(accumulating, (8,), 1 << 30, plan)
    with (
        pytest.warns(mb.BudgetWarning, match="a different use of host memory"),
        mb.budget(mlp(), 1 << 30, plan=plan),
    ):
        pass


def test_the_rates_of_a_device_are_measured():
    emu.configure(launch_s=0, flops_per_s=1e10, bytes_per_s=1e9)
    measured_device.cache_clear()
    found = measured_device(torch.device("emu", 0))
    measured_device.cache_clear()
    assert found.flops_per_s["float32"] == pytest.approx(1e10, rel=0.01)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.01)


def stepped(fitted: mb.Budgeted, model: nn.Module, number: int) -> None:
    """Run one micro-batch, again if it fails."""

    def micro_batch() -> Tensor:
        loss = model(inputs(512, number)).square().mean()
        loss.backward()
        return loss.detach()

    fitted.step(micro_batch)


def fitted_steps(
    budget: int, fail_at: int, plan: mb.Plan | None = None
) -> tuple[list[Tensor], int, mb.Budgeted]:
    """Train; let an allocation of the last micro-batch fail; count the retries."""
    emu.configure(segment_bytes=0, launch_s=0, link_bytes_per_s=1e8)
    before = settled_bytes()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mb.budget(model, budget + before, host=HOST_BYTES, plan=plan) as fitted:
        for number in range(4):
            if number == 3:
                emu.configure(segment_bytes=0, launch_s=0, fail_at=fail_at)
            stepped(fitted, model, number)
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    weights = [p.detach().cpu() for p in model.parameters()]
    return weights, fitted.status().retries, fitted


@pytest.mark.slow
def test_a_micro_batch_that_moves_tensors_runs_again_after_a_failed_allocation():
    _, plain_bytes, _ = trained(accumulating, SAME)
    budget = int(0.6 * plain_bytes)
    expected, _, fitted = fitted_steps(budget, 0)
    assert moved(fitted)
    retried = 0
    for fail_at in range(1, 51):
        found, retries, _ = fitted_steps(budget, fail_at, fitted.plan)
        assert all(map(torch.equal, found, expected)), fail_at
        retried += retries
    assert retried > 35
