"""Small models of images and functions, to be trained under a limit of bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.planner.models import Calls, Made


def _conv(first: int, second: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(first, second, 3, padding=1, **options)


def _far(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


class Summed(nn.Module):
    """A layer with its input added to the output."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def gan() -> Made:
    """Return a generator and a critic; the critic's loss sees no generator."""

    def function(self: Any, noise: Tensor, real: Tensor) -> Tensor:
        made = self.generator(noise[:, :, None, None])
        for_generator = F.softplus(-self.critic(made)).mean()
        for_critic = F.softplus(self.critic(made.detach())).mean()
        return for_generator + for_critic + F.softplus(-self.critic(real)).mean()

    generator = nn.Sequential(
        *(nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()),
    )
    critic = nn.Sequential(
        *(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1)),
        *(nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1)),
    )
    made = Calls(function, generator=generator, critic=critic)
    return made, (torch.randn(24, 8), torch.randn(24, 3, 16, 16))


def variational() -> Made:
    """Return an autoencoder that draws its code."""

    def function(self: Any, x: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log).exp()
        far = _far(self.decoder(code), x)
        return far + 0.01 * (mean.square() + log.exp() - log).mean()

    def layers(*widths: int) -> nn.Module:
        linear = [
            layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ELU())
        ]
        return nn.Sequential(*linear[:-1])

    made = Calls(
        function, encoder=layers(64, 96, 64, 32), decoder=layers(16, 64, 96, 64)
    )
    return made, torch.randn(256, 64)


def dense_net() -> Made:
    class Grows(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(channels), _conv(channels, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)

    layers = [_conv(3, 8), *(Grows(8 + 6 * i) for i in range(6)), _conv(44, 4)]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


def squeeze_excite() -> Made:
    """Return blocks of depthwise convolutions whose channels are weighed."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weigh = nn.Sequential(
                *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 6, 1), nn.ReLU()),
                *(nn.Conv2d(6, 24, 1), nn.Hardsigmoid()),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weigh(x)

    def block() -> nn.Module:
        return Summed(
            *(nn.Conv2d(12, 24, 1), nn.BatchNorm2d(24), nn.Hardswish(inplace=True)),
            *(_conv(24, 24, groups=24), nn.Hardswish(), Weighed()),
            *(nn.Conv2d(24, 12, 1), nn.BatchNorm2d(12)),
        )

    return nn.Sequential(_conv(3, 12), *(block() for _ in range(3))), torch.randn(
        8, 3, 14, 14
    )


def inception() -> Made:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.three = nn.Conv2d(16, 4, 1), _conv(16, 4)
            self.five = nn.Conv2d(16, 4, 5, padding=2)
            self.pooled = nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = F.max_pool2d(x, 3, 1, 1)
            parts = [self.one(x), self.three(x), self.five(x), self.pooled(pooled)]
            return F.relu(torch.cat(parts, 1))

    return nn.Sequential(_conv(3, 16), *(Branches() for _ in range(4))), torch.randn(
        8, 3, 14, 14
    )


def denoiser() -> Made:
    """Return a U-Net with group norms, attention at its bottom, and a time."""

    class Block(nn.Module):
        def __init__(self, first: int, second: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(4, first), _conv(first, second)
            self.time = nn.Linear(16, second)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]

    def function(self: Any, x: Tensor, time: Tensor) -> Tensor:
        time = F.silu(self.time(time))
        a = self.down(self.first(x), time)
        b = self.middle(F.avg_pool2d(a, 2), time)
        flat = b.flatten(2).transpose(1, 2)[:, None]
        mixed = F.scaled_dot_product_attention(flat, flat, flat)[:, 0]
        b = b + mixed.transpose(1, 2).view_as(b)
        up = self.up(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1), time)
        return self.last(up) - x

    made = Calls(
        function,
        time=nn.Linear(8, 16),
        first=_conv(3, 8),
        down=Block(8, 16),
        middle=Block(16, 24),
        up=Block(40, 8),
        last=_conv(8, 3),
    )
    return made, (torch.randn(8, 3, 16, 16), torch.randn(8, 8))


def video() -> Made:
    def block() -> nn.Module:
        norm = nn.InstanceNorm3d(8, affine=True)
        return Summed(nn.Conv3d(8, 8, 3, padding=1), norm, nn.GELU())

    layers = [nn.Conv3d(1, 8, 3, padding=1), *(block() for _ in range(4))]
    return nn.Sequential(*layers), torch.randn(2, 1, 4, 12, 12)


def segmentation() -> Made:
    """Return a decoder that puts values back to where they were pooled from."""

    def function(self: Any, x: Tensor, classes: Tensor) -> Tensor:
        a, where_a = F.max_pool2d(self.first(x), 2, return_indices=True)
        b, where_b = F.max_pool2d(self.second(a), 2, return_indices=True)
        x = self.third(F.max_unpool2d(self.middle(b), where_b, [2, 2]))
        x = self.last(F.max_unpool2d(x, where_a, [2, 2]))
        return F.cross_entropy(x, classes)

    def layer(a: int, b: int) -> nn.Module:
        return nn.Sequential(_conv(a, b), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    made = Calls(
        function,
        first=layer(3, 12),
        second=layer(12, 20),
        middle=layer(20, 20),
        third=layer(20, 12),
        last=_conv(12, 5),
    )
    return made, (torch.randn(6, 3, 20, 20), torch.randint(5, (6, 20, 20)))


def super_resolution() -> Made:
    layers = [_conv(1, 12), *(Summed(_conv(12, 12), nn.PReLU()) for _ in range(5))]
    tail = [_conv(12, 4), nn.PixelShuffle(2), nn.Hardtanh()]
    return nn.Sequential(*layers, *tail), torch.randn(4, 1, 20, 20)


def flow() -> Made:
    """Return couplings that sum up the logarithms of their determinants."""

    def function(self: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in self.layers:
            kept, changed = x.chunk(2, 1)
            log, shift = layer(kept).chunk(2, 1)
            log = log.tanh()
            x = torch.cat([changed * log.exp() + shift, kept], 1)
            total = total + log.sum(1)
        return (0.5 * x.square().sum(1) - total).mean()

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 48), nn.Softplus(), nn.Linear(48, 24))

    made = Calls(function, layers=nn.ModuleList(net() for _ in range(7)))
    return made, torch.randn(256, 24)


def hypernetwork() -> Made:
    """Return a network that makes the weights of another for each sample."""

    def function(self: Any, x: Tensor, task: Tensor) -> Tensor:
        for make in self.makers:
            weight = make(task).unflatten(1, (16, 16))
            x = torch.baddbmm(x, x, weight).relu()
        return x.square().mean()

    def maker() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 256))

    made = Calls(function, makers=nn.ModuleList(maker() for _ in range(5)))
    return made, (torch.randn(32, 24, 16), torch.randn(32, 8))


def codebook() -> Made:
    """Return an autoencoder whose code is the nearest row of a table."""

    def function(self: Any, x: Tensor) -> Tensor:
        code = self.encoder(x)
        nearest = self.table(torch.cdist(code, self.table.weight).argmin(1))
        far = _far(nearest, code.detach()) + _far(code, nearest.detach())
        return far + _far(self.decoder(code + (nearest - code).detach()), x)

    def net(a: int, b: int) -> nn.Module:
        layers = [nn.Linear(a, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(96, b))

    made = Calls(
        function, encoder=net(48, 12), table=nn.Embedding(32, 12), decoder=net(12, 48)
    )
    return made, torch.randn(256, 48)


def _solver(step: Callable[[Any, Tensor], Tensor], times: int) -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = step(self.net, x)
        return self.head(x)

    net = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
    return Calls(function, net=net, head=nn.Linear(24, 3)), torch.randn(128, 24)


def runge_kutta() -> Made:
    """Return an ordinary differential equation, in four stages a step."""

    def step(net: Any, x: Tensor) -> Tensor:
        a = net(x)
        b = net(x + 0.05 * a)
        c = net(x + 0.05 * b)
        return x + (a + 2 * b + 2 * c + net(x + 0.1 * c)) / 60

    return _solver(step, 3)


def equilibrium() -> Made:
    """Return one layer that is applied again and again."""
    return _solver(lambda net, x: torch.tanh(x + net(x)), 8)


def fourier() -> Made:
    """Return layers that weigh the lowest frequencies of their input."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 12, 9, 2) / 12)
            self.beside = nn.Conv1d(12, 12, 1)

        def forward(self, x: Tensor) -> Tensor:
            low = torch.fft.rfft(x)[..., :9]
            weight = torch.view_as_complex(self.weight)
            mixed = torch.einsum("bif,iof->bof", low, weight)
            return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.beside(x))

    return nn.Sequential(*(Spectral() for _ in range(4))), torch.randn(16, 12, 64)


def normalised_weights() -> Made:
    def layer() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(48, 48)), nn.Mish())

    return nn.Sequential(*(layer() for _ in range(6))), torch.randn(256, 48)
