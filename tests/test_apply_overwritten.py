"""Plans with stages take what is simulated where regions overwrite what they read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.planner.schedule import Simulator
from membudget.planning import make_plan
from tests.drawn import staged_schedule
from tests.planner.models import measured_peak
from tests.test_apply_plan import check_same, facts_of_step

DRAWS = 20


class Cell(nn.Module):
    """An LSTM's cell, which overwrites its gates one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x), torch.zeros_like(x)
        for shift in range(3):
            state = self.cell(x.roll(shift, 0), state)
        return x + self.out(state[0])


class Recurrent(nn.Module):
    """A layer that transposes what it has stacked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.RNN(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.layer(x)[0])


class Activated(nn.Module):
    """A convolution whose activation saves a copy of what it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x), inplace=True)
        return x + F.silu(self.second(F.dropout(y, 0.1)), inplace=True)


class Normed(nn.Module):
    """Linear layers whose norms are buffers that each call writes, and reads."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(normed(nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return x


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cell": (Cell, (256, 32)),
    "recurrent": (Recurrent, (16, 12, 32)),
    "activated": (Activated, (4, 8, 16, 16)),
    "normed": (Normed, (32, 64)),
}


@pytest.mark.parametrize("name", KINDS)
def test_stages_take_what_is_simulated_where_memory_is_overwritten(name):
    kind, shape = KINDS[name]
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(kind() for _ in range(3))), torch.randn(shape)
    profile = mb.profile(model, batch)
    simulator, draws = Simulator(profile.graph), Random(name)
    for _ in range(DRAWS):
        schedule = staged_schedule(simulator, draws)
        plain, planned = copy.deepcopy(model), copy.deepcopy(model)
        mb.apply(planned, make_plan(profile, schedule, planned, 0))
        for _ in range(2):
            check_same(facts_of_step(plain, batch), facts_of_step(planned, batch))
        error = schedule.peak_bytes / measured_peak(planned, batch) - 1
        assert abs(error) <= 0.005
