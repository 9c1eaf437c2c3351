"""Row A1: a recording changes none of autograd's formulas.

While a dispatch mode is on, torch takes other formulas for tensors that could be
subclasses. A recording must leave the plain step's, in a backward inside of the region
and in composite kernels, with the Python recorder alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb

Energy = Callable[[Tensor], Tensor]

ENERGIES: dict[str, Energy] = {
    "prod": lambda h: h.prod(1),
    "prod of all": lambda h: h.prod(),
    "cumprod": lambda h: h.cumprod(1).sum(1),
    "cummax": lambda h: h.cummax(1).values.sum(1),
    "max": lambda h: h.max(1).values,
    "max of all": lambda h: h.max(),
    "min of all": lambda h: h.min(),
    "gather": lambda h: h.gather(1, torch.zeros(len(h), 2, dtype=torch.long)).sum(1),
    "index": lambda h: h[torch.tensor([0, 2, 2])].sum(),
    "determinant": lambda h: torch.linalg.det(h[:4, :4]),
    "norm": lambda h: h.norm(dim=1),
}
REGIONS: dict[str, Any] = {
    "rerun": {"engine": "rerun"},
    "debug": {"engine": "rerun", "debug": True},
    "replay": {"engine": "replay"},
    "unverified": {"engine": "replay", "verify": False},
    "fingerprints": {"engine": "replay", "verify": "fingerprints"},
    "everything": {"engine": "replay", "keep": mb.policies.everything},
}


class Block(nn.Module):
    """A block that adds the gradient of an energy."""

    def __init__(self, energy: Energy):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)
        self.energy = energy

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x)))) + 1.5
        energy = self.energy(hidden).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + 0.1 * force


def step(block: Block, call: Callable[..., Tensor]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    block.zero_grad()
    loss = call(block, call(block, x)).square().mean()
    loss.backward()
    gradients = [t.grad for t in (x, *block.parameters())]
    return [loss.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("energy", ENERGIES)
def test_row_a01_a_gradient_inside_a_region_is_the_plain_one(energy: str, region: str):
    block = Block(ENERGIES[energy])
    wanted = step(block, lambda f, x: f(x))
    wanted = [t.clone() for t in wanted]
    for _ in range(2):
        found = step(block, lambda f, x: mb.checkpoint(f, x, **REGIONS[region]))
        assert all(map(torch.equal, found, wanted))


def test_row_a01_composite_kernels_take_the_plain_formula_in_the_forward():
    torch.manual_seed(1)
    matrix = torch.randn(5, 4, dtype=torch.complex64)

    def function(x: Tensor) -> Tensor:
        return torch.linalg.pinv(x).abs()

    def run(call: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        x = matrix.clone().requires_grad_()
        y = call(function, x)
        y.sum().backward()
        return y.detach(), x.grad

    y, gradient = run(lambda f, x: f(x))
    found, other = run(lambda f, x: mb.checkpoint(f, x, engine="replay"))
    assert gradient is not None
    assert other is not None
    assert torch.equal(found, y)
    assert torch.equal(other, gradient)


def test_row_a01_a_fitted_step_is_the_plain_one():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(ENERGIES["prod"]) for _ in range(3)])
    x = torch.randn(64, 8, requires_grad=True)

    def run() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        loss = model(x).square().mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        return [loss.detach(), *(g.clone() for g in gradients if g is not None)]

    wanted = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = mb.fit(model, x, "70%", lambda output, batch: output.square().mean())
    assert fitted.plan.regions
    assert all(map(torch.equal, run(), wanted))


class Scaled(Tensor):
    """A subclass that answers operators itself."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor):
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ):
        args = [a.held if isinstance(a, Scaled) else a for a in args]
        output = func(*args, **(kwargs or {}))
        return Scaled(output) if isinstance(output, Tensor) else output


def test_row_a01_where_subclasses_force_the_other_formulas_a_region_refuses():
    x = torch.linspace(0.1, 0.9, 6, requires_grad=True)

    def function(x: Tensor, scaled: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(x.prod(), x, create_graph=True)
        return x + force

    with pytest.raises(mb.CheckpointError, match='engine="rerun"'):
        mb.checkpoint(function, x, Scaled(torch.ones(6)), engine="replay")
    y = mb.checkpoint(function, x, Scaled(torch.ones(6)), engine="rerun")
    assert torch.equal(y, function(x, x))
