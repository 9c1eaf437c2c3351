"""Behaviour 110: code can ask whether it is being recomputed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import compat


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).requires_grad_()


# torch 2.13 has no such name.
def test_b110_a_function_can_tell_its_forward_from_its_recompute() -> None:
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append((mb.is_recomputing(), compat.is_recomputing()))
        return x.exp().sin()

    y = mb.checkpoint(function, leaf())
    assert not mb.is_recomputing()
    y.sum().backward(retain_graph=True)
    assert not mb.is_recomputing()
    y.sum().backward()
    assert answers == [(False, False), (True, True), (True, True)]


def test_b110_a_side_effect_can_be_had_once() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x).exp()
            if not mb.is_recomputing():
                self.losses.append(float(y.detach().sum()))
            return y.sin()

    model = Logs()
    for step in (1, 2, 3):
        mb.checkpoint(model, leaf()).sum().backward()
        assert len(model.losses) == step


def test_b110_an_inner_forward_of_a_recompute_is_part_of_the_recompute() -> None:
    answers = []

    def inner(x: Tensor) -> Tensor:
        answers.append(mb.is_recomputing())
        return x.exp().sin()

    mb.checkpoint(
        lambda x: mb.checkpoint(inner, x.cos()).exp(), leaf()
    ).sum().backward()
    assert answers[0] is False
    assert answers[1:] == [True] * (len(answers) - 1)
    assert len(answers) in (2, 3)  # The outer recompute may, the inner one must run it.


def test_b110_code_between_regions_and_in_hooks_is_not_recomputing() -> None:
    answers = []

    def hook(grad: Tensor) -> None:
        answers.append(mb.is_recomputing())

    x = leaf()
    y = mb.checkpoint(lambda x: x.exp().sin(), x)
    y.register_hook(hook)
    x.register_hook(hook)
    y.sum().backward()
    assert answers == [False, False]


def test_b110_another_thread_is_not_recomputing() -> None:
    answers: list[bool] = []

    def ask() -> None:
        answers.append(mb.is_recomputing())

    def function(x: Tensor) -> Tensor:
        if mb.is_recomputing():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return x.exp().sin()

    mb.checkpoint(function, leaf()).sum().backward()
    assert answers == [False]


def test_b110_a_recompute_that_failed_is_over() -> None:
    def function(x: Tensor) -> Tensor:
        if mb.is_recomputing():
            raise ValueError("the valve is stuck")
        return x.exp().sin()

    y = mb.checkpoint(function, leaf())
    with pytest.raises(ValueError, match="stuck"):
        y.sum().backward()
    assert not mb.is_recomputing()
