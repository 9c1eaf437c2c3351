"""Row 22: memory is held after the step, by a reference cycle or a forgotten closure.

With the garbage collector off, every storage that a region made must die with the last
reference of the user's. Cycles that pass through autograd's graph are never found by
the collector at all; torch's reentrant variant makes one when an output is stored where
the function can reach it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from tests.devices import settle
from tests.faults.implementations import (
    Checkpoint,
    ours,
    plain,
    torch_fails,
    torch_reentrant,
    torch_rerun,
)


class InterruptedRunError(Exception):
    """Raised by a region in the middle."""


class Watched:
    """A function for a region, and weak references to every storage that it makes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.references: list[StorageWeakRef] = []
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.runs = 0
        self.interrupted_run = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        for number, layer in enumerate(self.layers):
            x = self.watch(torch.tanh(self.watch(layer(x))))
            if number == 1 and self.runs == self.interrupted_run:
                raise InterruptedRunError
        return x

    def watch(self, tensor: Tensor) -> Tensor:
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> int:
        return sum(not reference.expired() for reference in self.references)


def fresh_input() -> Tensor:
    return torch.ones(4, 8, requires_grad=True)


def forward_and_backward(checkpoint: Checkpoint, watched: Watched) -> None:
    checkpoint(watched, fresh_input()).sum().backward()


def forward_only(checkpoint: Checkpoint, watched: Watched) -> None:
    checkpoint(watched, fresh_input())


def partial_backward(checkpoint: Checkpoint, watched: Watched) -> None:
    x = fresh_input()
    first, _ = checkpoint(lambda x: (watched(x), watched(x)), x)
    first.sum().backward()


def retained_graph(checkpoint: Checkpoint, watched: Watched) -> None:
    y = checkpoint(watched, fresh_input())
    y.sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)


def exception_in_forward(checkpoint: Checkpoint, watched: Watched) -> None:
    watched.interrupted_run = 1
    with pytest.raises(InterruptedRunError, match=r"^$"):
        checkpoint(watched, fresh_input())


def exception_in_recompute(checkpoint: Checkpoint, watched: Watched) -> None:
    watched.interrupted_run = 2
    y = checkpoint(watched, fresh_input())
    with pytest.raises(InterruptedRunError, match=r"^$"):
        y.sum().backward()


def activation_on_a_module(checkpoint: Checkpoint, watched: Watched) -> None:
    class Keeper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.activation = watched(x)
            return watched(self.activation)

    checkpoint(Keeper(), fresh_input()).sum().backward()


def output_in_captured_dict(checkpoint: Checkpoint, watched: Watched) -> None:
    outputs: dict[str, Tensor] = {}

    def region(x: Tensor) -> Tensor:
        outputs["inner"] = watched(x)
        return watched(outputs["inner"])

    outputs["outer"] = checkpoint(region, fresh_input())
    outputs["outer"].sum().backward()


def nested_regions(checkpoint: Checkpoint, watched: Watched) -> None:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(watched, checkpoint(watched, x).sin())

    checkpoint(outer, fresh_input()).sum().backward()


def double_backward(checkpoint: Checkpoint, watched: Watched) -> None:
    x = fresh_input()
    y = checkpoint(watched, x).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    gradient.sum().backward()


Case = Callable[[Checkpoint, Watched], None]
CASES: list[Case] = [
    forward_and_backward,
    forward_only,
    partial_backward,
    retained_graph,
    exception_in_forward,
    exception_in_recompute,
    activation_on_a_module,
    output_in_captured_dict,
    nested_regions,
    double_backward,
]
NO_RECOMPUTE: list[Case] = [exception_in_recompute]


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def alive_after(checkpoint: Checkpoint, case: Case) -> int:
    # A first use may import modules, which leaves garbage of Python's own.
    case(checkpoint, Watched())
    watched = Watched()
    case(checkpoint, watched)
    assert watched.references
    settle()
    return watched.alive()


@pytest.mark.parametrize("case", CASES)
def test_row22_no_storage_outlives_the_step(case: Case) -> None:
    assert alive_after(ours, case) == 0


@pytest.mark.parametrize("case", CASES)
def test_row22_no_storage_outlives_the_step_without_guards(case: Case) -> None:
    def unguarded(function: Checkpoint, *args: Tensor) -> Tensor:
        return mb.checkpoint(function, *args, guards=False)

    assert alive_after(unguarded, case) == 0


@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_RECOMPUTE])
def test_row22_plain_steps_leave_nothing_either(case: Case) -> None:
    assert alive_after(plain, case) == 0


def test_row22_regions_leave_no_garbage_for_the_collector() -> None:
    # The first step fills caches of torch's and of ours, which are kept on purpose.
    forward_and_backward(ours, Watched())
    gc.collect()
    forward_and_backward(ours, Watched())

    assert gc.collect() == 0


@torch_fails
def test_row22_torch_leaves_garbage_for_the_collector() -> None:
    forward_and_backward(torch_rerun, Watched())
    gc.collect()
    forward_and_backward(torch_rerun, Watched())

    assert gc.collect() > 0


@torch_fails
def test_row22_torch_reentrant_never_frees_an_output_in_a_captured_dict() -> None:
    assert alive_after(torch_reentrant, output_in_captured_dict) > 0
