"""Row B1: blocks that make tensors from numbers, which no operator makes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import membudget as mb


def fill(h: Tensor, content: Tensor | int) -> Tensor:
    """Return a copy of which every seventh row has another content."""
    h = h.clone()
    h[torch.arange(h.size(0)) % 7 == 0] = content
    return h


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "number": lambda h: h / torch.tensor(16.0),
    "root": lambda h: h / torch.sqrt(torch.tensor(h.size(-1), dtype=torch.float)),
    "list": lambda h: h * torch.tensor([float(i) for i in range(h.size(-1))]),
    "where": lambda h: torch.where(h > 0, h, torch.tensor(0.1)),
    "masked": lambda h: fill(h, 0),
    "masked by a tensor": lambda h: fill(h, h[0].detach()),
    "new": lambda h: h * h.new_tensor([2.0]),
    "numpy": lambda h: h * torch.from_numpy(np.ones(h.size(-1), np.float32)),
    "copied": lambda h: h * torch.tensor(np.ones(h.size(-1), np.float32)),
}


class Block(nn.Module):
    """Two layers, with a constant between them."""

    def __init__(self, constant: Callable[[Tensor], Tensor]):
        """Make the layers."""
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and what the layers make of it."""
        hidden: Tensor = gelu(self.first(x))
        result: Tensor = x + self.second(self.constant(hidden))
        return result


@pytest.mark.parametrize("constant", CONSTANTS)
def test_row_b01_a_constant_born_in_the_forward_is_planned(constant: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(CONSTANTS[constant]) for _ in range(4)))
    with mb.fit(model, torch.randn(256, 16), "65%") as fitted:
        assert fitted.plan.regions
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert not any(r.differences for r in fitted.status().regions)
        assert fitted.audit()


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("fake", [False, True])
def test_row_b01_the_profile_of_constants_is_what_is_measured(
    constant: str, fake: bool
) -> None:
    torch.manual_seed(0)
    model, x = Block(CONSTANTS[constant]), torch.randn(256, 16)
    found = mb.profile(model, x, fake=fake)

    def step() -> None:
        model(x).sum().backward()

    assert mb.peak(step).peak_bytes == pytest.approx(found.peak_bytes, abs=16)


def test_row_b01_a_constant_is_made_by_its_operator_and_must_be_kept() -> None:
    graph = mb.profile(Block(CONSTANTS["list"]), torch.randn(256, 16)).graph
    made = [o for o in graph.operators if o.name == "aten.lift_fresh.default"]
    assert [(o.is_view, o.must_keep, len(o.inputs)) for o in made] == [(False, True, 0)]
    storage = graph.storages[graph.values[made[0].outputs[0]].storage]
    assert graph.operators[storage.birth] is made[0]
    assert storage.bytes == 4 * 64


def test_row_b01_memory_that_numpy_lends_is_not_of_the_step() -> None:
    graph = mb.profile(Block(CONSTANTS["numpy"]), torch.randn(256, 16)).graph
    lent = [s for s in graph.storages if s.kind == "outside"]
    assert [(s.bytes, s.birth) for s in lent] == [(4 * 64, -1)]
