"""Row C6: `fit` measures the step that it profiled, with the same random numbers.

Layers that are dropped at random made the profiled step another than the measured one:
a plan for two layers was measured on six, and refused. And a plan for six layers does
not hold for a step that runs eight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.situations import Notes

LEGACY: Any = np.random


class LayerDrop(nn.Module):
    """Layers that are skipped at random, by torch's or by Python's generator."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.draw = draw
        self.ran: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append([])
        for number, layer in enumerate(self.layers):
            if self.draw() < 0.5:
                x = layer(x).tanh()
                self.ran[-1].append(number)
        return x


def runs_of_fit(draw: Callable[[], float]) -> list[list[int]]:
    """Fit a model that drops layers, and return which ran in each of its forwards."""
    torch.manual_seed(0)
    random.seed(0)
    LEGACY.seed(0)
    model = LayerDrop(draw)
    notes = Notes()
    model.register_forward_hook(lambda module, args, output: notes(module.ran[-1]))
    fitted = mb.fit(model, torch.randn(2048, 32), "90%")
    assert len(notes.items) > 8
    assert fitted.peak_bytes == fitted.plan.peak_bytes
    return notes.items


def test_row_c06_every_step_of_a_fit_runs_the_same_layers():
    first, *later = runs_of_fit(random.random)  # Held before `fit` could set it.
    assert all(layers == first for layers in later)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()).item(),
        lambda: random.random(),
        lambda: LEGACY.uniform(0, 1),
    ],
    ids=["torch", "python", "numpy"],
)
def test_row_c06_steps_of_a_fit_run_all_layers_that_may_drop(draw: Callable[[], float]):
    ran = runs_of_fit(draw)
    # First it runs what chance says, and with the smallest and the largest numbers: a
    # step without layers fails.
    assert ran[2:5] == [list(range(8)), list(range(8)), []]
    assert len(ran) > 13
    assert all(layers == list(range(8)) for layers in ran[5:])
