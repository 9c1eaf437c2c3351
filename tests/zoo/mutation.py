"""Cases that write into tensors, share storages or hand out views."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, case, leaf


@case()
def relu_in_place_on_intermediate() -> Call:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))
    return Call(model, (leaf(5, 6),))


@case()
def arithmetic_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = (x @ x.T).mul_(0.5).add_(1.0)
        return F.silu(y.clone().clamp_(-1, 1)).sigmoid_() * y

    return Call(function, (leaf(5, 6),))


@case()
def in_place_on_views() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[:, :3].mul_(x[:, 3:])
        y.view(-1)[::2].sin_()
        y.T[1].add_(y[0, 1].detach())
        return y.exp()

    return Call(function, (leaf(5, 6),))


@case()
def view_output() -> Call:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).view(2, 15).T[1:8]

    return Call(function, (leaf(5, 6),))


@case()
def view_of_the_input_output() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(3, 10), x.sin().exp()

    return Call(function, (leaf(5, 6),))


@case()
def writes_by_index_and_mask() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.zeros(5, 6)
        y.copy_(x.sin())
        y.masked_fill_(x > 1, 0.25)
        y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), x[0, :2].exp())
        y.scatter_(1, torch.tensor([[0], [3]]), x[:2, 4:5] * 3)
        return y * x

    return Call(function, (leaf(5, 6),))


@case()
def rows_written_in_a_loop() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        out = torch.empty(5, 6)
        hidden = torch.zeros(6)
        for i, row in enumerate(x):
            hidden = (linear(row) + hidden).tanh()
            out[i] = hidden
        return out

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@case(
    refused="changed in place by the region itself|modified by an inplace operation",
    not_reentrant="the classic variant hands the function leaves",
    torch="raises",
    torch_says="modified by an inplace operation",
)
def in_place_on_the_input() -> Call:
    x = leaf(5, 6)
    return Call(lambda y: F.relu(y, inplace=True) * 2, (x * 1,), state={"x": x})


@case(refused="changed in place by the region itself", torch="wrong")
def running_mean_closed_over() -> Call:
    mean = torch.ones(6)  # No buffer of a module, so nobody knows it to be state.

    def function(x: Tensor) -> Tensor:
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return ((x - mean) * x).sin()

    return Call(function, (leaf(5, 6),), state={"mean": mean})


@case(
    refused="changed in place by the region itself|modified by an inplace operation",
    not_reentrant="a recompute would start from the mean that the forward left",
    torch="raises",
    torch_says="modified by an inplace operation",
)
def running_mean_as_argument() -> Call:
    def function(x: Tensor, mean: Tensor) -> Tensor:
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return ((x - mean) * x).sin()

    return Call(function, (leaf(5, 6), torch.ones(6)))


@case()
def foreach_operators() -> Call:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = torch._foreach_mul([x, y], [y, x])
        parts = torch._foreach_sin(parts)
        torch._foreach_add_(parts, 1.0)
        return list(torch._foreach_exp(parts))

    return Call(function, (leaf(5, 6), leaf(5, 6)))


@case()
def out_argument() -> Call:
    def function(x: Tensor) -> Tensor:
        buffer = torch.empty(5, 5)
        with torch.no_grad():
            torch.mm(x, x.T, out=buffer)
        return (x.T @ buffer).sin()

    return Call(function, (leaf(5, 6),))


@case()
def deepcopy_inside() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        twin = copy.deepcopy(linear).requires_grad_(False)
        mask = copy.deepcopy((x > 0).float().detach())
        return linear(twin(x).tanh()) * mask

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@case()
def data_set_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = torch.ones(5, 6)
        z.data = y.detach().sin()
        return (y * z).exp()

    return Call(function, (leaf(5, 6),))


@case()
def embedding_with_max_norm() -> Call:
    # The lookup first renormalises the rows of its weight in place.
    model = nn.Embedding(9, 6, max_norm=1.0)

    def function(x: Tensor, tokens: Tensor) -> Tensor:
        return (model(tokens) * x).sin()

    tokens = torch.tensor([1, 1, 4, 8, 0])
    return Call(function, (leaf(5, 6), tokens), state={"model": model})


@case()
def output_shared_with_intermediate() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x.exp()
        return base[:2] * 1, base.t().contiguous().t()[2:]

    return Call(function, (leaf(5, 6),))


@case(cpu_only="NumPy reaches the CPU's memory alone")
def written_through_numpy() -> Call:
    def function(x: Tensor) -> Tensor:
        mask = torch.empty(5, 6)
        mask.numpy()[:] = x.detach().numpy() > 0
        return (x * mask).sin()

    return Call(function, (leaf(5, 6),))
