"""What a budget did in a loop, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

from membudget.loop.history import History
from membudget.report import rendered
from membudget.text import format_bytes


@dataclass(frozen=True, slots=True)
class SituationStatus:
    """Micro-batches of one situation.

    Attributes:
        model: Class name of the model.
        tensors: Shapes of the tensors that the model was called with.
        uses: How many micro-batches ran.
        plans: How many plans were made for them.
        left_bytes: Bytes that the last one might allocate.
        predicted_bytes: Predicted peak of the plan in force; 0 without a plan, and if
            it was forgotten, because many others came since.
        slowdown: Its predicted slowdown; 0 without a plan.
        worst_bytes: Largest measured peak; 0 if none was measured.
        last_bytes: Last measured peak.
    """

    model: str
    tensors: str
    uses: int
    plans: int
    left_bytes: int
    predicted_bytes: int
    slowdown: float
    worst_bytes: int
    last_bytes: int

    @classmethod
    def of(cls, model: str, history: History) -> SituationStatus:
        """Return what is known of a situation."""
        found = history.predicted
        return cls(
            model=model,
            tensors=history.text,
            uses=history.uses,
            plans=history.plans,
            left_bytes=history.limit_bytes,
            predicted_bytes=0 if found is None else found.peak_bytes,
            slowdown=0.0 if found is None else found.slowdown,
            worst_bytes=history.worst_bytes,
            last_bytes=history.last_bytes,
        )


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """What a budget did so far.

    Attributes:
        budget: The budget as it was asked for.
        situations: One history per situation, in the order in which they came; of
            more than 1,024, the rarest are left out.
        regions: Forwards and recomputes of each region, by name.
        retries: How often `step` ran a micro-batch again.
        notes: What a user should know, in sentences.
    """

    budget: str
    situations: tuple[SituationStatus, ...]
    regions: dict[str, tuple[int, int]]
    retries: int
    notes: tuple[str, ...]

    @property
    def switches(self) -> int:
        """How many plans were made, beyond the first of each situation."""
        return sum(max(0, s.plans - 1) for s in self.situations)

    def __str__(self) -> str:
        """Return a table with one line per situation."""
        rows = [
            (
                s.model,
                s.tensors,
                str(s.uses),
                str(s.plans),
                format_bytes(max(0, s.left_bytes)),
                format_bytes(s.predicted_bytes) if s.predicted_bytes else "-",
                format_bytes(s.worst_bytes) if s.worst_bytes else "-",
                format_bytes(s.last_bytes) if s.worst_bytes else "-",
                f"{s.slowdown:.3f}" if s.slowdown else "-",
            )
            for s in self.situations
        ]
        titles = (
            *("model", "called with", "uses", "plans", "left"),
            *("predicted", "worst", "last", "slowdown"),
        )
        lines = [
            f"budget    {self.budget}",
            f"replaced  {_counted(self.switches, 'plan')}",
        ]
        lines += [f"note      {note}" for note in self.notes]
        if self.retries:
            lines.append(
                f"retries   {_counted(self.retries, 'micro-batch', 'es')} ran again"
            )
        return "\n".join([*lines, "", rendered(titles, rows, left=2)])


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"
