"""One recorded size of a micro-batch, and what is predicted of it under a schedule."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from membudget._torch_accelerator import HOST
from membudget.allowance import gradient_bytes
from membudget.engine import native
from membudget.graph import ModuleCall, StepGraph
from membudget.loop.host_room import HostRoom
from membudget.loop.micro_batch import RecordedBatch
from membudget.loop.situation import Sizes
from membudget.planner.choice import Choice, made_in
from membudget.planner.moved import Host
from membudget.planner.plan import RegionPlan
from membudget.planner.planner import Planner, plain_schedule, smoothed
from membudget.planner.region_plans import region_plans
from membudget.planner.schedule import Schedule, Simulator
from membudget.planning import overheads_of, planner_of
from membudget.profile import Profile
from membudget.state.bits import fingerprint_bytes

RegionPlans = tuple[RegionPlan, ...]

STATE_BYTES = 5056
"""Bytes of the CPU's generator's state; those of accelerators are smaller."""

MOST_KNOWN = 64
"""Schedules of which is known what a size takes under them."""

MOST_FOUND = 32
"""Schedules that a planner finds before it is made anew, without what it simulated."""


class Decisions(NamedTuple):
    """What a schedule decides, without what was predicted of it for one size."""

    calls: tuple[ModuleCall, ...]
    choices: tuple[Choice, ...]
    host: Host | None = None  # Where some is moved to.

    @classmethod
    def of(cls, schedule: Schedule) -> Decisions:
        """Return what a schedule decides."""
        moves = any(choice.offloaded for choice in schedule.choices)
        host = schedule.host if moves else None
        return cls(schedule.calls, schedule.choices, host)


class Predicted(NamedTuple):
    """What is predicted of one size under a schedule.

    Attributes:
        schedule: The schedule.
        peak_bytes: Peak, or an upper bound on it.
        held_bytes: Bytes that are live when the forward has ended, likewise.
        slowdown: Time relative to the plain micro-batch.
        beside_bytes: What the plan needs beside its peak, at most.
    """

    schedule: Schedule
    peak_bytes: int
    held_bytes: int
    slowdown: float
    beside_bytes: int

    @property
    def foreseen_bytes(self) -> int:
        """The peak with all that the plan needs beside it."""
        return self.peak_bytes + self.beside_bytes

    @property
    def host(self) -> Host | None:
        """What the plan uses of the host; `None` if it moves nothing."""
        return self.decisions.host

    @property
    def decisions(self) -> Decisions:
        """What the schedule decides."""
        return Decisions.of(self.schedule)


@dataclass
class RecordedSize:
    """A recorded size, with what is predicted of it under each schedule.

    Attributes:
        sizes: The size.
        recording: The micro-batch of that size.
        tail_bytes: Bytes of its tail.
        holds_casts: Whether autocast's cached casts live on in the backward pass.
        host: What plans may use of the host.
        device: Where the model is.
    """

    sizes: Sizes
    recording: RecordedBatch
    tail_bytes: int
    holds_casts: bool = True
    host: HostRoom | None = None
    device: torch.device = HOST
    _planners: dict[int | None, Planner] = field(default_factory=dict)
    _smallest: dict[int | None, Predicted] = field(default_factory=dict)
    _known: dict[Decisions, Schedule] = field(default_factory=dict)
    _regions: dict[Decisions, RegionPlans] = field(default_factory=dict)

    @cached_property
    def profile(self) -> Profile:
        """The micro-batch with its tail."""
        return self.recording.with_tail(self.tail_bytes)

    @cached_property
    def simulator(self) -> Simulator:
        """Simulates schedules of the micro-batch."""
        return Simulator(smoothed(self.profile.graph), overheads_of(self.profile))

    @cached_property
    def plain(self) -> Predicted:
        """What is predicted without a plan."""
        return self.predicted(plain_schedule(self.simulator.plain))

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that no plan lowers."""
        return gradient_bytes(self.profile.graph)

    def planner(self, halvings: int | None) -> Planner:
        """Return what finds schedules; its tables take a second to make.

        Args:
            halvings: How often the memory of the host is halved; `None` for none of it.
        """
        known = self._planners.get(halvings)
        if known is None or len(known.found) >= MOST_FOUND:
            graph, room = self.profile.graph, self.host
            host = None if room is None else room.serving(graph, halvings)
            self._planners[halvings] = planner_of(self.profile, host)
        return self._planners[halvings]

    def smallest(self, halvings: int | None) -> Predicted:
        """Return what is predicted under the smallest schedule, without its planner."""
        if halvings not in self._smallest:
            found = self.planner(halvings).smallest()
            self._smallest[halvings] = self.predicted(found)
        return self._smallest[halvings]

    def forget_planners(self) -> None:
        """Forget what finds schedules, which takes most of the memory."""
        self._planners.clear()

    @cached_property
    def structure(self) -> Hashable:
        """What two recordings must share for a schedule of one to serve the other."""
        return structure_of(self.profile.graph)

    @property
    def content(self) -> Hashable:
        """What two recordings of the same calls share; the tail is no part of it."""
        graph = self.recording.profile.graph
        return hash((structure_of(graph), tuple(s.bytes for s in graph.storages)))

    @cached_property
    def verified_bytes(self) -> int:
        """Bytes that verification needs beside the tensor of which it reads a piece."""
        if self.device == HOST and native.built_extension():
            return 0  # It reads tensors where they are.
        graph = self.profile.graph
        made = (v for v in graph.values if 0 <= v.operator < graph.backward_start)
        return fingerprint_bytes(max((math.prod(v.shape) for v in made), default=0))

    def beside_bytes(self, schedule: Schedule) -> int:
        """Return what a plan needs beside what it keeps.

        That is for verification, states of generators, cached casts, and copies back
        from the host in an order that is not known yet. No more than one state is held
        for each region, and for each operator in it that draws random numbers.
        """
        if not schedule.choices:
            return 0
        graph, draws = self.profile.graph, len(schedule.choices)
        for choice in schedule.choices:
            inside = graph.operators[choice.start : choice.end]
            draws += sum(operator.is_random for operator in inside)
        casts_bytes = self._cached_bytes(schedule)
        moved_bytes = self._out_of_order_bytes(schedule)
        return self.verified_bytes + draws * STATE_BYTES + casts_bytes + moved_bytes

    def _cached_bytes(self, schedule: Schedule) -> int:
        """Return what the peak gains by casts that regions drop, but autocast caches.

        The recording caches none, so that each use of a parameter has its own.
        """
        graph, casts = self.profile.graph, self.recording.casts
        dropped = {
            casts[storage]: graph.storages[storage].bytes
            for choice in schedule.choices
            for storage in (made_in(graph, choice) - choice.kept) & casts.keys()
        }
        cached_bytes = sum(dropped.values())
        if self.holds_casts or not cached_bytes:
            return cached_bytes
        found = self.simulated(schedule)
        until = range(self.recording.tail_operator + 1)
        forward_bytes = max(
            found.simulation.alive_bytes[i] + graph.operators[i].workspace_bytes
            for i in until
        )
        return max(0, forward_bytes + cached_bytes - found.peak_bytes)

    def simulated(self, schedule: Schedule) -> Schedule:
        """Return a schedule as it is predicted for this size."""
        return self.simulated_as(Decisions.of(schedule))

    def simulated_as(self, key: Decisions) -> Schedule:
        """Return the schedule of some decisions as it is predicted for this size."""
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._regions.clear()
                del self.simulator
            simulator = self.simulator
            if key.host is not None:
                simulator = simulator.with_host(key.host)
            found = simulator.schedule(key.calls, key.choices)
            self._known[key] = simulator.with_plain_times(found)
        return self._known[key]

    def regions(self, schedule: Schedule) -> RegionPlans:
        """Return the regions of a schedule."""
        key = Decisions.of(schedule)
        if key not in self._regions:
            graph, absent = self.profile.graph, self.recording.absent
            self._regions[key] = region_plans(graph, key.calls, key.choices, absent)
        return self._regions[key]

    def bound(self, schedule: Schedule) -> Predicted | None:
        """Return a bound that is convex in the size; `None` if there is none.

        Copies do not keep step with sizes. But no more is live beside what is live
        without a window, where each copy is waited for, than the window. That holds if
        all that is to be moved finds room.
        """
        found = self.predicted(schedule)
        host = found.decisions.host
        if host is None:
            return found
        moved = [s for choice in schedule.choices for s in choice.offloaded]
        wanted = sum(self.profile.graph.storages[s].bytes for s in moved)
        if self.simulated(schedule).simulation.moves.out_bytes < wanted:
            return None
        alone = self._without_window(schedule, host)
        return found._replace(
            peak_bytes=alone.peak_bytes + host.window_bytes,
            held_bytes=self._held_bytes(alone) + host.window_bytes,
        )

    def _without_window(self, schedule: Schedule, host: Host) -> Schedule:
        key = Decisions.of(replace(schedule, host=replace(host, window_bytes=0)))
        return self.simulated_as(key)

    def _out_of_order_bytes(self, schedule: Schedule) -> int:
        """Return what a plan takes if it copies back in another order than foreseen."""
        host = Decisions.of(schedule).host
        if host is None:
            return 0
        alone = self._without_window(schedule, host)
        most_bytes = alone.peak_bytes + host.window_bytes
        return max(0, most_bytes - self.simulated(schedule).peak_bytes)

    def predicted(self, schedule: Schedule) -> Predicted:
        """Return what is predicted of this size under a schedule."""
        found = self.simulated(schedule)
        return Predicted(
            schedule,
            found.peak_bytes,
            self._held_bytes(found),
            found.slowdown,
            self.beside_bytes(schedule),
        )

    def _held_bytes(self, found: Schedule) -> int:
        """Return the bytes that are live when the forward of the model has ended."""
        alive = found.simulation.alive_bytes
        end = self.profile.graph.backward_start - 1
        return alive[end] if alive and end >= 0 else 0


def structure_of(graph: StepGraph) -> Hashable:
    """Return a recorded step without its numbers: operators, live ranges, calls."""
    operators = tuple((o.name, o.module_path, o.inputs) for o in graph.operators)
    storages = tuple((s.kind, s.birth, s.death, s.released) for s in graph.storages)
    saved = tuple((s.value, s.moment, s.asked, s.freed) for s in graph.saved)
    return hash((operators, storages, saved, graph.calls, graph.backward_start))
