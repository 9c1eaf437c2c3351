"""A profile of a step that the user wrote."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.errors import OptionError
from membudget.profile import profile


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)]
    return nn.Sequential(*layers), torch.randn(8, 16)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_step_is_recorded_like_the_model_that_it_calls(fake):
    model, x = network()

    def step() -> None:
        F.mse_loss(model(x), x).backward()

    found = profile(step, modules=model, fake=fake).graph
    expected = profile(
        model, x, lambda output, batch: F.mse_loss(output, batch), fake=fake
    ).graph

    assert [o.name for o in found.operators] == [o.name for o in expected.operators]
    # The gradient of the loss itself, all ones, is made before autograd runs.
    assert found.backward_start == expected.backward_start + 1
    assert [s.bytes for s in found.storages if s.kind == "gradient"] == [
        s.bytes for s in expected.storages if s.kind == "gradient"
    ]
    assert all(p.grad is None for p in model.parameters())


def test_the_peak_of_a_step_is_the_measured_one():
    model, x = network()

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    step()
    model.zero_grad()
    measured = mb.peak(step).peak_bytes
    model.zero_grad()

    assert profile(step, modules=model).peak_bytes == pytest.approx(measured, abs=16)


def test_a_step_that_trains_leaves_the_parameters_unchanged():
    model, x = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    profile(step, modules=model)

    assert all(map(torch.equal, before, model.parameters()))


def test_a_model_without_its_batch_is_rejected():
    model, _ = network()
    with pytest.raises(OptionError, match="give the batch"):
        profile(model)


def test_a_step_with_a_batch_is_rejected():
    model, x = network()
    with pytest.raises(OptionError, match="modules= is for a step function"):
        profile(lambda: None, x, modules=model)
