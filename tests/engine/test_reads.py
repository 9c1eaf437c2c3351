"""What a rerun finds changed of what its function can read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import membudget as mb


@pytest.mark.parametrize("verify", [True, False])
def test_rule8_other_code_may_not_change_what_the_region_wrote_only_a_part_of(verify):
    scratch = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        scratch[:2] = x.detach()[:2]
        return (x * scratch).sin()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    output = mb.checkpoint(function, x, engine="rerun", verify=verify)
    scratch[2:] = 3.0

    # The recompute writes its part again, with the same content, before it reads.
    with pytest.raises(
        mb.ChangedSinceForwardError, match="'scratch' was changed after the forward"
    ):
        output.sum().backward()


def test_rule8_what_two_calls_write_alike_is_recomputed():
    scratch = torch.zeros(4)

    def function(x: Tensor) -> Tensor:
        scratch.fill_(2.0)
        return (x * scratch.exp()).sin()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    outputs = [mb.checkpoint(function, x, engine="rerun") for _ in range(2)]
    for output in outputs:
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


class Scaled(torch.nn.Module):
    """A user's module, whose scale is a number at first."""

    scale: float | Tensor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def test_rule8_a_number_of_a_module_that_became_a_tensor_is_watched():
    model, x = Scaled(), torch.ones(3, requires_grad=True)
    for scale in (1.0, torch.tensor(2.0)):
        model.scale = scale
        for _ in range(3):
            mb.checkpoint(model, x, engine="rerun").sum().backward()
    output = mb.checkpoint(model, x, engine="rerun")
    assert isinstance(model.scale, Tensor)
    model.scale.mul_(5)
    with pytest.raises(
        mb.ChangedSinceForwardError, match="scale' was changed after the forward"
    ):
        output.sum().backward()
