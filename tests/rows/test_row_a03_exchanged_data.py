"""Row A3: a source whose `.data` was exchanged is no longer the one that was read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import membudget as mb


@pytest.mark.parametrize("verify", [True, False, "fingerprints"])
def test_row_a03_a_replay_that_would_read_another_memory_raises(verify: object):
    parameter = torch.nn.Parameter(torch.full((4,), 0.5))
    x = torch.ones(4, requires_grad=True)
    region = mb.checkpoint(engine="replay", verify=verify)
    y = region(lambda x: (x * parameter).sin().exp())(x)

    parameter.data = parameter.data + 5

    with pytest.raises(mb.ChangedSinceForwardError, match=r"parameter .* was changed"):
        y.sum().backward()


def test_row_a03_what_autograd_saved_itself_is_what_the_plain_step_would_take():
    def gradient(region: bool) -> Tensor:
        parameter = torch.nn.Parameter(torch.full((4,), 0.5))
        x = torch.ones(4, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            return x * parameter

        y = mb.checkpoint(engine="replay")(function)(x) if region else function(x)
        parameter.data = parameter.data + 5
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_row_a03_an_exchange_that_nobody_reads_changes_nothing():
    parameter = torch.nn.Parameter(torch.full((4,), 0.5))
    x = torch.ones(4, requires_grad=True)
    y = mb.checkpoint(engine="replay")(lambda x: x.sin() + parameter.sum())(x)
    parameter.data = parameter.data + 5
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4).cos())


@pytest.mark.parametrize("verify", [True, "fingerprints"])
def test_row_a03_a_source_that_is_written_behind_its_version_is_found_by_its_content(
    verify: bool | str,
):
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return (x @ weight).sin()

    loss = mb.checkpoint(function, x, engine="replay", verify=verify).sum()
    weight.data.mul_(2)

    with pytest.raises(mb.ChangedSinceForwardError, match="weight"):
        loss.backward()


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_row_a03_a_region_that_exchanges_its_own_argument_is_told_so(engine: str):
    parameter = torch.nn.Parameter(torch.ones(4))

    def function(parameter: Tensor) -> Tensor:
        y = parameter.sin()
        parameter.data = parameter.data + 5
        return y.exp()

    y = mb.checkpoint(function, parameter, engine=engine)
    with pytest.raises(mb.ChangedSinceForwardError, match="by the region itself"):
        y.sum().backward()
