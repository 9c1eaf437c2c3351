"""The allocator's events, and nothing else that the profiler says."""

from __future__ import annotations

import pytest
import torch

from membudget._torch import is_profiling
from membudget.memory.events import recorded_events


def test_allocations_and_releases_are_told_in_order():
    x = torch.zeros(1000)

    with recorded_events() as events:
        y = x.sin()
        z = x.cos()[:2]
        del y, z

    sizes = [event.nbytes() for event in events.memory]
    assert sizes == [4000, 4000, -4000, -4000]
    names = [event.name() for event in events.others]
    assert names.index("aten::sin") < names.index("aten::cos")
    assert "[memory]" not in names


def test_recording_ends_with_a_failure_and_prints_nothing(capfd):
    with pytest.raises(KeyError, match="mine"), recorded_events():
        raise KeyError("mine")

    assert not is_profiling()
    assert capfd.readouterr() == ("", "")
