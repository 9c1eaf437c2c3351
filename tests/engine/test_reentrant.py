"""The reentrant variant: right where it can be, an error where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from tests.behaviours.steps import Region, differences, region_with

REENTRANT = region_with(use_reentrant=True)
UNGUARDED = region_with(use_reentrant=True, guards=False)


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


def run(function: Any, *args: Any, **kwargs: Any) -> Any:
    return mb.checkpoint(function, *args, use_reentrant=True, **kwargs)


def refused(match: str) -> Any:
    return pytest.raises(mb.ReentrantLimitError, match=match)


def one(x: Tensor, scale: int) -> Tensor:
    return x.sin().exp() * scale


def pair(x: Tensor, scale: int) -> tuple[Tensor, Any, Tensor]:
    return x.sin(), scale, x.exp()


def row(x: Tensor, scale: int) -> list[Tensor]:
    return [x.sin(), x.exp() * scale]


@pytest.mark.parametrize("function", [one, pair, row])
@pytest.mark.parametrize("region", [REENTRANT, UNGUARDED], ids=["", "unguarded"])
def test_outputs_and_gradients_are_those_of_the_plain_call(function, region):
    def step(region: Region) -> Any:
        x = leaf()
        output = region(function, x, 3)
        items = output if isinstance(output, tuple | list) else [output]
        torch.stack([t.sum() for t in items if isinstance(t, Tensor)]).sum().backward()
        return x, output

    assert differences(step, region) == []


def test_an_output_that_the_loss_does_not_use_gets_no_gradient():
    def step(region: Region) -> Any:
        x = leaf()
        first, _ = region(row, x, 3)
        first.sum().backward()
        return x

    assert differences(step, REENTRANT) == []


def test_inputs_without_a_gradient_get_none():
    def step(region: Region) -> Any:
        x, y = leaf(), torch.ones(2, 3)
        region(lambda x, y: (x * y).sin(), x, y).sum().backward()
        assert y.grad is None
        return x, y

    assert differences(step, REENTRANT) == []


def test_regions_are_counted():
    statistics = Statistics("block")
    options = RegionOptions(use_reentrant=True)
    x = leaf()
    y = run_region(torch.sin, (x,), {}, options, statistics)
    assert (statistics.forwards, statistics.recomputes) == (1, 0)
    y.sum().backward()
    assert (statistics.forwards, statistics.recomputes) == (1, 1)
    run_region(torch.sin, (x.detach(),), {}, options, statistics)
    assert (statistics.forwards, statistics.recomputes) == (1, 1)


def test_while_it_is_recomputed_the_function_is_told_so():
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((mb.is_recomputing(), torch.is_grad_enabled()))
        return x.sin()

    run(function, leaf()).sum().backward()
    assert seen == [(False, False), (True, True)]
    assert not mb.is_recomputing()


def test_a_failure_of_the_recompute_passes_and_is_over_afterwards():
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("not twice")
        return x.sin()

    loss = run(function, leaf()).sum()
    with pytest.raises(KeyError, match="not twice"):
        loss.backward()
    assert not mb.is_recomputing()


def test_gradients_for_chosen_tensors_are_refused():
    x = leaf()
    loss = run(torch.sin, x).sum()
    with refused("cannot take part in torch.autograd.grad"):
        torch.autograd.grad(loss, x)
    loss = run(torch.sin, x).sum()
    with refused(r"backward\(inputs=...\)"):
        loss.backward(inputs=[x])


def test_double_backward_is_refused():
    loss = run(torch.sin, leaf()).sum()
    with refused("cannot be differentiated twice"):
        loss.backward(create_graph=True)


def test_parameters_without_a_tensor_that_requires_a_gradient_are_refused():
    with refused("no (positional )?tensor( argument)? of a region"):
        run(nn.Linear(3, 3), torch.ones(2, 3))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert not run(frozen, torch.ones(2, 3)).requires_grad


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (lambda x: ([x],), "argument 0 of a region"),
        (lambda x: (x, {"mask": x}), "argument 1 of a region"),
        (lambda x: (torch.ones(1), 3, (x,)), "argument 2 of a region"),
    ],
)
def test_tensors_that_are_nested_are_refused_by_their_place(args, match):
    with refused(match):
        run(lambda *args: torch.ones(1), *args(leaf()))


def test_nested_tensors_without_a_gradient_are_welcome():
    def step(region: Region) -> Any:
        x = leaf()
        region(
            lambda x, parts: (x * parts[0]).sin(), x, [torch.ones(3)]
        ).sum().backward()
        return x

    assert differences(step, REENTRANT) == []


@pytest.mark.parametrize("container", [list, dict])
def test_tensors_left_in_a_container_are_refused(container):
    def function(x: Tensor, cache: Any) -> Tensor:
        y = x.sin()
        cache.update(y=y) if isinstance(cache, dict) else cache.append(y)
        return y

    with refused("put tensors into a list or dict"):
        run(function, leaf(), container())


@pytest.mark.parametrize("position", [0, 1])
def test_an_argument_that_the_region_writes_is_refused_by_its_place(position):
    def function(*args: Tensor) -> Tensor:
        args[position].add_(1)
        return args[0] * args[1]

    with pytest.raises(mb.ChangedSinceForwardError, match=f"argument {position} is"):
        run(function, leaf() * 1, leaf() * 2)


@pytest.mark.parametrize(
    "output", [lambda x: {"y": x.sin()}, lambda x: (x.sin(), [x.exp()])]
)
def test_tensors_that_are_returned_inside_of_containers_are_refused(output):
    with refused("returned tensors inside a (dict|list)"):
        run(output, leaf())


def test_autocast_of_the_forward_holds_in_the_recompute_and_not_behind_it():
    def step(region: Region) -> Any:
        layer, x = nn.Linear(3, 3), leaf()
        with torch.autocast("cpu", torch.bfloat16):
            y = region(layer, x)
        y.float().square().sum().backward()
        return layer, x, y

    assert differences(step, REENTRANT) == []


def test_buffers_and_random_streams_are_those_of_one_forward():
    def step(region: Region) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh())
        x = leaf()
        region(model, x).sum().backward()
        return model, x

    assert differences(step, REENTRANT) == []
