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

    assert [change.bytes for change in events.memory] == [4000, 4000, -4000, -4000]
    names = [event.name() for event in events.others]
    assert names.index("aten::sin") < names.index("aten::cos")
    assert "[memory]" not in names


def test_releases_of_what_was_there_before_are_left_out():
    x = torch.zeros(1000)
    with recorded_events():
        seen = [x.sin() for _ in range(100)]
    addresses = {tensor.data_ptr() for tensor in seen}
    seen.clear()
    # Some of these lie where the profiler saw the allocation of another tensor.
    before = [x.sin() for _ in range(100)]
    assert addresses & {tensor.data_ptr() for tensor in before}

    with recorded_events() as events:
        before.clear()
        y = x.sin()
        del y

    assert [change.bytes for change in events.memory] == [4000, -4000]


def test_recording_ends_with_a_failure_and_prints_nothing(capfd):
    with pytest.raises(KeyError, match="mine"), recorded_events():
        raise KeyError("mine")

    assert not is_profiling()
    assert capfd.readouterr() == ("", "")
