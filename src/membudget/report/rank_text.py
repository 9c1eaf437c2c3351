"""What the step of each rank of a process group takes, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from membudget.report import rendered, time
from membudget.text import format_bytes


@dataclass(frozen=True)
class RankBytes:
    """What the step of one rank of a process group takes.

    Attributes:
        before_bytes: Bytes in use before the step.
        plain_bytes: Measured peak that the plain step allocates.
        peak_bytes: Measured peak that a step under the plan allocates.
        seconds: Time of the plain step.
    """

    before_bytes: int
    plain_bytes: int
    peak_bytes: int
    seconds: float


def rank_lines(ranks: Sequence[RankBytes], budget_bytes: int) -> list[str]:
    """Return a table with a row for each rank, after an empty line; none without ranks.

    A row has the bytes before the step, its peaks, and the time of the plain step.

    Args:
        ranks: What each rank measured.
        budget_bytes: What the step of each may allocate.
    """
    titles = ("rank", "before", "plain", "planned", "of the budget", "plain time")
    rows = [
        (
            str(number),
            format_bytes(rank.before_bytes),
            format_bytes(rank.plain_bytes),
            format_bytes(rank.peak_bytes),
            f"{rank.peak_bytes / budget_bytes:.1%}",
            time(rank.seconds),
        )
        for number, rank in enumerate(ranks)
    ]
    return ["", rendered(titles, rows)] if rows else []
