"""What is recorded of operators that are no plain functions."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.behaviours.steps import Region, differences
from tests.keeps import replay
from tests.oracles import CountedOperators


def gather(parameter: Tensor) -> Tensor:
    """Gather the parameters of a layer, as FSDP does, of one rank alone."""
    importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    size = parameter.numel()
    output = torch.empty(size)
    inputs = [parameter.detach().flatten()]
    torch.ops.fsdp.all_gather_copy_in(inputs, output, [size], size, 0)
    return output


@pytest.mark.parametrize(("gathers", "count"), [(True, 4), (False, 5)])
def test_no_replay_goes_back_behind_a_gathering_of_parameters(gathers, count):
    weight = nn.Parameter(torch.ones(3))

    def function(x: Tensor) -> Tensor:
        later = torch.empty(3)
        x = x.sin().sin().sin()
        if gathers:
            gather(weight)
        x = x.sin().sin()
        later.copy_(x.detach())
        return x * later

    x = torch.linspace(0, 1, 3, requires_grad=True)
    y = replay()(function)(x)
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)
    # What is alive at the gathering, the third sine, is held; the first two are not.
    assert operators.counts["sin"] == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_a_normalisation_of_any_precision_is_replayed(dtype, training):
    def step(region: Region) -> Any:
        norm = nn.BatchNorm1d(3, dtype=dtype).train(training)
        x = torch.linspace(0, 1, 6, dtype=dtype).view(2, 3).requires_grad_()
        y = region(lambda x: norm(x.sin()).exp().cos(), x)
        y.sum().backward()
        return norm, x

    def region(function: Any, *args: Any) -> Any:
        return replay()(function)(*args)

    assert differences(step, region) == []
