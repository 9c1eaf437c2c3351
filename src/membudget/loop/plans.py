"""Choose a plan for each situation of a training loop.

Rules

1. Before the first micro-batch was measured, nothing inside of blocks is kept, or the
   smallest plan is taken: what the loop needs beside the model is not known yet. Where
   far more is left than the plain micro-batch takes, it runs plainly.
2. What a micro-batch takes beyond its prediction is added to later predictions of the
   situation; what it takes less is not subtracted.
3. If several forwards run before one backward pass, each takes its part of what is
   left, so that the last of them finds as much as the first.
4. A micro-batch whose smallest plan is over budget is refused before its forward.
5. A plan that fit and held is not refused in the same bytes because other sizes, or
   other plans, have taken more since than was expected of them.
6. Sizes that were not recorded use plans of those that were (see `kind`), until they
   come often. They go on to do so where as many are recorded as are kept.
7. What is kept of the past has bounds. A kind that is forgotten is recorded again when
   it comes again; what it took beyond all predictions is still known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from membudget.allowance import Share
from membudget.loop.history import Basis, History, Left
from membudget.loop.host_room import HostRoom
from membudget.loop.kind import CallKind, Tail
from membudget.loop.learned import Learned
from membudget.loop.meter import Measured, PeerRoom
from membudget.loop.micro_batch import RecordedBatch
from membudget.loop.numbers import Numbers
from membudget.loop.point import Predicted, RecordedSize
from membudget.loop.situation import Situation

OWN_PLAN_USES = 16
"""Micro-batches of one situation after which it is recorded, and gets its own plan."""

UNKNOWN_SHARE = 0.7
"""Share of what is left that a plan may take while the loop's own needs are unknown."""

AMPLE_SHARE = 0.3
"""Share of what is left that the plain micro-batch may take then."""

TIGHTER = 0.8
"""By what factor the next plan is smaller after memory ran out."""

WORTH = 1.05
"""A plan is made anew if so much more memory has become free."""

MARGIN = 0.01
"""Share of a peak that is added where it is not of a recorded size."""

MOST_RECORDED = 256
"""Recorded sizes of all kinds; the kind that has not come for longest goes first."""

MOST_PLANNERS = 8
"""Recorded sizes that keep their planners, as they take most of the memory."""

MOST_SITUATIONS = 1024
"""Situations whose histories are kept; the rarest goes first."""


class Plans:
    """The plans of one model, by situation.

    Attributes:
        kinds: What was recorded, by kind of micro-batch.
        histories: What is known of each situation.
        is_first: Whether no micro-batch was measured yet.
        newest: The situation that was planned last.
        known: What an earlier run learned of situations that have yet to come.
        numbers: Which numbers and strings among the arguments decide nothing.
    """

    def __init__(
        self,
        record: Callable[[], RecordedBatch],
        host: HostRoom | None,
        device: torch.device,
    ):
        """Start without plans; `record()` records the micro-batch that is to run."""
        self._record, self._host, self._device = record, host, device
        self.kinds: dict[Hashable, CallKind] = {}
        self.tail = Tail()
        self.histories: dict[Situation, History] = {}
        self.is_first = True
        self.newest: History | None = None
        self.known = Learned()
        self._planned: list[RecordedSize] = []
        self.numbers = Numbers()

    def start_from(self, known: Learned) -> None:
        """Begin with what an earlier run learned."""
        self.known = known
        self.tail, self.is_first = known.tail, known.is_first

    def kind(self, situation: Situation) -> CallKind:
        """Return the kind of a situation."""
        of = situation.kind
        found = self.kinds.pop(of, None)
        if found is None:
            found = CallKind(self.tail, host=self._host, device=self._device)
            self.known.add_to(found, of)
        self.kinds[of] = found  # The latest is the last.
        return found

    def begin(self, situation: Situation, text: str) -> History:
        """Return what is known of a situation that has not come in this run.

        Args:
            situation: The situation.
            text: Shapes of the tensors that the model is called with.

        Warns:
            BudgetWarning: If numbers or strings among the arguments make ever new
                situations.
        """
        history = History(text)
        self.known.recall(situation, self.kind(situation), history)
        if len(self.histories) >= MOST_SITUATIONS:
            del self.histories[min(self.histories, key=self._uses)]
        self.histories[situation] = history
        self.numbers.look(situation.kind)
        return history

    def _uses(self, situation: Situation) -> int:
        return self.histories[situation].uses

    def point(self, situation: Situation) -> RecordedSize:
        """Return the recorded size of a situation; record it if it was not."""
        known = self.kind(situation).points.get(situation.sizes)
        if known is not None:
            return known
        recording = self._record()
        while self._recorded >= MOST_RECORDED:
            self._forget(next(iter(self.kinds)))
        point = self.kind(situation).add(situation.sizes, recording)
        self.numbers.compare(situation, lambda: point.content)
        return point

    @property
    def _recorded(self) -> int:
        return sum(len(kind.recordings) for kind in self.kinds.values())

    def _forget(self, kind: Hashable) -> None:
        """Forget what was recorded of a kind, and the plans that stand on it."""
        del self.kinds[kind]
        for situation, history in self.histories.items():
            if situation.kind == kind:
                history.forget_plans()

    def _to_plan(self, point: RecordedSize) -> RecordedSize:
        """Return a recorded size, which is one of the few that keep their planners."""
        self._planned = [p for p in self._planned if p is not point]
        self._planned.append(point)
        if len(self._planned) > MOST_PLANNERS:
            self._planned.pop(0).forget_planners()
        return point

    def prepare(self, situation: Situation, history: History) -> None:
        """Record a micro-batch that is about to run, if that is needed to plan it."""
        history.uses += 1
        kind = self.kind(situation)
        is_rare = history.uses < OWN_PLAN_USES or self._recorded >= MOST_RECORDED
        is_known = situation.sizes in kind.points
        if not is_known and not (is_rare and kind.around(situation.sizes)):
            self.point(situation)

    def reference(self, situation: Situation) -> RecordedSize:
        """Return the recorded size that stands for a situation in a plan."""
        return self.kind(situation).reference(situation.sizes)

    def share_bytes(self, situation: Situation, share: Share) -> int:
        """Return a share of the plain micro-batch's peak, or of a lower bound on it."""
        plain_bytes = self.kind(situation).plain_at_least(situation.sizes)
        if plain_bytes is None:
            plain_bytes = self.point(situation).profile.peak_bytes
        summed_bytes = self.histories[situation].summed_bytes
        point, whole = self.reference(situation), 0
        if share.is_of_activations:
            whole = point.gradient_bytes + summed_bytes
        return whole + int(share.part * (plain_bytes + summed_bytes - whole))

    def choose(self, situation: Situation, history: History, left: Left) -> Predicted:
        """Return what is predicted under the plan to take; note it in the history.

        It is the smallest plan if none fits.
        """
        self.newest = history
        wanted_bytes = min(left.wanted_bytes, history.most_bytes or left.wanted_bytes)
        is_own = situation.sizes in self.kind(situation).points
        halvings = None if self._host is None else self._host.halvings(left.parts)
        basis = Basis(self.tail.version, is_own, halvings)
        known = history.predicted
        if (
            known is None
            or history.basis != basis
            or not history.fits(known, wanted_bytes)
            or wanted_bytes > WORTH * history.wanted_bytes
        ):
            found = self._chosen(situation, history, wanted_bytes, halvings)
            limit_bytes = left.limit_bytes
            if history.fits(found, limit_bytes) or not history.has_held(limit_bytes):
                known = history.predicted = found
                history.plans += 1
            history.basis, history.wanted_bytes = basis, wanted_bytes
        history.limit_bytes, history.absent_bytes = left.limit_bytes, left.absent_bytes
        assert known is not None  # Else none has held.
        return known

    def _chosen(
        self,
        situation: Situation,
        history: History,
        wanted_bytes: int,
        halvings: int | None,
    ) -> Predicted:
        kind = self.kind(situation)
        if situation.sizes not in kind.points:
            known = [
                p._replace(peak_bytes=int(p.peak_bytes * (1 + MARGIN)))
                for p in self._with_room(kind.between(situation.sizes), halvings)
            ]
            if fastest := history.fastest_of(known, wanted_bytes):
                return fastest
        point = self._to_plan(self.point(situation))
        kind = self.kind(situation)  # Another one if it was forgotten.
        if self.is_first:
            if history.fits(point.plain, int(AMPLE_SHARE * wanted_bytes)):
                return kind.plain(point)
            found = kind.nothing_kept(point)
            if history.fits(found, int(UNKNOWN_SHARE * wanted_bytes)):
                return found
        else:
            beyond_bytes = history.correction_bytes + history.summed_bytes
            fastest = kind.fastest(point, wanted_bytes, beyond_bytes, halvings)
            if fastest is not None:
                return fastest
        smallest = kind.smallest(point, halvings)
        again = kind.again(point, history.measured)
        known = self._with_room([smallest, *again], halvings)
        return history.fastest_of(known, wanted_bytes) or smallest

    def _with_room(
        self, known: Iterable[Predicted], halvings: int | None
    ) -> list[Predicted]:
        host = self._host
        return [p for p in known if host is None or host.holds(p.host, halvings)]

    def room(self, situation: Situation) -> PeerRoom:
        """Return what another model must leave for a micro-batch that it contains."""
        history = self.histories.get(situation)
        predicted = None if history is None else history.predicted
        if history is None or predicted is None:
            return PeerRoom()
        halvings = None if history.basis is None else history.basis.halvings
        point = self._to_plan(self.reference(situation))
        smallest = point.smallest(halvings)
        spare_bytes = max(0, predicted.peak_bytes - smallest.peak_bytes)
        return PeerRoom(spare_bytes, history.expected_bytes(smallest))

    def tighten(self) -> bool:
        """Make smaller plans for the newest situation; return whether there are any."""
        history = self.newest
        if history is None or history.predicted is None:
            return False
        if self.numbers.doubt():
            return True
        if history.predicted.schedule.is_smallest:
            return False
        history.most_bytes = int(TIGHTER * history.predicted.peak_bytes)
        history.taken = None
        return True

    def learn(self, situation: Situation, history: History, measured: Measured) -> None:
        """Note what a micro-batch took.

        One that takes more than another of its kind did, and has another number, says
        nothing of that one.
        """
        if history.is_beyond(measured.peak_bytes) and self.numbers.doubt():
            return
        history.measure(measured.peak_bytes)
        if measured.tail_bytes is None or history.predicted is None:
            return
        self.is_first = False
        points = self.kind(situation).points
        if situation.sizes in points:
            recording = points[situation.sizes].recording
            holds_casts = measured.is_in_autocast
            self.tail.learn(recording, measured.tail_bytes, holds_casts)
            point = self.kind(situation).points[situation.sizes]
            history.predicted = point.predicted(history.predicted.schedule)
        history.expect(measured.peak_bytes)
