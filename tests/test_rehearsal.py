"""What stands in for an optimizer allocates as much, and in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from membudget.graph import StepGraph
from membudget.memory import peak
from membudget.profile import profile
from membudget.rehearsal import Rehearsal

CPU = torch.device("cpu")


def recorded(optimizer: type[torch.optim.Optimizer]) -> tuple[nn.Module, StepGraph]:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    return model, profile(model, torch.randn(4, 40), optimizer=optimizer).graph


def taken(run: Any) -> tuple[int, int]:
    found = peak(run)
    return found.peak_bytes, found.end_bytes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_it_takes_the_bytes_of_the_optimizer_s_first_step(kind):
    model, graph = recorded(kind)
    model(torch.randn(4, 40)).sum().backward()
    optimizer = kind(model.parameters())
    rehearsal = Rehearsal.of(graph, graph.static.optimizer)
    assert rehearsal.state_bytes == graph.static.optimizer

    def rehearse() -> Any:
        context = rehearsal.begun(CPU)
        context.__enter__()
        return context

    most, end = taken(rehearse)
    real_most, real_end = taken(optimizer.step)
    assert end == real_end
    assert most == pytest.approx(real_most, abs=64)  # A counter for each parameter.


def test_a_rehearsal_leaves_nothing():
    _, graph = recorded(torch.optim.AdamW)

    def rehearse() -> None:
        with Rehearsal.of(graph, graph.static.optimizer).begun(CPU):
            pass

    assert taken(rehearse)[1] == 0


def test_state_that_exists_is_not_made():
    _, graph = recorded(torch.optim.AdamW)
    assert Rehearsal.of(graph, 0).state == ()
    last = Rehearsal.of(graph, graph.static.optimizer).state[-1]
    assert Rehearsal.of(graph, last).state == (last,)
