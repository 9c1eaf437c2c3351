"""Situations in which a region could leave something behind.

Each takes a fresh block, which shows every tensor that it makes to a `Watched`, and a
fresh input, uses a region, and returns nothing: afterwards all of it should be gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from tests.devices import settle


class Notes:
    """Notes of a step, in a slot, where nobody finds them who restores its state."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self, item: Any) -> None:
        """Note something."""
        self.items.append(item)


class Watched:
    """Weak references to the storages of tensors that were shown to it."""

    __slots__ = ("references",)  # Where nobody finds them who restores a step's state.

    def __init__(self) -> None:
        self.references: list[StorageWeakRef] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Watch a tensor's storage; return the tensor."""
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> int:
        """Return how many of the storages are alive."""
        settle()
        return sum(not reference.expired() for reference in self.references)


class Block(nn.Module):
    """A few operators, every result of which is watched."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.watched = watched
        self.kept: Tensor | None = None
        self.fails_in_forward = False
        self.fails_in_recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.watched(self.linear(self.watched(x.sin())))
        x = self.watched(x.tanh())
        if self.fails_in_forward:
            raise ValueError("in the forward")
        if self.fails_in_recompute and mb.is_recomputing():
            raise ValueError("in the recompute")
        return self.watched(self.watched(x.exp()).cos())


class KeepsActivation(Block):
    """Store an activation on the module, as some models do for an auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = x
        return x * 2


Situation = Callable[[Block, Tensor], None]


def forward_and_backward(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x).sum().backward()


def forward_only(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x)


def no_early_stop(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x, early_stop=False).sum().backward()


def without_guards(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x, guards=False).sum().backward()


def values_compared(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x, determinism_check="values").sum().backward()


def debugged(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x, debug=True).sum().backward()


def reentrant(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x, use_reentrant=True).sum().backward()


def partial_backward(block: Block, x: Tensor) -> None:
    y = mb.checkpoint(block, x)
    z = mb.checkpoint(block, y)
    torch.autograd.grad(z.sum(), y)


def gradient_of_the_weight_alone(block: Block, x: Tensor) -> None:
    mb.checkpoint(block, x).sum().backward(inputs=[block.linear.weight])


def exception_in_forward(block: Block, x: Tensor) -> None:
    block.fails_in_forward = True
    with pytest.raises(ValueError, match="in the forward"):
        mb.checkpoint(block, x)


def exception_in_nested_forward(block: Block, x: Tensor) -> None:
    block.fails_in_forward = True
    with pytest.raises(ValueError, match="in the forward"):
        mb.checkpoint(lambda x: mb.checkpoint(block, x.sin()).exp(), x)


def exception_in_recompute(block: Block, x: Tensor) -> None:
    block.fails_in_recompute = True
    with pytest.raises(ValueError, match="in the recompute"):
        mb.checkpoint(block, x).sum().backward()


def exception_in_nested_recompute(block: Block, x: Tensor) -> None:
    block.fails_in_recompute = True
    with pytest.raises(ValueError, match="in the recompute"):
        mb.checkpoint(lambda x: mb.checkpoint(block, x.sin()).exp(), x).sum().backward()


def mismatch_in_recompute(block: Block, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = block(x)
        return (y[:2] if mb.is_recomputing() else y).sin()

    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat its forward"):
        mb.checkpoint(function, x).sum().backward()


def weight_changed_since(block: Block, x: Tensor) -> None:
    y = mb.checkpoint(block, x)
    with torch.no_grad():
        block.linear.weight.add_(1)
    with pytest.raises(mb.ChangedSinceForwardError, match=r"linear\.weight"):
        y.sum().backward()


def nested(block: Block, x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        return block(mb.checkpoint(block, block(x))).sin()

    mb.checkpoint(outer, x).sum().backward()


def nested_forward_only(block: Block, x: Tensor) -> None:
    mb.checkpoint(lambda x: mb.checkpoint(block, block(x)).sin(), x)


def retained_graph(block: Block, x: Tensor) -> None:
    y = mb.checkpoint(block, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)


def partial_backwards_of_retained_graph(block: Block, x: Tensor) -> None:
    y = mb.checkpoint(block, x)
    z = mb.checkpoint(block, y)
    for _ in range(3):
        torch.autograd.grad(z.sum(), y, retain_graph=True)


def double_backward(block: Block, x: Tensor) -> None:
    (grad,) = torch.autograd.grad(mb.checkpoint(block, x).sum(), x, create_graph=True)
    grad.sum().backward()


def graph_of_gradients_unused(block: Block, x: Tensor) -> None:
    torch.autograd.grad(mb.checkpoint(block, x).sum(), x, create_graph=True)


def execution_group(block: Block, x: Tensor) -> None:
    y = mb.checkpoint(block, x)
    with mb.execution_group():
        y[0].sum().backward(retain_graph=True)
        y[1].sum().backward()


def sequential(block: Block, x: Tensor) -> None:
    mb.checkpoint_sequential([block] * 5, 3, x).sum().backward()


def applied_and_removed(block: Block, x: Tensor) -> None:
    model = nn.Sequential(block, nn.Tanh())
    applied = mb.apply(model, blocks=Block)
    model(x).sum().backward()
    applied.remove()


def curried(block: Block, x: Tensor) -> None:
    mb.checkpoint(early_stop=False)(block)(x).sum().backward()


def closure_over_tensors(block: Block, x: Tensor) -> None:
    factor = block.watched(torch.randn(3, 4))
    mb.checkpoint(lambda: block(x * factor)).sum().backward()


def exact_arguments_in_containers(block: Block, x: Tensor) -> None:
    bias = block.watched(torch.randn(4))
    mb.checkpoint(
        lambda given: block(given["x"][0] + given["bias"]), {"x": [x], "bias": bias}
    ).sum().backward()


def gradient_taken_inside(block: Block, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = block(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * block.watched(grad)

    mb.checkpoint(function, x).sum().backward()


SITUATIONS: list[Situation] = [
    forward_and_backward,
    forward_only,
    no_early_stop,
    without_guards,
    values_compared,
    debugged,
    reentrant,
    partial_backward,
    gradient_of_the_weight_alone,
    exception_in_forward,
    exception_in_nested_forward,
    exception_in_recompute,
    exception_in_nested_recompute,
    mismatch_in_recompute,
    weight_changed_since,
    nested,
    nested_forward_only,
    retained_graph,
    partial_backwards_of_retained_graph,
    double_backward,
    graph_of_gradients_unused,
    execution_group,
    sequential,
    applied_and_removed,
    curried,
    closure_over_tensors,
    exact_arguments_in_containers,
    gradient_taken_inside,
]
