"""Behaviours 43-49: a recomputation stops when nothing more is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.compat import set_checkpoint_early_stop
from tests.behaviours.steps import Counted, Region, differences, perceptron
from tests.devices import elsewhere
from tests.seconds import DEADLOCK_S


class Marked:
    """A function of two operators that notes how far each of its runs came."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.runs.append("began")
        # cos saves its input: the last tensor that is needed.
        y = x.sin().cos()
        self.runs[-1] = "ended"
        return y


STOPPED = ["ended", "began"]
FINISHED = ["ended", "ended"]


def runs(
    forward: Callable[[], Any] = nullcontext,
    backward: Callable[[], Any] = nullcontext,
    **options: Any,
) -> list[str]:
    """Run one region forward and backward; return how far each run came."""
    function, x = Marked(), torch.randn(3, requires_grad=True)
    with forward():
        y = mb.checkpoint(function, x, **options)
    with backward():
        y.sum().backward()
    return function.runs


def on() -> Any:
    """Return the context that switches early stop on."""
    return set_checkpoint_early_stop(True)


def off() -> Any:
    """Return the context that switches early stop off."""
    return set_checkpoint_early_stop(False)


def test_b43_recomputation_stops_once_the_last_needed_tensor_is_there() -> None:
    assert runs() == STOPPED


def test_b43_what_is_needed_is_what_is_still_alive() -> None:
    # torch 2.13 runs on to the last tensor ever saved, alive or not; so it is only
    # asked here that the function's end is not reached.
    reached = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin().cos()
        reached.append("first")
        second = x.exp().tanh().sqrt()
        reached.append("second")
        return first, second

    x = torch.rand(3, requires_grad=True)
    first, second = mb.checkpoint(function, x)
    del second
    first.sum().backward()
    assert reached.count("second") == 1


def test_b44_early_stop_is_off_by_argument() -> None:
    assert runs(early_stop=False) == FINISHED


@pytest.mark.parametrize("early_stop", [True, False])
def test_b44_gradients_are_equal_with_and_without(early_stop: bool) -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        region(model, x).square().sum().backward()
        return model, x

    def region(function: Any, *args: Any) -> Any:
        return mb.checkpoint(function, *args, early_stop=early_stop)

    assert differences(step, region) == []


def test_b45_the_context_wins_over_the_argument() -> None:
    assert runs(forward=off, early_stop=True) == FINISHED
    assert runs(forward=on, early_stop=False) == STOPPED


def test_b45_the_context_belongs_to_the_forward() -> None:
    assert runs(forward=off) == FINISHED
    assert runs(backward=off) == STOPPED
    assert runs(forward=off, backward=on) == FINISHED
    assert runs(backward=on, early_stop=False) == FINISHED


def test_b45_the_innermost_context_wins() -> None:
    with off(), on():
        assert runs() == STOPPED
    with on(), off():
        assert runs() == FINISHED


def test_b46_the_context_is_restored_on_exceptions() -> None:
    with pytest.raises(ValueError, match="inside"), off():
        raise ValueError("inside")
    assert runs() == STOPPED
    assert runs(early_stop=False) == FINISHED
    with off():
        with pytest.raises(ValueError, match="inside"), on():
            raise ValueError("inside")
        assert runs() == FINISHED


def test_b47_where_nothing_is_saved_nothing_is_recomputed() -> None:
    function = Counted(lambda x, y: (x + y) * 2 - x.sum())
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    mb.checkpoint(function, x, y).sum().backward()
    assert function.calls == 1


def test_b47_nothing_is_recomputed_for_an_output_that_saved_nothing() -> None:
    function = Counted(lambda x: (x + 1, x.detach().exp() * 2))
    x = torch.randn(3, requires_grad=True)
    y, _ = mb.checkpoint(function, x)
    y.sum().backward()
    assert function.calls == 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_b48_a_region_recomputes_once_per_backward(early_stop: bool) -> None:
    functions = [Counted(lambda x: (x.sin().exp(), x.cos().tanh())) for _ in range(4)]
    x = torch.randn(3, requires_grad=True)
    h = x
    total = x.sum()
    for function in functions:
        a, h = mb.checkpoint(function, h, early_stop=early_stop)
        total = total + a.sum() + h.sum()
    total.backward()
    assert [function.calls for function in functions] == [2, 2, 2, 2]


def test_b48_two_backwards_recompute_once_each() -> None:
    function = Counted(lambda x: x.sin().exp().tanh())
    x = torch.randn(3, requires_grad=True)
    loss = mb.checkpoint(function, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert function.calls == 3


def test_b49_the_switch_is_per_thread() -> None:
    # torch 2.13 keeps the switch in a module's global.
    with off(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere(runs)).result() == STOPPED
        assert runs() == FINISHED


def test_b49_switches_of_two_threads_do_not_undo_each_other() -> None:
    # torch 2.13: the first to leave puts back what it found before the second came.
    entered, left = threading.Event(), threading.Event()

    def other() -> list[str]:
        with on():
            entered.set()
            assert left.wait(DEADLOCK_S)
            return runs()

    with ThreadPoolExecutor(1) as pool:
        with off():
            future = pool.submit(elsewhere(other))
            assert entered.wait(DEADLOCK_S)
            within = runs()
        left.set()
        assert future.result() == STOPPED
    assert within == FINISHED
    assert runs() == STOPPED
