"""Row A2: a region that writes its own input, under saved-tensor hooks of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import membudget as mb
from membudget.errors import ChangedSinceForwardError
from tests.behaviours.steps import plain

Surrounding = Callable[[], AbstractContextManager[Any]]


def identity() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def copying() -> saved_tensors_hooks:
    """Hold a copy, as an offloader does on a device."""
    return saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


SURROUNDINGS: dict[str, Surrounding] = {
    "nothing": nullcontext,
    "identity": identity,
    "save_on_cpu": save_on_cpu,
    "copying": copying,
}


def writing(a: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(3)
    return (a * w).sin() * a


def writing_silently(a: Tensor, w: Tensor) -> Tensor:
    a.data.mul_(3)
    return (a * w).sin() * a


def reading(a: Tensor, w: Tensor) -> Tensor:
    return (a * w).sin() * a


Between = Callable[[Tensor], object]


def gradient(
    region: Callable[..., Any],
    function: Callable[..., Tensor],
    surrounding: Surrounding,
    needs_gradient: bool = True,
    between: Between = id,
) -> Tensor:
    x = torch.linspace(0.1, 0.5, 4).requires_grad_(needs_gradient)
    w = torch.linspace(0.2, 0.6, 4).requires_grad_()
    with surrounding():
        a = x * 1.0 + 1
        y = region(function, a, w * 1.0).exp()
    between(a)
    y.sum().backward()
    assert w.grad is not None
    return torch.cat([w.grad] if x.grad is None else [x.grad, w.grad])


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("function", [writing, writing_silently])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_row_a02_a_region_that_writes_its_input_is_refused_under_any_hooks(
    name: str, function: Callable[..., Tensor], needs_gradient: bool
):
    def rerun(function: Any, *args: Any) -> Any:
        return mb.checkpoint(function, *args, engine="rerun")

    with pytest.raises(ChangedSinceForwardError, match="argument 0"):
        gradient(rerun, function, SURROUNDINGS[name], needs_gradient)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_row_a02_by_default_such_a_region_is_replayed_from_its_next_call_on(name: str):
    surrounding = SURROUNDINGS[name]
    expected = gradient(plain, writing, surrounding)

    with pytest.raises(ChangedSinceForwardError, match="run the step again"):
        gradient(mb.checkpoint, writing, surrounding)

    assert torch.equal(gradient(mb.checkpoint, writing, surrounding), expected)


@pytest.mark.parametrize("name", ["identity", "save_on_cpu"])
def test_row_a02_an_input_that_hooks_hold_may_not_be_changed_before_the_backward(
    name: str,
):
    def change(a: Tensor) -> None:
        with torch.no_grad():
            a.mul_(2)

    with pytest.raises(ChangedSinceForwardError, match="argument 0 was changed"):
        gradient(mb.checkpoint, reading, SURROUNDINGS[name], between=change)


def test_row_a02_an_input_that_was_offloaded_may_be_changed_before_the_backward():
    def change(a: Tensor) -> None:
        with torch.no_grad():
            a.mul_(2)

    expected = gradient(plain, reading, copying)

    found = gradient(mb.checkpoint, reading, copying, between=change)

    assert torch.equal(found, expected)


def test_row_a02_memory_that_is_used_again_is_not_taken_for_the_input():
    # What is handed back may lie where the input lay, with another version.
    def step(region: Callable[..., Any]) -> Tensor:
        x = torch.linspace(0.1, 0.5, 4, requires_grad=True)
        with copying():
            a = x * 1.0
            a = a.add_(1).mul_(2)
            y = region(reading, a, torch.ones(4)).sum()
        del a
        y.backward()
        assert x.grad is not None
        return x.grad

    expected = step(plain)
    for _ in range(20):
        assert torch.equal(step(mb.checkpoint), expected)


def test_row_a02_a_rerun_in_a_replay_that_writes_its_input_is_refused():
    def rerun(a: Tensor, w: Tensor) -> Any:
        return mb.checkpoint(writing, a, w, engine="rerun")

    def step(x: Tensor, w: Tensor) -> Tensor:
        inner: Tensor = rerun(x * 1.0 + 1, w * 1.0)
        return inner.exp()

    x, w = torch.linspace(0.1, 0.5, 4, requires_grad=True), torch.ones(4)
    with pytest.raises(ChangedSinceForwardError, match="argument 0"):
        mb.checkpoint(step, x, w, engine="replay", verify=False).sum().backward()


def test_row_a02_a_parameter_among_the_arguments_is_known_by_its_storage_too():
    weight = torch.nn.Parameter(torch.linspace(0.1, 0.5, 4))
    y = mb.checkpoint(reading, weight, torch.ones(4)).sum()
    weight.data = torch.zeros(4)

    with pytest.raises(ChangedSinceForwardError, match="argument 0"):
        y.backward()
