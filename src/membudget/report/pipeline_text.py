"""Timelines of a pipeline's step as text; a simulated step beside a measured one."""

from __future__ import annotations

from collections.abc import Sequence

from membudget.planner.pipeline_costs import COMPUTES
from membudget.planner.pipeline_simulation import (
    PipelineEvent,
    PipelineSimulation,
    bubble,
    span_s,
)
from membudget.report import rendered
from membudget.text import format_bytes

_LETTERS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}

LEGEND = "F forward  R recompute  B backward  I of inputs  W of weights  · idle"


def timeline_text(events: Sequence[PipelineEvent], width: int = 72) -> str:
    """Draw what every rank computes when, one line per rank.

    A letter stands for what fills most of its column; micro-batches with odd numbers
    have small letters.

    Args:
        events: Those of all ranks in one step, measured or simulated.
        width: Columns of the chart.

    Example:
        >>> from membudget.planner.pipeline_order import PipelineAction
        >>> forward = PipelineEvent(0, PipelineAction("forward", 0, 0), 0.0, 2.0)
        >>> backward = PipelineEvent(0, PipelineAction("backward", 0, 0), 3.0, 4.0)
        >>> print(timeline_text([forward, backward], width=8))
        rank 0  FFFF··BB
        4 s     F forward  R recompute  B backward  I of inputs  W of weights  · idle
    """
    if not events:
        return "no events: the schedule has not run a step"
    start_s, end_s = span_s(events)
    column_s = max(end_s - start_s, 1e-12) / width
    ranks = sorted({event.rank for event in events})
    lines = []
    for rank in ranks:
        own = [e for e in events if e.rank == rank and e.action.kind in COMPUTES]
        columns = (
            _letter(own, start_s + i * column_s, start_s + (i + 1) * column_s)
            for i in range(width)
        )
        lines.append(f"rank {rank:<3}{''.join(columns)}")
    return "\n".join([*lines, f"{f'{end_s - start_s:.3g} s':<8}{LEGEND}"])


def _letter(events: Sequence[PipelineEvent], start_s: float, end_s: float) -> str:
    """Return the letter of what fills most of an interval."""
    filled = {"·": end_s - start_s}
    for event in events:
        seconds = min(event.end_s, end_s) - max(event.start_s, start_s)
        if seconds > 0:
            letter = _LETTERS[event.action.kind]
            letter = letter.lower() if event.action.micro_batch % 2 else letter
            filled[letter] = filled.get(letter, 0.0) + seconds
            filled["·"] -= seconds
    return max(filled, key=lambda letter: filled[letter])


def comparison_text(
    simulation: PipelineSimulation,
    events: Sequence[PipelineEvent],
    peak_bytes: Sequence[int] = (),
) -> str:
    """Set a simulated step beside a measured one.

    Args:
        simulation: The simulated step.
        events: The events of all ranks in the measured one.
        peak_bytes: The measured peak of each rank; without it, bytes are left out.
    """
    start_s, end_s = span_s(events)
    rows = [
        ("step", f"{simulation.step_s:.4g} s", f"{end_s - start_s:.4g} s"),
        ("bubble", f"{simulation.bubble:.1%}", f"{bubble(events):.1%}"),
    ]
    for rank, measured_bytes in enumerate(peak_bytes):
        predicted = format_bytes(simulation.peak_bytes[rank])
        rows.append((f"peak of rank {rank}", predicted, format_bytes(measured_bytes)))
    return rendered(("", "simulated", "measured"), rows, left=1)
