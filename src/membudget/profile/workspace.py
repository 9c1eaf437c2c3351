"""What an operator allocates beside its outputs while it runs.

On the CPU every allocation and release is an event of torch's profiler, and each
recorded operator is one, too: what is alive at most inside its interval, less what was
alive at its start, less its outputs, is its workspace. On fake tensors nothing is
allocated; what is known of a kernel's workspace is then a formula.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from membudget.memory.peak import quiet_stderr
from membudget.profile.recorder import MARK, StepRecorder


@contextmanager
def measuring(recorder: StepRecorder) -> Iterator[None]:
    """Measure the workspace of each operator that `recorder` records inside.

    The recorder must mark its operators as events.
    """
    profiler = profile(profile_memory=True)
    with quiet_stderr():
        profiler.__enter__()
    try:
        yield
    finally:
        with quiet_stderr():
            profiler.__exit__(None, None, None)
    results: Any = profiler.kineto_results
    _share_out(recorder, list(results.events()))


def _share_out(recorder: StepRecorder, events: list[Any]) -> None:
    memory = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    times = [time for time, _ in memory]
    alive = [0, *accumulate(size for _, size in memory)]
    made = _made_bytes(recorder)
    for event in events:
        if event.name().startswith(MARK):
            index = int(event.name().removeprefix(MARK))
            first = bisect_left(times, event.start_ns())
            last = bisect_left(times, event.end_ns())
            most = max(alive[first : last + 1])
            extra = most - alive[first] - made.get(index, 0)
            recorder.operators[index].workspace_bytes = max(0, extra)


def _made_bytes(recorder: StepRecorder) -> dict[int, int]:
    """Return the bytes of the storages that each operator made."""
    made: dict[int, int] = {}
    for storage in recorder.storages:
        if storage.birth >= 0:
            made[storage.birth] = made.get(storage.birth, 0) + storage.bytes
    return made
