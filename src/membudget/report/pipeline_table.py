"""A plan of a pipeline as a table, beside stages that are balanced and keep all."""

from __future__ import annotations

from membudget.planner.pipeline_plan import PipelinePlan
from membudget.report import rendered
from membudget.text import format_bytes


def plan_text(plan: PipelinePlan) -> str:
    """Return one line per stage, and how long a step takes in this way and others.

    Args:
        plan: What is shown; the balanced stages stand in its last two columns.
    """
    titles = ("stage", "blocks", "recomputed", "in flight", "budget", "peak")
    beside = ("balanced", "its peak")
    table = rendered((*titles, *beside), _rows(plan), left=0)
    planned_s = plan.simulation.step_s
    lines = [table, f"step {planned_s:.4g} s, bubble {plan.simulation.bubble:.1%}"]
    others = {
        f"balanced stages that keep all{_excess(plan)}": plan.plain,
        "equal stages, recomputed by depth": plan.equal,
        "equal stages, all recomputed": plan.everywhere,
    }
    lines += [
        f"{title}: x{simulation.step_s / planned_s:.3f}"
        for title, simulation in others.items()
        if simulation is not None
    ]
    return "\n".join(lines)


def _rows(plan: PipelinePlan) -> list[tuple[str, ...]]:
    rank_of = plan.order.rank_of
    return [
        (
            str(stage),
            str(size),
            str(len(plan.recomputed[stage])),
            str(plan.order.most_in_flight(stage)),
            format_bytes(plan.budgets[rank_of[stage]]),
            format_bytes(plan.simulation.peak_bytes[rank_of[stage]]),
            str(plan.plain_sizes[stage]),
            format_bytes(plan.plain.peak_bytes[rank_of[stage]]),
        )
        for stage, size in enumerate(plan.sizes)
    ]


def _excess(plan: PipelinePlan) -> str:
    """Return which ranks balanced stages would take over their budgets, in words."""
    peaks = enumerate(zip(plan.plain.peak_bytes, plan.budgets, strict=True))
    over = [str(rank) for rank, (peak, budget) in peaks if peak > budget]
    if not over:
        return ""
    return f", over the budget of rank{'s' * (len(over) > 1)} {', '.join(over)}"
