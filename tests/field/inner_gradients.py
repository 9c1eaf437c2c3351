"""Models that differentiate inside: GAN penalties, MAML, energies, forces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.field.case import Made, family


def _critic(width: int = 24) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 64, 1),
    )


def images(other: bool) -> tuple[Tensor, Tensor]:
    """Return real images and made ones."""
    size = 6 if other else 8
    return torch.randn(size, 3, 32, 32), torch.randn(size, 3, 32, 32)


class GradientPenalty(nn.Module):
    """The critic of a WGAN, which pays for gradients that are not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = _critic()

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, 1, 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        with torch.enable_grad():
            scores = self.critic(between).sum()
            (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
        penalty = (slopes.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


@family("GAN")
def wgan_gradient_penalty() -> Made:
    return Made(GradientPenalty(), images)


class SpectralGAN(nn.Module):
    """A critic of spectral norm, and a generator with BatchNorm that it trains."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.critic = _critic()
        for layer in self.critic:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                spectral_norm(layer)
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 2 * width, 8),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, real: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(real), 16, 1, 1))
        critic = F.relu(1 + self.critic(made.detach())) + F.relu(1 - self.critic(real))
        return critic.mean() - self.critic(made).mean()


@family("GAN")
def gan_spectral_norm() -> Made:
    return Made(SpectralGAN(), lambda other: images(other)[0])


class MAML(nn.Module):
    """Two inner steps of gradient descent, and the loss after them."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.learner = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, 1),
        )  # fmt: skip
        self.rate = nn.Parameter(torch.tensor(0.05))

    @torch.enable_grad()
    def descended(
        self, weights: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> dict[str, Tensor]:
        guess = torch.func.functional_call(self.learner, weights, (x,))
        slopes = torch.autograd.grad(
            F.mse_loss(guess, y), list(weights.values()), create_graph=True
        )
        return {
            name: weight - self.rate * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }

    def forward(self, x: Tensor, y: Tensor, x_after: Tensor, y_after: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.learner.named_parameters())
        for _ in range(2):
            weights = self.descended(weights, x, y)
        guess = torch.func.functional_call(self.learner, weights, (x_after,))
        return F.mse_loss(guess, y_after)


@family("meta-learning")
def maml() -> Made:
    def batch(other: bool) -> tuple[Tensor, ...]:
        size = 1500 if other else 2000
        points = torch.rand(2, size, 1)
        return points[0], points[0].sin(), points[1], points[1].sin()

    return Made(MAML(), batch)


class EnergyModel(nn.Module):
    """An energy, and samples that walk down its gradient before they are scored."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 1),
        )  # fmt: skip

    @torch.enable_grad()
    def walked(self, x: Tensor) -> Tensor:
        total = self.energy(x).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return x - 0.1 * slope + 0.01 * torch.randn_like(x)

    def forward(self, real: Tensor) -> Tensor:
        x = torch.randn_like(real).requires_grad_()
        for _ in range(3):
            x = self.walked(x)
        return self.energy(real).mean() - self.energy(x).mean() + x.square().mean()


@family("energy")
def energy_langevin() -> Made:
    return Made(EnergyModel(), lambda other: torch.randn(768 if other else 1024, 16))


class Forces(nn.Module):
    """Energies of atoms by passed messages (SchNet), and forces as their gradient."""

    centres: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Softplus(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, 1)
        self.register_buffer("centres", torch.linspace(0, 4, 16))

    def energy(self, kinds: Tensor, places: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(kinds)
        start, end = edges
        length = (places[start] - places[end]).square().sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-(length[:, None] - self.centres).square())
        for filters, update in zip(self.filters, self.updates, strict=True):
            messages = x[start] * filters(basis)
            x = x + update(torch.zeros_like(x).index_add(0, end, messages))
        return self.head(x).sum()

    def forward(
        self, kinds: Tensor, places: Tensor, edges: Tensor, pulls: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            energy = self.energy(kinds, places, edges)
            (slopes,) = torch.autograd.grad(energy, places, create_graph=True)
        return F.mse_loss(-slopes, pulls) + 1e-4 * energy.square()


@family("energy")
def forces_of_atoms() -> Made:
    def batch(other: bool) -> tuple[Tensor, ...]:
        atoms, edges = (400, 3000) if other else (500, 4000)
        return (
            torch.randint(0, 8, (atoms,)),
            torch.randn(atoms, 3),
            torch.randint(0, atoms, (2, edges)),
            torch.randn(atoms, 3),
        )

    return Made(Forces(), batch)
