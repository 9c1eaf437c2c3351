"""Rare surroundings of a rerun, in which C++ must do what Python does."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine import isolation
from membudget.engine.reach import reach

RERUN = {"engine": "rerun", "verify": False}


class Scaled(Tensor):
    """A tensor with a method of its own."""

    def doubled(self) -> Tensor:
        return (self.detach() * 2).as_subclass(Tensor)


class KeepsAnActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.ones(3).as_subclass(Scaled)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.state.doubled()).exp().tanh()
        self.state = y.as_subclass(Scaled)
        return y.sin()


class FailsToEvaluate(nn.Module):
    """A module whose mode cannot be set back after a recompute."""

    fails = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.fails and name == "training" and not value:
            raise ValueError("not again")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.exp(), 0.5, self.training).sin()


def leaf() -> Tensor:
    return torch.linspace(0, 1, 3).requires_grad_()


def test_an_activation_kept_on_a_module_keeps_its_class() -> None:
    found = []
    for wrap in (lambda module: module, mb.checkpoint(**RERUN)):
        module, x = KeepsAnActivation(), leaf()
        region = wrap(module)
        (region(x) + region(x)).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_rule6_random_streams_are_as_before_if_another_state_cannot_be_restored() -> (
    None
):
    module = FailsToEvaluate()
    y = mb.checkpoint(module, leaf(), **RERUN)
    torch.rand(3)
    before = torch.get_rng_state()
    module.eval()
    module.fails = True
    with pytest.raises(ValueError, match="not again"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


class Deeper(torch.autograd.Function):
    """Runs a backward pass in its own, and so on, and then that of a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, function: Any) -> Tensor:
        ctx.levels, ctx.function = levels, function
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            if ctx.levels:
                y = Deeper.apply(x, ctx.levels - 1, ctx.function).sum()
            else:
                y = ctx.function(x).sum()
        y.backward()
        return x.grad * gradient, None, None


@pytest.mark.parametrize("levels", [57, 58, 59, 60, 61])
def test_a_method_in_c_is_recomputed_in_a_thread_without_python(levels: int) -> None:
    factor, x = torch.full((3,), 2.0), leaf()
    region = mb.checkpoint(**RERUN)(types.MethodType(torch.mul, factor))
    # Torch goes on in another thread where backward passes are nested deeply.
    Deeper.apply(x, levels, region).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, factor)


def test_a_long_chain_of_modules_overflows_no_stack() -> None:
    modules = [nn.Identity() for _ in range(50_000)]
    for one, following in itertools.pairwise(modules):
        one._modules["next"] = following
    try:
        with pytest.raises(RecursionError):
            reach(modules[0])
    finally:
        for module in modules:  # Their own end would be as deep.
            module._modules.clear()


class NeverHashed(type):
    """A metaclass whose classes are in no set."""

    def __hash__(cls) -> int:
        raise ValueError("no hash")


class Unhashed(metaclass=NeverHashed):
    """An object that a function closes over."""


def test_an_error_of_a_metaclass_is_raised_as_it_is() -> None:
    held = Unhashed()

    def function(x: Tensor) -> Tensor:
        return x.exp() if held else x

    with pytest.raises(ValueError, match="no hash"):
        mb.checkpoint(function, leaf(), **RERUN)


def test_an_error_of_a_training_flag_is_raised_as_it_is() -> None:
    module = nn.Linear(3, 3)
    module.training = torch.ones(2)  # type: ignore[assignment]
    y = mb.checkpoint(module, leaf(), **RERUN)
    module.training = torch.ones(2)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        y.sum().backward()


def test_an_interrupt_at_the_end_of_a_recompute_is_raised_as_it_is() -> None:
    # With `debug`, Python recomputes: C++ runs no Python when it leaves.
    y = mb.checkpoint(lambda x: x.exp().sin(), leaf(), debug=True, **RERUN)

    def interrupt(frame: types.FrameType, event: str, argument: Any) -> None:
        if frame.f_code is isolation.leave.__code__:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
    finally:
        sys.setprofile(None)
        isolation.leave()  # Which the interrupt kept from running.
