"""Timelines as text, and a simulation beside a measurement."""

from __future__ import annotations

from membudget.planner.pipeline_order import PipelineAction
from membudget.planner.pipeline_simulation import PipelineEvent, simulate_pipeline
from membudget.report.pipeline_text import LEGEND, comparison_text, timeline_text
from tests.planner.pipelines import COSTS, order_of


def test_each_rank_has_a_line_with_what_it_computes() -> None:
    found = simulate_pipeline(order_of("1F1B", 2, 2), [COSTS] * 2)
    assert timeline_text(found.events, width=11) == (
        "rank 0  "
        + "".join(_columns(found.events, 0))
        + "\nrank 1  "
        + "".join(_columns(found.events, 1))
        + f"\n11 s    {LEGEND}"
    )


def _columns(events: tuple[PipelineEvent, ...], rank: int) -> list[str]:
    """Return a letter for each second of a rank."""
    letters = {"forward": "F", "recompute": "R", "backward": "B"}
    columns = ["·"] * 11
    for event in events:
        letter = letters.get(event.action.kind)
        if event.rank == rank and letter:
            if event.action.micro_batch % 2:
                letter = letter.lower()
            for second in range(int(event.start_s), int(event.end_s)):
                columns[second] = letter
    return columns


def test_nothing_to_draw_is_said() -> None:
    assert timeline_text([]) == "no events: the schedule has not run a step"


def test_a_column_shows_what_fills_most_of_it() -> None:
    events = [
        PipelineEvent(0, PipelineAction("forward", 0, 0), 0.0, 0.6),
        PipelineEvent(0, PipelineAction("backward", 0, 0), 0.6, 1.0),
    ]
    assert timeline_text(events, width=1).startswith("rank 0  F\n")


def test_simulated_and_measured_stand_side_by_side() -> None:
    found = simulate_pipeline(order_of("1F1B", 2, 2), [COSTS] * 2)
    text = comparison_text(found, found.events, [0, 1024])
    rows = [line.split() for line in text.splitlines()]
    assert ["step", f"{found.step_s:.4g}", "s", f"{found.step_s:.4g}", "s"] in rows
    assert ["bubble", f"{found.bubble:.1%}", f"{found.bubble:.1%}"] in rows
    assert rows[-1] == ["peak", "of", "rank", "1", "0", "B", "1.0", "KiB"]
