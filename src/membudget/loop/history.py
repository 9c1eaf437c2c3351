"""What is known of one situation of a training loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from membudget.loop.point import Decisions, Predicted


class Basis(NamedTuple):
    """What a plan stands on: where one of it differs, the plan is made anew.

    Attributes:
        tail_version: The version of the tail.
        is_own: Whether the situation's own size was recorded.
        halvings: How often the host's memory was halved; `None` if none of it was used.
    """

    tail_version: int
    is_own: bool
    halvings: int | None


class Left(NamedTuple):
    """The bytes that are left for a micro-batch.

    Attributes:
        wanted_bytes: Its part of them.
        limit_bytes: All of them.
        parts: How many micro-batches share what no other holds.
        absent_bytes: What is kept free for state that the optimizer has yet to make.
    """

    wanted_bytes: int
    limit_bytes: int
    parts: int = 1
    absent_bytes: int = 0


MOST_MEASURED = 12
"""Plans of one situation of which is known what they took; the oldest goes first."""


@dataclass
class History:
    """What is known of one situation.

    Attributes:
        text: Shapes of the tensors that the model is called with.
        uses: How many micro-batches ran.
        predicted: The prediction under the plan in force; `None` before the first, and
            if the model cannot be recorded.
        limit_bytes: Bytes that a micro-batch may allocate, when it ran last.
        absent_bytes: What was kept free beside them for state of the optimizer.
        wanted_bytes: Bytes for which the plan was made.
        correction_bytes: What a micro-batch took beyond all that was expected, at most.
        summed_bytes: Gradients of other micro-batches that live beside those of its
            own, in the same backward pass.
        worst_bytes: Largest measured peak.
        last_bytes: Last measured peak.
        plans: How many plans were made.
        most_bytes: Bytes for which plans are made, since memory ran out; `None` before.
        measured: Largest measured peak under each plan; `None` for no plan.
        basis: What the plan in force stands on; `None` before the first.
        taken: The plan that fit last, and the peak that was expected of it then.
        is_warned_of: Whether the user was told that it takes more than is left.
    """

    text: str
    uses: int = 0
    predicted: Predicted | None = None
    limit_bytes: int = 0
    absent_bytes: int = 0
    wanted_bytes: int = 0
    correction_bytes: int = 0
    summed_bytes: int = 0
    worst_bytes: int = 0
    last_bytes: int = 0
    plans: int = 0
    most_bytes: int | None = None
    measured: dict[Decisions | None, int] = field(default_factory=dict)
    basis: Basis | None = None
    taken: tuple[Decisions, int] | None = None
    is_warned_of: bool = False

    @property
    def decisions(self) -> Decisions | None:
        """What the plan in force decides."""
        return None if self.predicted is None else self.predicted.decisions

    def expected_bytes(self, predicted: Predicted) -> int:
        """Return the peak to expect under a plan, corrected by what was measured.

        A later micro-batch may take more than those that were measured, if they skipped
        layers: no measurement lowers a prediction.
        """
        known = self.measured.get(predicted.decisions)
        foreseen_bytes = predicted.foreseen_bytes + self.summed_bytes
        if known is not None:
            return max(foreseen_bytes, known)
        return foreseen_bytes + self.correction_bytes

    def is_beyond(self, peak_bytes: int) -> bool:
        """Return whether a peak is more than is expected under the plan in force."""
        known = self.predicted
        return known is not None and peak_bytes > self.expected_bytes(known)

    def over_bytes(self, peak_bytes: int) -> int:
        """Return by how much a peak was over budget; at most 0 if it was not."""
        if not self.limit_bytes:
            return 0
        return peak_bytes - self.limit_bytes - self.absent_bytes

    def measure(self, peak_bytes: int) -> None:
        """Note what a micro-batch took under the plan in force."""
        self.last_bytes = peak_bytes
        self.worst_bytes = max(self.worst_bytes, peak_bytes)
        known_bytes = self.measured.pop(self.decisions, 0)
        self.measured[self.decisions] = max(peak_bytes, known_bytes)
        if len(self.measured) > MOST_MEASURED:
            del self.measured[next(iter(self.measured))]

    def forget_plans(self) -> None:
        """Forget all plans, whose recording is forgotten, but not what they took."""
        self.predicted = self.basis = self.taken = None
        self.measured.clear()

    def expect(self, peak_bytes: int) -> None:
        """Expect a peak of later micro-batches, even if it is beyond the prediction."""
        if self.predicted is not None:
            foreseen_bytes = self.predicted.foreseen_bytes + self.summed_bytes
            beyond = peak_bytes - foreseen_bytes
            self.correction_bytes = max(self.correction_bytes, beyond)

    def fits(self, predicted: Predicted, target_bytes: int) -> bool:
        """Return whether what is to be expected under a plan is within some bytes."""
        return self.expected_bytes(predicted) <= target_bytes

    def fastest_of(
        self, known: Iterable[Predicted], target_bytes: int
    ) -> Predicted | None:
        """Return the fastest of some plans that fits some bytes."""
        fitting = [p for p in known if self.fits(p, target_bytes)]
        return min(fitting, key=attrgetter("slowdown"), default=None)

    def has_held(self, target_bytes: int) -> bool:
        """Return whether the plan in force fit some bytes when it was taken, and held.

        More may be expected of it since, because other sizes took more. It is asked of
        plans alone that need nothing of the host, where others may have taken room.
        """
        key, took_bytes = self.decisions, self.measured.get(self.decisions)
        if key is None or key.host is not None or took_bytes is None:
            return False
        if self.taken is None or self.taken[0] != key:
            return False
        return max(took_bytes, self.taken[1]) <= target_bytes

    def take(self, predicted: Predicted, target_bytes: int) -> bool:
        """Return whether the plan in force may run in some bytes; note if it fits."""
        if self.fits(predicted, target_bytes):
            self.taken = predicted.decisions, self.expected_bytes(predicted)
            return True
        return self.has_held(target_bytes)
