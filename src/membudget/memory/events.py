"""The events of the CPU's allocator, as torch's profiler notes them.

Every allocation and every release is one, also in the threads of autograd and inside
kernels, so their running sum is what is alive.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile


@dataclass(slots=True)
class Events:
    """What the profiler noted.

    Attributes:
        memory: Allocations and releases on the CPU, in order.
        others: All else: operators, and what was marked.
    """

    memory: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def recorded_events() -> Iterator[Events]:
    """Record what runs inside.

    Yields:
        The events, which are there when the context has ended.
    """
    events = Events()
    recorder = profile(profile_memory=True)
    with quiet_stderr():
        recorder.__enter__()
    try:
        yield events
    finally:
        with quiet_stderr():
            recorder.__exit__(None, None, None)
    results: Any = recorder.kineto_results
    for event in results.events():
        if event.name() != "[memory]":
            events.others.append(event)
        elif event.device_type() == DeviceType.CPU:
            events.memory.append(event)
    events.memory.sort(key=lambda event: event.start_ns())


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hide the line that the profiler's C++ code prints when it starts and stops."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # There is no standard error to be quiet about.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
