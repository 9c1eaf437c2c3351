"""What a step takes on an accelerator, in lines."""

from __future__ import annotations

from membudget.memory import DevicePeak
from membudget.report.memory_text import device_lines


def test_fragmentation_is_what_is_reserved_in_no_block():
    taken = DevicePeak("xpu:1", 3 << 20, 0, 3 << 20, 4 << 20, 0)
    requested, _, reserved, host = device_lines(taken, 5 << 10)
    assert requested == "requested      3.0 MiB  of xpu:1, by tensors"
    assert "4.0 MiB  of which 25.0% are in no such block" in reserved
    assert "5.0 KiB" in host


def test_a_device_that_reserved_nothing_is_not_fragmented():
    taken = DevicePeak("xpu:1", 100, 0, 512, 0, 0)
    assert "0.0% are in no such block" in device_lines(taken, 0)[2]
