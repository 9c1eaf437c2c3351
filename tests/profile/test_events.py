"""Events of blocks, and the page faults up to them."""

from __future__ import annotations

import sys
from mmap import PAGESIZE, mmap

import pytest
import torch
from torch import nn

from membudget.profile import events
from membudget.profile.events import TimerEvents, page_faults


def test_events_are_noted_while_the_context_is_open():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    readings = iter(range(100))
    noted = TimerEvents(lambda: next(readings))
    with noted.on({"0": model[0], "1": model[1]}):
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert noted.labels == [
        *(("enter", "0"), ("leave", "0"), ("enter", "1"), ("leave", "1")),
        *(("backward", "1"), ("backward", "0")),
    ]
    assert noted.readings == list(range(6))
    model(torch.ones(1, 2))
    assert len(noted.labels) == 6
    with noted.on({"0": model[0]}), torch.no_grad():
        model(torch.ones(1, 2))
    assert noted.labels[6:] == [("enter", "0"), ("leave", "0")]


def test_events_end_with_the_context_if_it_fails():
    model, noted = nn.Linear(2, 2), TimerEvents(lambda: 0)
    with pytest.raises(KeyError, match="mine"), noted.on({"": model}):
        raise KeyError("mine")
    model(torch.ones(1, 2))
    assert noted.labels == []


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are the system's")
def test_memory_that_is_new_to_the_process_counts_as_page_faults():
    noted = TimerEvents(lambda: 0)
    size, huge_page = 2**24, 2**21
    memory = mmap(-1, size)  # A heap may have memory left from before.
    noted.note("start")
    for byte in range(0, size, PAGESIZE):
        memory[byte] = 1
    noted.note("end")
    assert noted.faults[1] - noted.faults[0] >= size // huge_page


def test_page_faults_are_none_where_nothing_counts_them(monkeypatch):
    monkeypatch.setattr(events, "resource", None)
    assert page_faults() == 0
