"""Behaviours 77 and 82-84: a message says what to do, and debugging shows both runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget import compat
from tests.behaviours.steps import Block, Counted, Region, differences, region_with
from tests.devices import device_type


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


class Branching:
    """A function that takes another branch when it is run again."""

    def __init__(self, before: int = 0, after: int = 0) -> None:
        self.lengths = before, after
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        before, after = self.lengths
        self.calls += 1
        for _ in range(before):
            x = x.sin()
        x = self.first_branch(x) if self.calls == 1 else self.second_branch(x)
        for _ in range(after):
            x = x.sin()
        return x

    def first_branch(self, x: Tensor) -> Tensor:
        return x.cosh()

    def second_branch(self, x: Tensor) -> Tensor:
        return torch.cat([x, x]).atan()


def message(function: Callable[..., Any], **options: Any) -> str:
    """Return what the backward of a region says."""
    loss = mb.checkpoint(function, leaf(), **options).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat") as caught:
        loss.backward()
    return str(caught.value)


def shows_operators(text: str) -> bool:
    return "aten.cosh" in text


def test_b77_the_message_of_a_mismatch_says_what_to_do() -> None:
    text = message(Branching())
    assert "debug=True" in text
    assert "set_checkpoint_debug_enabled(True)" in text


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_b77_the_message_names_mark_dynamic_where_compiled_code_ran() -> None:
    compiled = torch.compile(lambda x: x.exp(), backend="eager")
    identity = Counted(lambda x: x)

    def growing(x: Tensor) -> Tensor:
        x = identity(x)
        total: Tensor = compiled(x if identity.calls == 1 else torch.cat([x, x])).sum()
        return total

    assert "mark_dynamic" in message(growing)


def test_b82_operators_and_lines_of_both_runs_are_listed() -> None:
    text = message(Branching(before=2, after=2), debug=True)
    for operator in ("aten.sin", "aten.cosh", "aten.cat"):
        assert operator in text
    assert "test_debug.py:" in text
    assert "first_branch" in text
    assert "second_branch" in text


def test_b82_a_number_of_tensors_that_differs_is_traced_too() -> None:
    calls = Counted(lambda x: x)

    def shrinking(x: Tensor) -> Tensor:
        x = calls(x).cosh()
        return x.atan() if calls.calls == 1 else x

    text = message(shrinking, debug=True)
    assert "aten.cosh" in text
    assert "aten.atan" in text


# torch 2.13 prints some 33,000 lines for these (compare pytorch/pytorch#103859).
def test_b82_the_listing_fits_a_screen() -> None:
    text = message(Branching(before=40, after=40), debug=True)
    assert "aten.cosh" in text  # It lists the place where the runs part.
    assert "aten.cat" in text
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("switch", [True, False, None])
def test_b83_the_switch_wins_over_the_argument(
    switch: bool | None, argument: bool
) -> None:
    expected = argument if switch is None else switch
    loss = None
    with compat.set_checkpoint_debug_enabled(switch):
        loss = mb.checkpoint(Branching(), leaf(), debug=argument).sum()
    # The switch belongs to the forward: the backward may come after it.
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat") as caught:
        loss.backward()
    assert shows_operators(str(caught.value)) is expected


def test_b83_the_inner_switch_wins_and_is_put_back() -> None:
    with compat.set_checkpoint_debug_enabled(True):
        with compat.set_checkpoint_debug_enabled(False):
            assert not shows_operators(message(Branching()))
        assert shows_operators(message(Branching()))
        with contextlib.suppress(KeyError), compat.set_checkpoint_debug_enabled(None):
            raise KeyError
        assert shows_operators(message(Branching()))
    assert not shows_operators(message(Branching()))


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x.exp(), 0.5).sin()


def in_place(x: Tensor) -> Tensor:
    y = (x * 2).relu_().exp()
    z = y.clone()
    z[0].mul_(2)
    return z.add_(y).sin()


def views(x: Tensor) -> Tensor:
    first, second, third = x.exp().t().unbind(0)
    return (first * second).sin() + third.view(2).exp()


def differentiates(x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(z.sin().sum(), z, create_graph=False)
    return x.exp() * slope


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        return (x.exp() @ x.t().sin()).float()


# torch 2.13 fails `differentiates`: its contexts that log can be entered once only.
@pytest.mark.parametrize(
    "function", [dropout, in_place, views, differentiates, under_autocast]
)
def test_b84_debug_runs_are_right(function: Callable[[Tensor], Tensor]) -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(function, x)
        y.sum().backward()
        return x, y

    assert differences(step, region_with(debug=True)) == []


# torch 2.13: as above.
def test_b84_a_model_is_debugged_without_being_changed() -> None:
    def step(region: Region) -> Any:
        model = nn.ModuleList([Block(dropout=0.3) for _ in range(2)])
        y = x = torch.randn(2, 5, 8, requires_grad=True)
        for block in model:
            y = region(block, y)
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return model, x, y

    assert differences(step, region_with(debug=True)) == []


# torch 2.13: as above.
def test_b84_nested_regions_may_be_debugged() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(lambda x: region(dropout, x.sin()).exp(), x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x, gradient

    assert differences(step, region_with(debug=True)) == []
