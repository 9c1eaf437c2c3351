"""The state of autocast, of every device."""

from __future__ import annotations

import torch

from membudget.state.autocast import autocast_state
from tests.accelerators import pretend


def test_outside_of_autocast_there_is_no_state():
    assert autocast_state() == ()


def test_each_dtype_is_another_state_and_each_device_a_part_of_it(monkeypatch):
    pretend(monkeypatch)
    states = set()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            states.add(autocast_state())
    assert len(states) == 2
    assert all(len(state) == 2 for state in states)
