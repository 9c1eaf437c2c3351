"""What a run learned of its situations, as data, and as the start of a later run.

Recordings are read when their kind of micro-batch comes for the first time. What does
not come in a run is handed on to the file of the next one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from membudget.errors import OptionError, PlanError
from membudget.graph import ModuleCall
from membudget.loop.history import Basis, History
from membudget.loop.kind import CallKind, Tail
from membudget.loop.micro_batch import RecordedBatch
from membudget.loop.point import Decisions
from membudget.loop.situation import Situation, Sizes, key_of
from membudget.planner.choice import Choice, Stage
from membudget.planner.loop_plan import LoopPlan, SituationPlan, unpack
from membudget.planner.schedule import Schedule
from membudget.profile import Profile


class Learned:
    """What an earlier run learned of one model.

    Attributes:
        tail: What the loop needed between forward and backward of the model.
        is_first: Whether no micro-batch was measured.
        most_awaited: The most forwards that were awaited together.
        direct_reads: How often a parameter is read beside its cast in one forward.
        kinds: Data of the kinds that have yet to come in this run, by key.
        situations: Their situations.
    """

    def __init__(self, plan: LoopPlan | None = None):
        """Read the part of a plan file that is about the model, if there is one.

        Raises:
            PlanError: If it is not whole.
        """
        self.tail, self.is_first = Tail(), True
        self.most_awaited, self.direct_reads = 1, 0
        self.kinds: dict[str, Any] = {}
        self.situations: dict[tuple[str, Sizes], SituationPlan] = {}
        self._schedules: dict[str, list[Schedule | None]] = {}
        if plan is None:
            return
        self.situations = {(s.kind, s.sizes): s for s in plan.situations}
        data = unpack(plan.learned)
        try:
            self.tail = _tail_of(data["tail"])
            self.is_first = bool(data["is_first"])
            self.most_awaited = int(data["most_awaited"])
            self.direct_reads = int(data["direct_reads"])
            self.kinds = dict(data["kinds"])
        except (KeyError, TypeError, ValueError) as error:
            raise _not_whole(error) from error

    def add_to(self, kind: CallKind, of: Hashable) -> None:
        """Add what was recorded of a kind, if anything was.

        Args:
            kind: Has nothing recorded yet.
            of: What it is the kind of.

        Raises:
            PlanError: If what is known of it is not whole.
        """
        key = key_of(of) if self.kinds else ""
        data = self.kinds.pop(key, None)
        if data is None:
            return
        try:
            _add_recordings(kind, data)
            self._schedules[key] = [_noted(kind, *noted) for noted in data["schedules"]]
        except (LookupError, TypeError, ValueError, OptionError) as error:
            raise _not_whole(error) from error

    def recall(self, situation: Situation, kind: CallKind, history: History) -> None:
        """Note what is known of a situation in its history."""
        host = kind.host
        if not self.situations:
            return
        key = key_of(situation.kind)
        known = self.situations.pop((key, situation.sizes), None)
        if known is None:
            return
        history.correction_bytes = known.correction_bytes
        point = kind.points.get(situation.sizes)
        schedules = self._schedules.get(key, [])
        if point is None or not 0 <= known.schedule < len(schedules):
            return
        schedule = schedules[known.schedule]
        if schedule is None:
            return
        history.predicted = point.predicted(schedule)
        history.basis = Basis(self.tail.version, True, None if host is None else 0)
        history.wanted_bytes = known.wanted_bytes
        if known.took_bytes:
            history.measured[history.decisions] = known.took_bytes
        if known.expected_bytes:
            history.taken = history.predicted.decisions, known.expected_bytes


def situation_plan(
    situation: Situation, history: History, kind: CallKind
) -> SituationPlan:
    """Return what is known of a situation, for people and for a later run."""
    found, key = history.predicted, history.decisions
    schedules, taken = [*kind.schedules], history.taken
    return SituationPlan(
        kind=key_of(situation.kind),
        sizes=situation.sizes,
        tensors=history.text,
        uses=history.uses,
        wanted_bytes=history.wanted_bytes,
        peak_bytes=0 if found is None else found.peak_bytes,
        slowdown=0.0 if found is None else found.slowdown,
        expected_bytes=taken[1] if taken and taken[0] == key else 0,
        took_bytes=history.measured.get(key, 0),
        correction_bytes=history.correction_bytes,
        schedule=schedules.index(key) if key in schedules else -1,
    )


def kind_data(kind: CallKind) -> dict[str, Any]:
    """Return the recordings and schedules of a kind as plain data."""
    return {
        "recorded": [
            {
                "sizes": sizes,
                "cached": sorted(recording.cached),
                "are_there": recording.are_there,
                "profile": recording.profile.to_dict(),
            }
            for sizes, recording in kind.recordings.items()
        ],
        "schedules": [_schedule_data(*noted) for noted in kind.schedules.values()],
    }


def _add_recordings(kind: CallKind, data: Any) -> None:
    for recorded in data["recorded"]:
        profile = Profile.from_dict(recorded["profile"])
        cached, are_there = frozenset(recorded["cached"]), bool(recorded["are_there"])
        recording = RecordedBatch(profile, cached, are_there)
        kind.add(tuple(recorded["sizes"]), recording)


def _noted(
    kind: CallKind, calls: Any, choices: Any, is_smallest: Any, sizes: Any, *where: Any
) -> Schedule | None:
    """Note a schedule; return `None` if it needs more of the host than there is now."""
    point, host = kind.points[tuple(sizes)], kind.host
    used = None if host is None or not where else host.again(*map(int, where))
    if where and used is None:
        return None
    decisions = Decisions(
        tuple(ModuleCall(p, s, e, tuple(inputs)) for p, s, e, inputs in calls),
        tuple(map(_choice_of, choices)),
        used,
    )
    found = replace(point.simulated_as(decisions), is_smallest=bool(is_smallest))
    kind.note(point, found)
    return found


def _schedule_data(schedule: Schedule, sizes: Sizes) -> list[Any]:
    calls = [[c.path, c.start, c.end, c.inputs] for c in schedule.calls]
    choices = [_choice_data(c) for c in schedule.choices]
    host = Decisions.of(schedule).host
    where = [] if host is None else [host.memory_bytes, host.window_bytes]
    return [calls, choices, schedule.is_smallest, sizes, *where]


def _choice_data(choice: Choice) -> list[Any]:
    where, kept = [choice.start, choice.end], sorted(choice.kept)
    stages = _stages_data(choice.stages)
    return [*where, kept, stages, choice.engine, sorted(choice.offloaded)]


def _stages_data(stages: Iterable[Stage]) -> list[Any]:
    return [[stage.start, sorted(stage.retained)] for stage in stages]


def _choice_of(data: Any) -> Choice:
    start, end, kept, stages, engine, *offloaded = data
    found = (Stage(first, frozenset(retained)) for first, retained in stages)
    moved: frozenset[int] = frozenset(*offloaded)  # Older files have none.
    return Choice(start, end, frozenset(kept), tuple(found), engine, moved)


def tail_data(tail: Tail) -> list[Any]:
    """Return a tail as plain data."""
    share = None if tail.share is None else str(tail.share)
    return [share, tail.fixed_bytes, tail.holds_casts]


def _tail_of(data: Any) -> Tail:
    share, fixed_bytes, holds_casts = data
    of = None if share is None else Fraction(share)
    return Tail(of, int(fixed_bytes), holds_casts)


def _not_whole(error: Exception) -> PlanError:
    return PlanError(f"what the plan learned is not whole: {error!r}")
