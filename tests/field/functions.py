"""Networks of science and commerce: operators, flows, fields, recommendations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family


class SpectralLayer(nn.Module):
    """A convolution by complex weights on the lowest frequencies, and a local one."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(
            torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width
        )
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        low = waves[..., : self.modes, : self.modes]
        moved = torch.zeros_like(waves)
        moved[..., : self.modes, : self.modes] = torch.einsum(
            "bixy,ioxy->boxy", low, self.weight
        )
        return F.gelu(torch.fft.irfft2(moved, s=x.shape[-2:]) + self.local(x))


class FourierOperator(nn.Module):
    """A Fourier neural operator from a field to a field."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.layers = nn.Sequential(*(SpectralLayer(width, 8) for _ in range(4)))
        self.project = nn.Sequential(
            nn.Conv2d(width, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1)
        )

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.project(self.layers(self.lift(field))), target)


@family("neural operator")
def fourier_operator() -> Made:
    def batch(other: bool) -> tuple[Tensor, Tensor]:
        shape = (4, 1, 48, 48) if other else (6, 1, 56, 56)
        return torch.randn(shape), torch.randn(shape)

    return Made(FourierOperator(), batch)


class Coupling(nn.Module):
    """Half of the variables scale and move the other half; then they change places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, 2 * width)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, -1)
        scale, shift = self.network(kept).chunk(2, -1)
        scale = torch.tanh(scale)
        return torch.cat([changed * scale.exp() + shift, kept], -1), scale.sum(-1)


class Flow(nn.Module):
    """A normalizing flow (RealNVP), trained by its likelihood."""

    def __init__(self, variables: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(variables // 2) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for layer in self.layers:
            x, added = layer(x)
            volume = volume + added
        likelihood = volume - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)
        return -likelihood.mean()


@family("normalizing flow")
def real_nvp() -> Made:
    return Made(Flow(), lambda other: torch.randn(3072 if other else 4096, 32))


class RadianceField(nn.Module):
    """A NeRF: colours and densities along rays, and what a camera sees of them."""

    def __init__(self, width: int = 64, frequencies: int = 6) -> None:
        super().__init__()
        self.frequencies = frequencies
        encoded = 6 * frequencies
        self.body = nn.Sequential(
            nn.Linear(encoded, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.skip = nn.Linear(width + encoded, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)

    def encode(self, x: Tensor) -> Tensor:
        scaled = x[..., None] * 2.0 ** torch.arange(self.frequencies)
        return torch.cat([scaled.sin(), scaled.cos()], -1).flatten(-2)

    def forward(self, start: Tensor, direction: Tensor, seen: Tensor) -> Tensor:
        depth = torch.linspace(0.1, 4, 24) + 0.1 * torch.rand(len(start), 24)
        depth = depth.sort(-1).values
        places = self.encode(start[:, None] + depth[..., None] * direction[:, None])
        hidden = F.relu(self.skip(torch.cat([self.body(places), places], -1)))
        density = F.softplus(self.density(hidden))[..., 0]
        steps = torch.cat([depth.diff(dim=-1), depth.new_ones(len(depth), 1)], -1)
        opacity = 1 - torch.exp(-density * steps)
        passed = torch.cumprod(1 - opacity + 1e-10, -1)
        colour = torch.sigmoid(self.colour(hidden))
        return F.mse_loss(((passed * opacity)[..., None] * colour).sum(1), seen)


@family("radiance field")
def nerf() -> Made:
    def batch(other: bool) -> tuple[Tensor, Tensor, Tensor]:
        rays = 384 if other else 512
        direction = F.normalize(torch.randn(rays, 3), dim=-1)
        return torch.randn(rays, 3), direction, torch.rand(rays, 3)

    return Made(RadianceField(), batch)


class Recommender(nn.Module):
    """A DLRM: bags of embeddings, a bottom and a top network, all their products."""

    pairs: Tensor

    def __init__(self, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(500, width, mode="sum") for _ in range(tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width)
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1),
        )  # fmt: skip
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        found = [bottom, *(t(s) for t, s in zip(self.tables, sparse, strict=True))]
        every = torch.stack(found, 1)
        products = (every @ every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([bottom, products], -1))
        return F.binary_cross_entropy_with_logits(logits, clicked)


@family("recommendation")
def dlrm() -> Made:
    def batch(other: bool) -> tuple[Tensor, Tensor, Tensor]:
        size = 1536 if other else 2048
        sparse = torch.randint(0, 500, (8, size, 4))
        return torch.randn(size, 13), sparse, torch.randint(0, 2, (size, 1)).float()

    return Made(Recommender(), batch)


class Codebook(nn.Module):
    """An autoencoder with codes in buffers that follow their mean (VQ-VAE)."""

    codes: Tensor
    counts: Tensor

    def __init__(self, width: int = 24, codes: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )  # fmt: skip
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def quantise(self, x: Tensor) -> Tensor:
        flat = x.movedim(1, -1).reshape(-1, x.shape[1])
        chosen = torch.cdist(flat, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, len(self.codes)).to(flat)
                self.counts.mul_(0.99).add_(hot.sum(0), alpha=0.01)
                mean = hot.T @ flat / hot.sum(0).clamp(min=1)[:, None]
                self.codes.lerp_(mean, 0.01)
        found = self.codes[chosen].view(*x.shape[:1], *x.shape[2:], -1)
        return found.movedim(-1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(images)
        code = self.quantise(x.detach())
        again = self.decoder(x + (code - x).detach())
        return F.mse_loss(again, images) + 0.25 * F.mse_loss(x, code)


@family("autoencoder")
def vq_vae() -> Made:
    def batch(other: bool) -> Tensor:
        return torch.randn(*((8, 3, 32, 32) if other else (12, 3, 48, 48)))

    return Made(Codebook(), batch)
