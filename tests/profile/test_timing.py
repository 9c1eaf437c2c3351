"""How often a step runs to be timed."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from membudget.profile.timing import timed_steps
from membudget.step import Step


def timed_runs(monkeypatch: pytest.MonkeyPatch, step_s: float) -> int:
    """Return how often a step of some seconds is timed."""
    clock = itertools.count(7.0, step_s)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    step = Step(nn.Linear(2, 2), torch.ones(1, 2), None)
    runs = list(timed_steps(step, {"": step.model}))
    labels = [("start", ""), ("enter", ""), ("leave", ""), ("loss", ""), ("end", "")]
    for run in runs:
        assert [label for label in run.labels if label[0] != "backward"] == labels
        assert run.readings == sorted(run.readings)
    return len(runs)


@pytest.mark.parametrize(
    ("step_s", "runs"),
    # The clock is read at the beginning, and before each run but the first three.
    [(0.0, 15), (0.01, 15), (0.125, 6), (0.24, 5), (0.26, 4), (0.5, 3), (60.0, 3)],
)
def test_a_step_is_timed_for_half_a_second_and_3_to_15_times(monkeypatch, step_s, runs):
    assert timed_runs(monkeypatch, step_s) == runs


def test_all_ranks_time_as_many_steps(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert timed_runs(monkeypatch, 0.0) == 3
