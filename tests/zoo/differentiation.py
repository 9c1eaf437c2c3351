"""Cases that use autograd themselves: inside, around, or by their own functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests.zoo.case import Call, case, leaf

_GRAD_INSIDE = "the classic variant runs its forward without a graph"


@case()
def nested_region() -> Call:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
    outer = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        return outer(mb.checkpoint(inner, x).sin())

    return Call(function, (leaf(5, 6),), state={"inner": inner, "outer": outer})


@case()
def two_regions_inside() -> Call:
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def function(x: Tensor) -> Tensor:
        a = mb.checkpoint(layers[0], x).tanh()
        return mb.checkpoint(lambda y: layers[1](y).tanh() * a, a.sin())

    return Call(function, (leaf(5, 6),), state={"layers": layers})


class _Exponential(torch.autograd.Function):
    """The exponential, which saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@case()
def custom_function() -> Call:
    return Call(lambda x: _Exponential.apply(x.sin()).cos(), (leaf(5, 6),))


class _ReadTwice(torch.autograd.Function):
    """A product that reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


@case(torch="raises", torch_says="already unpacked once")
def saved_tensors_read_twice() -> Call:
    return Call(lambda x: _ReadTwice.apply(x.sin(), x.cos()).exp(), (leaf(5, 6),))


class _Largest(torch.autograd.Function):
    """The greatest of each row and where it stands, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.max(dim=-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(x, indices)
        ctx.set_materialize_grads(False)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
        if grad is None:
            return None
        x, indices = ctx.saved_tensors
        return torch.zeros_like(x).scatter(1, indices[:, None], grad[:, None])


@case()
def non_differentiable_output() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = _Largest.apply(x.sin())
        return values.exp() * x[:, 0], indices

    return Call(function, (leaf(5, 6),))


@case(not_reentrant=_GRAD_INSIDE)
def gradient_penalty_inside() -> Call:
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def function(x: Tensor) -> Tensor:
        y = critic(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + (grad.norm(dim=1) - 1).pow(2).sum()

    return Call(function, (leaf(5, 6),), state={"critic": critic})


@case(not_reentrant=_GRAD_INSIDE)
def force_inside() -> Call:
    energy = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))

    def function(x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(energy(place).sum(), place)
        return (x * force).sin()

    return Call(function, (leaf(5, 6),), state={"energy": energy})


@case(not_reentrant=_GRAD_INSIDE, torch="wrong")
def backward_inside() -> Call:
    probe = leaf(6)

    def function(x: Tensor) -> Tensor:
        (x.detach() * probe).sin().sum().backward()
        return x.sin().exp()

    return Call(function, (leaf(5, 6),), state={"probe": probe})


@case(not_reentrant="every output of the classic variant requires a gradient")
def detached_parts() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        target = x.sin().detach()
        return (x * target).exp(), target.cos()

    return Call(function, (leaf(5, 6),))


@case()
def part_without_gradient() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = linear(x).softmax(-1)
        return F.kl_div(linear(x).log_softmax(-1), teacher, reduction="sum") + x.sin()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@case()
def offload_inside() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        y = linear(x).sin()
        with torch.autograd.graph.save_on_cpu():
            y = linear(y).exp()
        return y.cos()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@case(not_reentrant=_GRAD_INSIDE)
def tensor_hook_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y.exp()

    return Call(function, (leaf(5, 6),))


@case()
def straight_through() -> Call:
    def function(x: Tensor) -> Tensor:
        hard = F.gumbel_softmax(x, tau=0.7, hard=True)
        return (x + (x.round() - x).detach()).sin() * hard

    return Call(function, (leaf(5, 6),))


@case()
def linear_that_saves_nothing_needed() -> Call:
    def function(x: Tensor) -> Tensor:
        return x * 2 + x.view(6, 5).T - 1

    return Call(function, (leaf(5, 6),))
