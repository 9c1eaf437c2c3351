"""Plans for micro-batches that run the same code on tensors of different sizes.

A few sizes are recorded on fake tensors, and the plans found for them serve all others.
Bytes are sums of products of sizes, so the peak of a plan is convex in the size, if all
lengths grow together:

    peak                                  ●  recorded
      │                          . ´
      │                  . ´              The chord between two recorded sizes is an
      │          . ´  ___                 upper bound on the peak between them; the
      │      ●───                         line through two, drawn on, is a lower one.
      └──────┬────────┬───────────┬─ size
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from membudget._torch_accelerator import HOST
from membudget.errors import BudgetError
from membudget.loop.host_room import HostRoom
from membudget.loop.micro_batch import RecordedBatch
from membudget.loop.point import Decisions, Predicted, RecordedSize
from membudget.loop.situation import Sizes
from membudget.modes import schedule_of_mode
from membudget.planner.planner import Planner
from membudget.planner.schedule import Schedule
from membudget.planning import overheads_of

MOST_SCHEDULES = 12
"""Schedules that are kept for one kind; the oldest goes first."""

ATTEMPTS = 4
"""Plans that are made for what a plan before needs beside its peak."""

LADDER = 3
"""Schedules between the budget and the plain peak that serve smaller micro-batches."""


@dataclass
class Tail:
    """What the loop needs between forward and backward of the model.

    Attributes:
        share: Bytes of the largest measured tail ÷ those that were assumed of it;
            `None` before one was measured.
        fixed_bytes: Bytes of the largest one of a model that returns its loss.
        holds_casts: Whether a backward pass began in autocast, which then still holds
            the casts that it has cached; `None` before one was measured.
        version: Raised when another tail changes all predictions.
    """

    share: Fraction | None = None
    fixed_bytes: int = 0
    holds_casts: bool | None = None
    version: int = 0

    def learn(
        self, recording: RecordedBatch, tail_bytes: int, holds_casts: bool
    ) -> None:
        """Note a measured tail, and whether the casts outlived it."""
        if recording.casts:
            assumed = self.holds_casts is not False
            self.holds_casts = bool(self.holds_casts) or holds_casts
            self.version += assumed != self.holds_casts
        if recording.returns_loss:
            if tail_bytes > self.fixed_bytes:
                self.fixed_bytes = tail_bytes
                self.version += 1
            return
        share = Fraction(tail_bytes, recording.assumed_bytes)
        if self.share is None or share > self.share:
            self.share = share
            self.version += 1

    def bytes_of(self, recording: RecordedBatch) -> int:
        """Return the bytes of a recorded micro-batch's tail."""
        if recording.returns_loss:
            return self.fixed_bytes
        share = 1 if self.share is None else self.share
        return math.ceil(share * recording.assumed_bytes)


@dataclass
class CallKind:
    """The recorded sizes of one kind of micro-batch, and schedules for all sizes.

    Attributes:
        tail: The tail of all kinds.
        recordings: Recorded micro-batches, by their sizes.
        schedules: The latest schedules, each with the recorded size that it is of.
        host: What plans may use of the host.
        device: Where the model is.
    """

    tail: Tail
    recordings: dict[Sizes, RecordedBatch] = field(default_factory=dict)
    schedules: dict[Decisions, tuple[Schedule, Sizes]] = field(default_factory=dict)
    host: HostRoom | None = None
    device: torch.device = HOST
    _points: dict[Sizes, RecordedSize] = field(default_factory=dict)
    _version: int = 0

    @property
    def points(self) -> dict[Sizes, RecordedSize]:
        """Recorded sizes, with the tail as it was measured last."""
        if self._version != self.tail.version:
            self._version = self.tail.version
            self._points = {s: self._point(s, r) for s, r in self.recordings.items()}
        return self._points

    def add(self, sizes: Sizes, recording: RecordedBatch) -> RecordedSize:
        """Add a recorded size."""
        self.recordings[sizes] = recording
        point = self.points[sizes] = self._point(sizes, recording)
        return point

    def _point(self, sizes: Sizes, recording: RecordedBatch) -> RecordedSize:
        holds_casts = self.tail.holds_casts is not False
        tail_bytes = self.tail.bytes_of(recording)
        return RecordedSize(
            sizes, recording, tail_bytes, holds_casts, self.host, self.device
        )

    # Planning for a recorded size.

    def smallest(self, point: RecordedSize, halvings: int | None) -> Predicted:
        """Return what is predicted under the schedule with the smallest peak."""
        return self._noted(point, point.planner(halvings).smallest())

    def plain(self, point: RecordedSize) -> Predicted:
        """Return what is predicted without a plan."""
        return self._noted(point, point.plain.schedule)

    def nothing_kept(self, point: RecordedSize) -> Predicted:
        """Return what is predicted if each block keeps nothing inside."""
        graph, overheads = point.simulator.plain, overheads_of(point.profile)
        return self._noted(point, schedule_of_mode("full", graph, overheads))

    def fastest(
        self,
        point: RecordedSize,
        target_bytes: int,
        beyond_bytes: int,
        halvings: int | None = None,
    ) -> Predicted | None:
        """Return the fastest schedule that fits a recorded size; `None` if none does.

        Args:
            point: The recorded size.
            target_bytes: Bytes that a micro-batch may allocate.
            beyond_bytes: What it is known to take beyond any prediction.
            halvings: How often the memory of the host is halved for it.
        """
        target_bytes -= beyond_bytes
        if point.profile.peak_bytes <= target_bytes:
            return self.plain(point)
        beside_bytes, planner = 0, point.planner(halvings)
        found: Schedule | None = None
        for _ in range(ATTEMPTS):
            try:
                found = planner.candidates(target_bytes - beside_bytes, True)[0]
            except BudgetError:
                return None
            beside_bytes = max(beside_bytes, point.beside_bytes(found))
            if found.peak_bytes + beside_bytes <= target_bytes:
                break
        else:
            return None
        if len(self.points) > 1:
            self._add_ladder(point, planner, found)
        return self._noted(point, found)

    def _add_ladder(
        self, point: RecordedSize, planner: Planner, found: Schedule
    ) -> None:
        """Note schedules with peaks between one that was found and the plain one."""
        most, least = planner.plain_peak_bytes, max(1, found.peak_bytes)
        for rung in range(1, LADDER + 2):
            target_bytes = int(least * (most / least) ** (rung / (LADDER + 1)))
            between = planner.candidates(max(target_bytes, least), quickly=True)
            self.note(point, between[0])

    def _noted(self, point: RecordedSize, schedule: Schedule) -> Predicted:
        self.note(point, schedule)
        return point.predicted(schedule)

    def note(self, point: RecordedSize, schedule: Schedule) -> None:
        """Keep a schedule, among the latest, for other sizes."""
        key = Decisions.of(schedule)
        self.schedules.pop(key, None)
        self.schedules[key] = schedule, point.sizes
        if len(self.schedules) > MOST_SCHEDULES:
            del self.schedules[next(iter(self.schedules))]

    def again(
        self, point: RecordedSize, keys: Container[Decisions | None]
    ) -> Iterator[Predicted]:
        """Yield what is predicted of a recorded size under schedules that decide so."""
        for key, (schedule, of) in self.schedules.items():
            if key in keys and self.points[of].structure == point.structure:
                yield point.predicted(schedule)

    # Predictions for a size that was not recorded.

    def around(
        self, sizes: Sizes
    ) -> tuple[RecordedSize, RecordedSize, Fraction] | None:
        """Return two recorded sizes on a line with another, and where it lies.

        They run the same operators, and all lengths of the second are at least those of
        the first. The last number is 0 at the first of them, and 1 at the second.
        """
        best: tuple[RecordedSize, RecordedSize, Fraction] | None = None
        for low, high in self._pairs():
            place = _place(low.sizes, high.sizes, sizes)
            if place is not None and 0 <= place <= 1:
                shorter = best is None or _is_inside(low, high, best)
                best = (low, high, place) if shorter else best
        return best

    def _pairs(self) -> Iterator[tuple[RecordedSize, RecordedSize]]:
        for low in self.points.values():
            for high in self.points.values():
                grows = all(a <= b for a, b in zip(low.sizes, high.sizes, strict=True))
                if low is not high and grows and low.structure == high.structure:
                    yield low, high

    def between(self, sizes: Sizes) -> list[Predicted]:
        """Return what is predicted of a size under each known schedule, by chords."""
        found = self.around(sizes)
        if found is None:
            return []
        low, high, place = found

        def chord(a: float, b: float) -> float:
            return a + (b - a) * float(place)

        predicted = []
        for schedule, of in self.schedules.values():
            if self.points[of].structure != low.structure:
                continue  # Its operators have other numbers.
            one, other = low.bound(schedule), high.bound(schedule)
            if one is None or other is None:
                continue
            predicted.append(
                Predicted(
                    schedule,
                    int(chord(one.peak_bytes, other.peak_bytes)) + 1,
                    int(chord(one.held_bytes, other.held_bytes)) + 1,
                    chord(one.slowdown, other.slowdown),
                    other.beside_bytes,
                )
            )
        return predicted

    def reference(self, sizes: Sizes) -> RecordedSize:
        """Return the recorded size that stands for another in a plan."""
        if sizes in self.points:
            return self.points[sizes]
        found = self.around(sizes)
        return next(iter(self.points.values())) if found is None else found[1]

    def plain_at_least(self, sizes: Sizes) -> int | None:
        """Return a lower bound on the plain peak of a size; `None` if there is none."""
        if sizes in self.points:
            return self.points[sizes].profile.peak_bytes
        bounds = []
        for low, high in self._pairs():
            place = _place(low.sizes, high.sizes, sizes)
            if place is not None and not 0 < place < 1:
                one, other = (p.profile.peak_bytes for p in (low, high))
                bounds.append(int(one + (other - one) * place))
        return max(bounds, default=None)


def _place(low: Sizes, high: Sizes, sizes: Sizes) -> Fraction | None:
    """Return where a size lies on the line from one to another; `None` if beside it."""
    places = set()
    for a, b, x in zip(low, high, sizes, strict=True):
        if a != b:
            places.add(Fraction(x - a, b - a))
        elif x != a:
            return None
    return places.pop() if len(places) == 1 else None


def _is_inside(
    low: RecordedSize,
    high: RecordedSize,
    other: tuple[RecordedSize, RecordedSize, Fraction],
) -> bool:
    return sum(high.sizes) - sum(low.sizes) < sum(other[1].sizes) - sum(other[0].sizes)
