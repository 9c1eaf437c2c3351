"""G6: plans that were made where attention is another kernel's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.errors import PlanError
from membudget.planning import plan_for
from tests.emulated import emu
from tests.emulated.models import DEVICE, Block, outcome

KERNELS: tuple[emu.Attention, ...] = ("math", "flash", "fused")


class Chain(nn.Module):
    """A second attention at once behind the first: its products are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            x = F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)
        return x


def blocks() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*(Block(16) for _ in range(4)), nn.Linear(16, 3))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # One operator on a device, and several on the CPU.
    return model, torch.randn(8, 16, 16)


def chain() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Chain(), Chain()), torch.randn(8, 16, 16)


def plans(model: nn.Module, batch: Tensor) -> list[mb.Plan]:
    """Return plans made without the device: for a GPU, and for this CPU."""
    found = []
    for device in ("h100", None):
        profile = mb.profile(model, batch, fake=True, device=device)
        for share, mode in itertools.product((85, 60, 45), ("auto", "selective")):
            try:
                found.append(plan_for(profile, model, f"{share}%", mode))
            except mb.BudgetError:
                continue
    assert any(plan.regions for plan in found)
    return found


def refused_or_outcome(
    model: nn.Module, batch: Tensor, plan: mb.Plan
) -> str | list[Tensor]:
    """Return what a step under a plan computes, or why the plan is refused."""
    applied = mb.apply(model, plan)
    try:
        found = outcome(model, batch)
    except PlanError as error:
        return str(error)
    assert not any(region.differences for region in applied.status().regions)
    return found


@pytest.mark.parametrize("made", [pytest.param(blocks, marks=pytest.mark.slow), chain])
@pytest.mark.parametrize("kernel", KERNELS)
def test_g6_a_plan_from_the_cpu_applies_whole_or_is_refused(
    made: Callable[[], tuple[nn.Module, Tensor]], kernel: emu.Attention
):
    torch.manual_seed(1)
    model, batch = made()
    on_device = copy.deepcopy(model).to(DEVICE), batch.to(DEVICE)
    emu.configure(attention=kernel)
    plain = outcome(*copy.deepcopy(on_device))
    why: list[str] = []
    of_plans = plans(model, batch)
    for plan in of_plans:
        found = refused_or_outcome(*copy.deepcopy(on_device), plan)
        if isinstance(found, str):
            why.append(found)
        else:
            assert all(map(torch.equal, found, plain))
    assert all("made for cpu" in text for text in why)
    if kernel == "math":
        assert why
    else:
        assert len(why) < len(of_plans)
        assert all("in stages" in text for text in why)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_of_attention_has_gradients_near_those_of_the_cpu(
    kernel: emu.Attention,
):
    emu.configure(attention=kernel)
    x = torch.randn(2, 2, 8, 4)
    gradients = []
    for device in ("cpu", DEVICE):
        y = x.clone().to(device).detach().requires_grad_()
        F.scaled_dot_product_attention(
            y, y.sin(), y.cos(), is_causal=True
        ).sum().backward()
        assert y.grad is not None
        gradients.append(y.grad.cpu())
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_the_kernels_of_attention_are_other_operators():
    names = []
    for kernel in KERNELS:
        emu.configure(attention=kernel)
        x = torch.randn(2, 2, 8, 4, device=DEVICE, requires_grad=True)
        names.append(type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__)
    assert len(set(names)) == len(KERNELS)
