"""G6: models on several devices, and plans that were made for another device."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import OptionError, PlanError
from tests.emulated import emu
from tests.emulated.models import DEVICE, each_block, gpt, step, unequal


class Split(nn.Module):
    """Half of its layers on one device, half on another; noise on both."""

    def __init__(self, first: str, second: str):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).to(first), nn.Linear(8, 8).to(second)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.first(x.to(self.first.weight.device)).sin())
        return self.drop(self.second(y.to(self.second.weight.device)).cos())


def split(first: str, second: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    last = nn.Linear(8, 2).to(second)
    return nn.Sequential(Split(first, second), Split(first, second), last), torch.randn(
        4, 8, device=first
    )


DEVICES = pytest.mark.parametrize(
    "devices", [("cpu", "emu:0"), ("emu:0", "cpu"), ("emu:0", "emu:1")]
)


@DEVICES
@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_g6_a_model_on_two_devices_has_the_plain_bits(devices, engine):
    assert unequal(lambda: split(*devices), each_block(engine=engine)) == ""


@DEVICES
def test_g6_a_budget_for_two_devices_is_refused(devices):
    with pytest.raises(OptionError, match="parameters of Sequential are on"):
        mb.fit(*split(*devices), "50%")


def test_g6_the_peaks_of_two_devices_are_measured_apart():
    model, batch = split("emu:0", "emu:1")
    step(model, batch)
    model.zero_grad()
    found = mb.peak(lambda: step(model, batch))
    assert [d.device for d in found.devices] == ["emu:0", "emu:1"]
    assert all(d.peak_bytes > 0 for d in found.devices)


def test_g6_a_plan_made_on_the_cpu_is_refused_where_kernels_differ():
    model, batch = gpt(4, 32)
    on_cpu = copy.deepcopy(model).cpu()
    with mb.fit(
        on_cpu, batch.cpu(), "1MiB", measure="none", mode="selective"
    ) as fitted:
        plan = fitted.plan
    assert plan.device == "cpu"
    mb.apply(model, plan)
    with pytest.raises(PlanError, match="made for cpu, where operator"):
        step(model, batch)


def test_g6_a_plan_made_on_the_cpu_applies_where_kernels_are_the_same():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    model, batch = nn.Sequential(*blocks), torch.randn(64, 16)
    with mb.fit(model, batch, "1MiB", measure="none", mode="selective") as fitted:
        plan = fitted.plan

    def made() -> tuple[nn.Module, Tensor]:
        return copy.deepcopy(model).to(DEVICE), batch.to(DEVICE)

    def wrap(model: nn.Module) -> None:
        applied.append(mb.apply(model, plan))

    applied: list[mb.Applied] = []
    assert unequal(made, wrap) == ""
    assert not any(region.differences for region in applied[0].status().regions)


def test_g6_a_plan_says_what_device_it_is_for(tmp_path):
    emu.configure(segment_bytes=512)
    model, batch = gpt()
    with mb.fit(model, batch, "100%", measure="none") as fitted:
        plan = fitted.plan
    assert plan.device == "emu"
    path = tmp_path / "plan.json"
    plan.to_json(path)
    assert mb.Plan.from_json(path) == plan
    data = plan.to_dict()
    del data["device"]
    assert mb.Plan.from_dict(data) == dataclasses.replace(plan, device="")
