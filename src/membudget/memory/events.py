"""The events of the CPU's allocator, as torch's profiler notes them.

Every allocation and every release is one, also in the threads of autograd and inside
kernels, so their running sum is what is alive. The profiler also tells some releases of
what was there before: if it saw an allocation at the address in an earlier recording.
These are left out, or the sum would fall below what is alive.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.profiler import profile


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation, or a release of what was allocated.

    Attributes:
        moment: By the clock of the events, in nanoseconds.
        bytes: Of the storage; below 0 for a release.
        thread: In which it happened.
    """

    moment: int
    bytes: int
    thread: int


@dataclass(slots=True)
class Events:
    """What the profiler noted.

    Attributes:
        memory: Allocations and releases on the CPU, in order.
        others: All else: operators, and what was marked.
    """

    memory: list[Change] = field(default_factory=list)
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
    events.others += (e for e in results.events() if e.name() != "[memory]")
    events.memory += _changes(results.experimental_event_tree())


def _changes(tree: list[Any]) -> Iterator[Change]:
    """Yield what happened on the CPU in order; only the tree knows the addresses."""
    alive: set[int] = set()
    for node in sorted(_allocations(tree), key=lambda node: node.start_time_ns):
        change: Any = node.extra_fields
        if change.alloc_size > 0:
            alive.add(change.ptr)
        elif change.ptr in alive:
            alive.remove(change.ptr)
        else:
            continue
        yield Change(node.start_time_ns, change.alloc_size, node.start_tid)


def _allocations(tree: list[Any]) -> Iterator[Any]:
    nodes = tree[::-1]
    while nodes:
        node = nodes.pop()
        nodes += node.children[::-1]
        if node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            yield node


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
