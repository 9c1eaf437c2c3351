"""A model with `layers`, as torchtitan's have, and a plan file for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer() for n in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def made() -> Layers:
    torch.manual_seed(0)
    return Layers()


def batch() -> Tensor:
    return torch.randn(8, 64, WIDTH, generator=torch.Generator().manual_seed(1))


def saved_plan(folder: Path) -> str:
    """Write the plan of a rank; return the path of the file."""
    path = str(folder / "plan.json")
    mb.fit(made(), batch(), "60%").plan.to_json(path)
    return path


def step(model: nn.Module) -> list[Tensor]:
    """Return the loss, the gradients and the random stream of a step."""
    torch.manual_seed(7)
    loss = model(batch())
    loss.backward()
    found: list[Any] = [loss.detach(), *(p.grad for p in model.parameters())]
    return [*found, torch.get_rng_state()]


def check_planned(policy: Any, path: str) -> None:
    """Apply a policy as torchtitan's `parallelize` functions do; compare all bits."""
    expected = step(made())
    model = made()
    built = policy.Config(plan=path).build(dump_folder="dump")
    built.apply(model)
    assert all(map(torch.equal, step(model), expected))
    regions = built.applied.status().regions
    assert regions
    assert all(region.recomputes == 1 for region in regions)


def check_on_meta(policy: Any, path: str) -> None:
    """Apply a policy to a model that gets its memory later, as torchtitan's does."""
    expected = step(weights := made())
    with torch.device("meta"):
        model = Layers()
    built = policy.Config(plan=path).build(dump_folder="dump")
    built.apply(model)
    model.to_empty(device="cpu")
    model.load_state_dict(weights.state_dict())
    assert all(map(torch.equal, step(model), expected))
    assert all(region.recomputes == 1 for region in built.applied.status().regions)
