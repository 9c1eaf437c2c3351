"""Python loops over one cell: recurrent networks, differential equations, DEQ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family

WIDTH = 48


class Recurrent(nn.Module):
    """A cell that a Python loop calls for each place of a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(64, WIDTH), cell
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        state: Any = None
        states = []
        for place in range(tokens.shape[1] - 1):
            state = self.cell(x[:, place], state)
            hidden = state[0] if isinstance(state, tuple) else state
            states.append(F.dropout(hidden, 0.1, self.training))
        logits = self.head(torch.stack(states, 1))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def recurrent(cell: nn.Module) -> Made:
    """Return a loop over a cell, and sequences."""

    def batch(other: bool) -> Tensor:
        return torch.randint(0, 64, (96, 16) if other else (128, 24))

    return Made(Recurrent(cell), batch)


@family("recurrent")
def lstm_cell() -> Made:
    return recurrent(nn.LSTMCell(WIDTH, WIDTH))


@family("recurrent")
def gru_cell() -> Made:
    return recurrent(nn.GRUCell(WIDTH, WIDTH))


class FastWeights(nn.Module):
    """A cell whose state is a matrix (linear attention, one place at a time)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        matrix = x.new_zeros(len(x), WIDTH, WIDTH) if state is None else state[1]
        query, key, value, gate = self.parts(x).chunk(4, -1)
        matrix = matrix * torch.sigmoid(gate)[:, None] + torch.einsum(
            "bi,bj->bij", F.elu(key) + 1, value
        )
        return self.norm(torch.einsum("bi,bij->bj", query.softmax(-1), matrix)), matrix


@family("recurrent")
def fast_weights() -> Made:
    return recurrent(FastWeights())


@family("recurrent")
def lstm_layers() -> Made:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
            self.head = nn.Sequential(nn.Linear(WIDTH, 192), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0]).square().mean()

    def batch(other: bool) -> Tensor:
        return torch.randn(*((48, 32) if other else (64, 48)), WIDTH)

    return Made(Layers(), batch)


class Dynamics(nn.Module):
    """The right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH)
        )

    def forward(self, time: Tensor, x: Tensor) -> Tensor:
        moved: Tensor = self.layers(x) * torch.cos(time)
        return moved


class NeuralODE(nn.Module):
    """A differential equation between two layers, by one solver of torchdiffeq."""

    def __init__(self, adjoint: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.dynamics, self.options = Dynamics(), options
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.adjoint = adjoint

    def forward(self, x: Tensor) -> Tensor:
        from torchdiffeq import odeint, odeint_adjoint

        times = torch.linspace(0, 1, 5)
        solve = odeint_adjoint if self.adjoint else odeint
        path = solve(self.dynamics, self.first(x), times, **self.options)
        return self.last(path).square().mean()


def neural_ode(adjoint: bool, **options: Any) -> Made:
    """Return a differential equation, and where it starts."""

    def batch(other: bool) -> Tensor:
        return torch.randn(768 if other else 1024, 16)

    return Made(NeuralODE(adjoint, options), batch)


@family("neural ODE")
def ode_rk4() -> Made:
    return neural_ode(False, method="rk4")


@family("neural ODE")
def ode_dopri5() -> Made:
    return neural_ode(False, method="dopri5", rtol=1e-3, atol=1e-4)


@family("neural ODE")
def ode_adjoint() -> Made:
    return neural_ode(True, method="rk4")


class Equilibrium(nn.Module):
    """A deep equilibrium model: a fixed point, and its gradient by a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.GroupNorm(4, 128), nn.Tanh()
        )
        self.outer, self.head = nn.Linear(128, WIDTH), nn.Linear(WIDTH, 8)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.outer(self.inner(z)) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.detach().requires_grad_()
        if torch.is_grad_enabled():
            again = self.step(start, x.detach())

            def backward(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(12):
                    (product,) = torch.autograd.grad(
                        again, start, found, retain_graph=True
                    )
                    found = product + grad
                return found

            z.register_hook(backward)
        return self.head(z).square().mean()


@family("equilibrium")
def equilibrium_by_hook() -> Made:
    def batch(other: bool) -> Tensor:
        return torch.randn(768 if other else 1024, WIDTH)

    return Made(Equilibrium(), batch)


class Unrolled(Equilibrium):
    """The same fixed point, with gradients through every step to it."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(8):
            z = self.step(z, x)
        return self.head(z).square().mean()


@family("equilibrium")
def equilibrium_unrolled() -> Made:
    def batch(other: bool) -> Tensor:
        return torch.randn(768 if other else 1024, WIDTH)

    return Made(Unrolled(), batch)
