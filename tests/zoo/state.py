"""Cases whose forward advances state: buffers, counters, shared parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import membudget as mb
from tests.zoo.case import Call, case, leaf


@case(torch="wrong")
def batch_norm_1d() -> Call:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)
    )
    return Call(model, (leaf(5, 6),))


@case(torch="wrong")
def batch_norm_2d() -> Call:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    )
    return Call(model, (leaf(2, 2, 5, 5),))


@case(torch="wrong")
def batch_norm_as_last_operator() -> Call:
    return Call(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (leaf(5, 6),))


@case(torch="wrong")
def batch_norm_with_cumulative_average() -> Call:
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 6))
    return Call(model, (leaf(5, 6),))


@case(torch="wrong")
def batch_norm_with_large_buffers() -> Call:
    # Its kernel advances the buffers behind the back of their version counters, and
    # 80 kB are more than one copies without a reason.
    return Call(nn.Sequential(nn.BatchNorm1d(20_000), nn.Tanh()), (leaf(2, 20_000),))


@case(torch="wrong")
def instance_norm_with_statistics() -> Call:
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Tanh())
    return Call(model, (leaf(2, 3, 6),))


@case()
def batch_norm_in_evaluation() -> Call:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).eval()
    return Call(model, (leaf(5, 6),))


class _MovingMean(nn.Module):
    """Subtract a moving mean that the forward first advances in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return ((x - self.mean) * x).sin()


@case(torch="wrong")
def moving_mean_read_in_forward() -> Call:
    return Call(_MovingMean(), (leaf(5, 6),))


class _ReboundMean(_MovingMean):
    """Advance the moving mean by binding the buffer's name to a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return ((x - self.mean) * x).sin()


@case(torch="wrong")
def moving_mean_bound_anew() -> Call:
    return Call(_ReboundMean(), (leaf(5, 6),))


class _PlainAttribute(nn.Module):
    """Keep a moving mean as a plain attribute, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return ((x - self.mean) * x).sin()


@case(torch="wrong")
def moving_mean_as_plain_attribute() -> Call:
    model = _PlainAttribute()
    return Call(model, (leaf(5, 6),), state={"attributes": lambda: model.mean})


class _Router(nn.Module):
    """Route tokens to experts under a bias that balances the load (no aux loss)."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        chosen = (p.detach() + self.bias).argmax(-1)
        load = torch.bincount(chosen, minlength=4).float()
        self.bias += 0.3 * (load.mean() - load).sign()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, tokens, expert(x[tokens]) * p[tokens, i, None])
        return out


@case(torch="raises", torch_says="different metadata|different number")
def router_with_balancing_bias() -> Call:
    return Call(_Router(), (leaf(16, 6),))


class _Counting(nn.Module):
    """Count calls in a buffer and in an integer; the buffer is also read."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.python_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not mb.is_recomputing():
            self.python_calls += 1
        self.calls += 1
        return (x * self.calls).sin()


@case(
    not_twice="plain autograd refuses it: the second call changes the saved counter",
    torch="wrong",
)
def counters() -> Call:
    model = _Counting()
    return Call(model, (leaf(5, 6),), state={"calls": lambda: model.python_calls})


class _Scaled(nn.Module):
    """Scale by the greatest magnitudes seen lately, as delayed fp8 scaling does."""

    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.amax.max().clone()
        self.amax.copy_(self.amax.roll(1))
        self.amax[0] = x.detach().abs().max()
        return (x / scale).tanh() * scale


@case(torch="wrong")
def amax_history() -> Call:
    return Call(_Scaled(), (leaf(5, 6),))


@case()
def tied_weights() -> Call:
    embed = nn.Embedding(9, 6)
    head = nn.Linear(6, 9, bias=False)
    head.weight = embed.weight

    def function(x: Tensor, tokens: Tensor) -> Tensor:
        return head((embed(tokens) + x).tanh())

    tokens = torch.randint(9, (5,))
    return Call(function, (leaf(5, 6), tokens), state={"embed": embed, "head": head})


@case(torch="wrong")
def spectral_norm() -> Call:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
    return Call(model, (leaf(5, 6),))


@case()
def weight_norm() -> Call:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh())
    return Call(model, (leaf(5, 6),))


@case()
def frozen_module() -> Call:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    model.requires_grad_(False)
    return Call(model, (leaf(5, 6),))


@case()
def module_used_twice() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        return linear(linear(x).tanh()).tanh()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


class _Codebook(nn.Module):
    """Quantise to the nearest of some vectors, which move towards their members."""

    entries: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.entries).argmin(-1)
        quantised = F.embedding(nearest, self.entries).clone()
        self.entries.index_add_(0, nearest, 0.3 * (x.detach() - quantised))
        return (x + (quantised - x).detach()) * x


@case(torch="wrong")
def codebook_that_moves() -> Call:
    return Call(_Codebook(), (leaf(5, 6),))


@case()
def orthogonal_weight() -> Call:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh())
    return Call(model, (leaf(5, 6),))
