"""What is compiled: the folder `device`, in the way of the recorder in C++."""

from __future__ import annotations

from pathlib import Path

from membudget.engine.native.library import Library

DEVICE = Library(
    "emulated", Path(__file__).parent / "device", "the emulated device", "-O1"
)
