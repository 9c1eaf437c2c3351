"""What some steps were measured to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget import trial
from membudget.engine.controls import SWITCHES
from membudget.errors import OptionError
from membudget.memory import peak
from membudget.step import Step
from membudget.trial import Trial, try_steps
from tests.situations import Notes


@pytest.mark.parametrize(
    ("planned", "plain", "slowdown"),
    [
        ((3.0,), (2.0,), 1.5),
        # One slow step of a busy machine says nothing.
        ((3.0, 3.0, 99.0), (2.0, 2.0, 2.0), 1.5),
        ((3.0, 3.0, 3.0), (2.0, 99.0, 2.0), 1.5),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 1.0, 3.0, 1.0), 2.5),
    ],
)
def test_the_slowdown_is_that_of_the_median_steps(planned, plain, slowdown):
    assert Trial(0, planned, plain).slowdown == slowdown


def test_without_plain_steps_there_is_no_slowdown():
    assert Trial(0, (3.0,), ()).slowdown is None


class Told(nn.Linear):
    """A layer that notes of each forward whether regions were off, and gradients."""

    def forward(self, x: Tensor) -> Tensor:
        PLAIN(SWITCHES.disabled)
        GRADIENTS(self.weight.grad is not None)
        return super().forward(x)


PLAIN = Notes()
GRADIENTS = Notes()


def tried(count: int, measured_bytes: int = 0, **options: Any) -> Trial:
    """Try steps of a layer that a fit has measured to take some bytes."""
    PLAIN.items.clear()
    GRADIENTS.items.clear()
    fitted: Any = SimpleNamespace(peak_bytes=measured_bytes)
    return try_steps(fitted, Step(Told(4, 4), torch.ones(2, 4), None), count, **options)


def clock_of(monkeypatch: pytest.MonkeyPatch, *durations: float) -> None:
    """Let the steps take so many seconds, one after the other."""
    readings = iter([t for d in durations for t in (100.0, 100.0 + d)])
    monkeypatch.setattr(trial, "step_clock", lambda: lambda: next(readings))


def test_planned_and_plain_steps_take_turns_and_the_first_round_is_not_counted(
    monkeypatch,
):
    clock_of(monkeypatch, 50.0, 60.0, 3.0, 2.0, 5.0, 4.0)
    found = tried(2)
    assert found.planned_seconds == (3.0, 5.0)
    assert found.plain_seconds == (2.0, 4.0)
    # And one that is metered.
    assert PLAIN.items == [False, True] * 3 + [False]
    assert not any(GRADIENTS.items)


def test_steps_without_plain_ones_between_them_are_all_planned(monkeypatch):
    clock_of(monkeypatch, 50.0, 3.0, 5.0)
    found = tried(2, plain=False)
    assert found == Trial(found.peak_bytes, (3.0, 5.0), ())
    assert PLAIN.items == [False] * 4


def test_the_peak_of_a_trial_is_the_largest_that_was_measured():
    step = Step(Told(4, 4), torch.ones(2, 4), None)
    own_bytes = peak(step.run).peak_bytes
    assert tried(1).peak_bytes == own_bytes
    assert tried(1, own_bytes - 1).peak_bytes == own_bytes
    assert tried(1, own_bytes + 1).peak_bytes == own_bytes + 1


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_step_is_refused(count):
    with pytest.raises(OptionError, match=f"at least 1 step must run; got {count}"):
        tried(count)
