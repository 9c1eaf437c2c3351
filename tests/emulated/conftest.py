"""Each test begins with the device as `configure()` leaves it, with nothing cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.emulated import emu

# They hold no doctests, and to import the device twice is an error.
collect_ignore = ["__main__.py", "device_module.py", "emu.py"]


@pytest.fixture(autouse=True)
def as_new() -> Iterator[None]:
    """Begin and leave with the settings that nobody changed."""
    emu.configure()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    yield
    emu.configure()
