"""What a rank of a pipeline did in its last step, when, and in how many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from membudget.memory.counting import Counted
from membudget.planner.pipeline_order import PipelineAction
from membudget.planner.pipeline_simulation import PipelineEvent


class ActionBytes(NamedTuple):
    """Live bytes of a rank around one of its actions.

    Attributes:
        action: The action.
        before_bytes: When it began.
        peak_bytes: At most, while it ran.
        after_bytes: When it had ended.
    """

    action: PipelineAction
    before_bytes: int
    peak_bytes: int
    after_bytes: int


class EventLog:
    """The events of one rank in its last step.

    Attributes:
        events: What the rank did when, in seconds of this process's clock.
        bytes: Bytes around each action; empty without a meter.
    """

    def __init__(self, rank: int, device: torch.device, meter: bool):
        """Choose whose events to log, and whether to count bytes."""
        self._rank = rank
        self._counted = Counted(device) if meter else None
        self._counts = False
        self.events: list[PipelineEvent] = []
        self.bytes: list[ActionBytes] = []

    def begin_step(self) -> None:
        """Forget the step before; the first step begins to count."""
        self.events, self.bytes = [], []
        if self._counted is not None and not self._counts:
            # Starting takes as long as a small step: it looks through all objects.
            self._counted.start()
            self._counts = True

    @contextmanager
    def noted(self, action: PipelineAction) -> Iterator[None]:
        """Log what runs in this block; an action noted twice in a row is one event."""
        counted = self._counted
        before_bytes = 0
        if counted is not None:
            before_bytes = counted.live_bytes()
            counted.restart()
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        if self.events and self.events[-1].action == action:
            start_s = self.events.pop().start_s
        self.events.append(PipelineEvent(self._rank, action, start_s, end_s))
        if counted is not None:
            self._count(action, before_bytes, counted)

    def _count(
        self, action: PipelineAction, before_bytes: int, counted: Counted
    ) -> None:
        peak_bytes = counted.peak_bytes()
        if self.bytes and self.bytes[-1].action == action:
            first = self.bytes.pop()
            before_bytes = first.before_bytes
            peak_bytes = max(peak_bytes, first.peak_bytes)
        after_bytes = counted.live_bytes()
        self.bytes.append(ActionBytes(action, before_bytes, peak_bytes, after_bytes))

    def gathered(self, group: dist.ProcessGroup | None) -> tuple[PipelineEvent, ...]:
        """Return the events of all ranks, in seconds since the first of them.

        The clocks of different machines differ: they are compared after a barrier,
        which ranks leave within less than a millisecond of each other.
        """
        dist.barrier(group)
        now_s = time.perf_counter()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (now_s, self.events), group)
        shifted = [
            event._replace(start_s=event.start_s - at_s, end_s=event.end_s - at_s)
            for at_s, events in found
            for event in events
        ]
        first_s = min((event.start_s for event in shifted), default=0.0)
        return tuple(
            event._replace(start_s=event.start_s - first_s, end_s=event.end_s - first_s)
            for event in shifted
        )


class LoggedReceive:
    """A posted receive, whose waiting is logged."""

    def __init__(self, work: Any, noted: Callable[[], Any]):
        """Wrap what torch waits for."""
        self._work, self._noted = work, noted

    def wait(self) -> None:
        """Wait until the tensor has arrived; on a GPU, let the stream wait."""
        with self._noted():
            self._work.wait()
