"""What a fuzzed program uses besides its inputs: modules, custom functions, helpers.

A program is `step(m, n, x, y, region)`: it runs a forward, with some of it in regions,
and a backward. `from tests.fuzz.world import *` brings every name that its source uses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from membudget import execution_group

__all__ = [
    "Cube",
    "F",
    "Halve",
    "Remember",
    "Stateful",
    "Tanh",
    "World",
    "execution_group",
    "identity_hooks",
    "leaves",
    "nn",
    "np",
    "offload_hooks",
    "pause",
    "random",
    "save_on_cpu",
    "score",
    "shelf",
    "slope",
    "torch",
]


class Stateful(nn.Module):
    """What makes `engine="auto"` choose replay for whatever reaches it.

    Attributes:
        pauses: How many steps have ended their forward.
    """

    def __init__(self) -> None:
        """Draw every parameter from torch's global stream."""
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.generator = torch.Generator().manual_seed(5)
        self.pauses = 0


# A global that regions read: tensors, a number, a function; each `World` puts it back.
shelf: dict[str, Any] = {}


class World(nn.Module):
    """Parameters, buffers and Python state.

    Attributes:
        stats: Running statistics that belong to no module, and a number.
        entries: Tensors in a list.
        factor: A number.
        codebook: A buffer larger than what an engine copies without being asked.
        seen: A number that calls advance.
    """

    mean: Tensor
    rebound: Tensor
    codebook: Tensor

    def __init__(self) -> None:
        """Draw every parameter from torch's global stream."""
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.table = nn.Embedding(4, 4)
        self.gru = nn.GRUCell(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("rebound", torch.ones(4))
        self.register_buffer("codebook", torch.rand(4200, 4))
        self.stats: dict[str, Any] = {"mean": torch.zeros(4), "var": torch.ones(4)}
        self.stats["factor"] = 1.5
        # Drawn from no stream, so that programs have the parameters that they had.
        rows = torch.linspace(0.5, 2, 16).view(4, 4)
        self.entries = [rows[0].clone(), rows[1].clone()]
        self.factor = 1.5
        shelf.update(factor=1.5, function=torch.sin, rows=rows, shift=rows[2])
        self.seen = 0


class Cube(torch.autograd.Function):
    """Save an input and an intermediate value."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """Return the cube."""
        square = a * a
        ctx.save_for_backward(a, square)
        return square * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Read the saved tensors twice."""
        (a, _), (_, square) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (2 * a * a + square)


class Tanh(torch.autograd.Function):
    """Save the output."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """Return the hyperbolic tangent."""
        out = a.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Differentiate through the output."""
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class Halve(torch.autograd.Function):
    """Write into the input."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """Halve in place."""
        ctx.mark_dirty(a)
        return a.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Halve the gradient."""
        return grad * 0.5


class Remember(torch.autograd.Function):
    """Keep a tensor on `ctx`, past the saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return a product, and a sum."""
        ctx.other = b.detach().clone()
        ctx.save_for_backward(a)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiate both."""
        (a,) = ctx.saved_tensors
        return grad * ctx.other + of_sum, grad * a + of_sum


def identity_hooks() -> saved_tensors_hooks:
    """Return hooks that keep each saved tensor as it is, without its version."""
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def offload_hooks() -> saved_tensors_hooks:
    """Return hooks that keep a copy of each saved tensor."""
    return saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone())


def slope(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """Return the gradient of a function at `a`, which can be differentiated again."""
    at = a if a.requires_grad else a.clone().requires_grad_()
    return torch.autograd.grad(function(at).sum(), at, create_graph=True)[0]


def leaves(*given: nn.Module | Tensor) -> list[Tensor]:
    """Return whatever may have a gradient."""
    found = [[t] if isinstance(t, Tensor) else t.parameters() for t in given]
    return [leaf for some in found for leaf in some if leaf.requires_grad]


def score(*outputs: Tensor | None) -> Tensor:
    """Return a loss that weighs each element of each output differently."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output is not None:
            weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).cos()
            total = total + (output.double().reshape(-1).sin() * weights).sum()
    return total


def pause(n: Stateful) -> None:
    """Move every random stream on, as code between forward and backward may."""
    torch.rand(())
    random.random()
    np.random.random()  # noqa: NPY002 - the global stream is what is under test
    torch.rand((), generator=n.generator)
    n.pauses += 1
