"""What tests of routes look at: the trips of calls, and what Python records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import membudget as mb
from membudget.engine.replay import following
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.recorder import Recorder
from membudget.engine.replay.routes import Known, Routes


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of all trips: whether each has arrived."""
    mb.checkpoint(torch.sin, torch.ones(1, requires_grad=True), engine="replay")
    if not EXTENSION:
        pytest.skip("the extension has not been built")
    found: list[bool] = []
    end_trip = Routes.end_trip

    def noted(routes: Routes, last: Known, has_arrived: bool, surveyed: bool) -> None:
        found.append(has_arrived)
        end_trip(routes, last, has_arrived, surveyed)

    monkeypatch.setattr(Routes, "end_trip", noted)
    following._UNVERIFIED.clear()
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of all operators that Python records."""
    found: list[str] = []
    observe = Recorder.observe

    def noted(recorder: Recorder, operator: Any, args: Any, kwargs: Any) -> Any:
        found.append(str(operator))
        return observe(recorder, operator, args, kwargs)

    monkeypatch.setattr(Recorder, "observe", noted)
    return found
