"""A fitted step is compared with the plain one, as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine.controls import SWITCHES
from membudget.errors import RecomputeMismatchError
from membudget.outcome import check_against_plain
from membudget.step import Step


class Unlike(nn.Module):
    """Computes something else where no region can run."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        )
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        differs = not SWITCHES.disabled
        if self.changes == "loss" and differs:
            output = output + 1
        if self.changes == "buffer" and differs:
            self.count.add_(1)
        if self.changes == "gradient":
            output = output + (self.bias if differs else self.bias * 2)
        return output.square().mean()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(1024, 32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("loss", r"the loss and \d+ more differs"),
        ("gradient", "the gradient of 'bias' differs"),
        ("buffer", "the buffer 'count' differs"),
    ],
)
def test_what_a_fitted_step_computes_otherwise_is_an_error_that_names_it(
    changes, named, batch
):
    model = Unlike(changes)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RecomputeMismatchError, match=named):
        mb.fit(model, batch, "60%")

    assert [type(module) for module in model.modules()] == classes
    assert all(p.grad is None for p in model.parameters())


def test_what_the_plain_step_does_not_repeat_is_not_compared():
    calls = iter(range(1000))

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + next(calls))

    check_against_plain(Step(Counts(4, 4), torch.ones(2, 4), None))


def test_an_equal_step_passes_and_leaves_no_trace(batch):
    model = Unlike("nothing")
    state = torch.get_rng_state()
    with mb.fit(model, batch, "60%") as fitted:
        check_against_plain(Step(model, batch, None))
        assert fitted.plan.regions
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
