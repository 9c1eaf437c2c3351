"""Behaviours 114-117: what is dropped, used or failed leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import (
    SINES,
    Storages,
    region_with,
    sines,
)
from tests.devices import settle
from tests.garbage import no_collector


class Token:
    """An object to be held by a closure and watched."""


def region_over_token(
    storages: Storages, **options: Any
) -> tuple[Tensor, weakref.ref[Token], Storages]:
    """Run a region whose closure holds a token and a tensor; return the output.

    Also return a weak reference to the token, and the storages of the region's input
    and of the tensor.
    """
    token, held, outside = Token(), torch.randn(4), Storages()
    outside.see(held)

    def function(x: Tensor) -> Tensor:
        assert token is not None
        return sines(x * held, storages)

    x = outside.see(torch.randn(4, requires_grad=True).exp())
    return mb.checkpoint(function, x, **options), weakref.ref(token), outside


GUARDS = pytest.mark.parametrize("guards", [True, False])


@GUARDS
def test_b114_nothing_is_left_when_an_unused_output_is_dropped(guards: bool) -> None:
    storages = Storages()
    with no_collector():
        y, token, outside = region_over_token(storages, guards=guards)
        assert y.requires_grad
        assert token() is not None
        del y
        assert storages.alive() == 0
        assert outside.alive() == 0
        assert token() is None


@GUARDS
def test_b114_after_the_backward_the_inputs_and_the_closure_are_gone(
    guards: bool,
) -> None:
    storages = Storages()
    with no_collector():
        y, token, outside = region_over_token(storages, guards=guards)
        y.sum().backward()
        # The output is still held, like the graph of a plain run after its backward.
        assert storages.alive() == 1
        assert outside.alive() == 0
        assert token() is None
        del y
        assert storages.alive() == 0


def test_b114_after_a_step_only_the_gradients_are_there() -> None:
    def tensors() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with no_collector():
        before = tensors()
        w = torch.randn(4, 4, requires_grad=True)
        mb.checkpoint(lambda x: (x @ w).sin().exp(), torch.randn(4, 4)).sum().backward()
        assert w.grad is not None
        assert tensors() == before + 2


def test_b114_a_nested_region_leaves_nothing_either() -> None:
    storages = Storages()
    with no_collector():
        x = torch.randn(4, requires_grad=True)

        def outer(x: Tensor) -> Tensor:
            return mb.checkpoint(sines, storages.see(x.exp()), storages).tanh()

        y = mb.checkpoint(outer, x)
        y.sum().backward()
        assert storages.alive() == 0
        del y
        dropped = mb.checkpoint(outer, x)
        del dropped
        assert storages.alive() == 0


def complete(storages: Storages) -> None:
    """Run a region forward and backward."""
    x = torch.randn(4, requires_grad=True)
    mb.checkpoint(sines, x, storages).sum().backward()


def failing(storages: Storages, runs_that_work: int) -> None:
    """Run a region whose function raises after so many runs."""
    runs = itertools.count()

    def function(x: Tensor) -> Tensor:
        x = sines(x, storages)
        if next(runs) >= runs_that_work:
            raise ValueError("as planned")
        return x.exp()

    x = torch.randn(4, requires_grad=True)
    try:
        # By default, a function that fails in a recompute is replayed from then on.
        mb.checkpoint(function, x, engine="rerun").sum().backward()
    except ValueError:
        return
    raise AssertionError("the function should have failed")


STEPS: dict[str, Callable[[Storages], None]] = {
    "step": complete,
    "failed forward": lambda storages: failing(storages, runs_that_work=0),
    "failed recomputation": lambda storages: failing(storages, runs_that_work=1),
}


@pytest.mark.parametrize("kind", STEPS)
def test_b115_no_storage_is_left_by_any_step(kind: str) -> None:
    storages = Storages()
    with no_collector():
        for _ in range(5):
            STEPS[kind](storages)
            assert storages.alive() == 0


@pytest.mark.parametrize("kind", STEPS)
def test_b115_no_object_piles_up_over_steps(kind: str) -> None:
    # torch 2.13 leaves some objects of every call in reference cycles.
    with no_collector():
        for _ in range(3):
            STEPS[kind](Storages())
        before = count_objects()
        for _ in range(10):
            STEPS[kind](Storages())
        assert count_objects() == before


def count_objects() -> int:
    """Count what lives, but for what `settle` leaves to autograd's thread."""
    settle()
    return sum(not isinstance(thing, Context) for thing in gc.get_objects())


def two_branches(x: Tensor, storages: Storages) -> tuple[Tensor, Tensor]:
    """Return two results that need different tensors."""
    return sines(x.exp(), storages).exp(), sines(x.tanh(), storages).exp()


def test_b116_partial_backwards_with_retain_graph_do_not_pile_up() -> None:
    # torch 2.13 keeps what each backward recomputed and did not use.
    storages = Storages()
    with no_collector():
        x = torch.randn(4, requires_grad=True)
        first, second = mb.checkpoint(two_branches, x, storages)
        left = []
        for _ in range(5):
            torch.autograd.grad(first.sum(), x, retain_graph=True)
            left.append(storages.alive())
        # At most what the other branch needs, once, waits for its backward.
        assert max(left) <= SINES + 1
        assert left == left[:1] * 5
        torch.autograd.grad((first + second).sum(), x)
        del first, second
        assert storages.alive() == 0


def test_b117_parts_of_the_graph_that_were_freed_are_not_kept_again() -> None:
    storages, alive = Storages(), []
    with no_collector():
        x = torch.randn(4, requires_grad=True)
        h = x.exp()
        h.register_hook(lambda grad: alive.append(storages.alive()))
        first, second = mb.checkpoint(two_branches, h, storages)
        del first
        storages.seen.clear()
        second.sum().backward()
        assert storages.alive() == 0
    # Of the recomputed tensors none of the dropped branch is kept meanwhile.
    assert alive == [0]


def test_b117_what_was_freed_inside_the_region_is_not_kept_again() -> None:
    inner, alive = Storages(), []

    def function(x: Tensor) -> Tensor:
        y = sines(x, inner)
        (grad,) = torch.autograd.grad(y.sum(), x)
        del y
        return (x.cos() * grad).exp()

    with no_collector():
        x = torch.randn(4, requires_grad=True)
        result = mb.checkpoint(function, x.exp())
        assert inner.alive() == 0
        assert result.grad_fn is not None
        result.grad_fn.register_hook(lambda *_: alive.append(inner.alive()))
        result.sum().backward()
    # When the region has been recomputed for its last operator, none of the sines
    # that its own gradient freed in the forward is alive.
    assert alive == [0]


def test_b117_a_region_of_which_nothing_is_alive_is_not_recomputed() -> None:
    storages = Storages()
    x = torch.randn(4, requires_grad=True)
    _, second = region_with(early_stop=True)(
        lambda x: (sines(x, storages), x + 1), x.exp()
    )
    del _
    runs = len(storages.seen)
    second.sum().backward()
    assert len(storages.seen) == runs
