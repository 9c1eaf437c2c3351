"""The three runs of an audit: plain, plain once more, and budgeted.

    state ──> plain run ────────> outcome 1 ─┬─ compare: does it repeat itself?
      ├─────> second plain run ─> outcome 2 ─┘
      │                           outcome 1 ─┬─ compare: the verdict
      └─────> budgeted run ─────> outcome 3 ─┘

Each run begins at the state, with no gradients, and the state is put back after each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from membudget.audit.compare import Outcome, Results, compare
from membudget.audit.regions import RegionCounts, counting
from membudget.audit.report import AuditReport, Compared
from membudget.engine.switches import disable_checkpointing
from membudget.state.copies import first_value, is_zero
from membudget.state.restore import State

Regions = Callable[[], AbstractContextManager[RegionCounts]]


@dataclass(frozen=True)
class Run:
    """One run of a step.

    Attributes:
        label: Its name in errors.
        step: What it calls.
        roots: What the step may change, by the name under which it is reported.
        regions: Returns a context in which the regions are on, and counted.
    """

    label: str
    step: Callable[[], Results]
    roots: dict[str, Any]
    regions: Regions = counting


def compare_runs(plain: Run, budgeted: Run) -> AuditReport:
    """Run the plain step twice and the budgeted one once, each from the same state.

    Args:
        plain: The step without regions; it runs under `disable_checkpointing()`.
        budgeted: The step with regions.

    Returns:
        The report, without the words about the loss.
    """
    state = State([*plain.roots.items(), *budgeted.roots.items()])
    start = state.stream_states()
    try:
        state.restore()  # Lays the gradients aside.
        with disable_checkpointing():
            first = run_once(plain, state)
            second = run_once(replace(plain, label="the second plain run"), state)
        unrepeatable = compare(first, second, start, "the second run").differences
        del second
        with budgeted.regions() as counts:
            other = run_once(budgeted, state)
            regions = counts.since() or None
    finally:
        state.restore_gradients()
    compared = compare(first, other, start, "budgeted")
    loss = first.of("loss").get("loss")
    gradients = [held for held in first.of("gradient").values() if held is not None]
    return AuditReport(
        compared.differences,
        side_effects=compared.side_effects,
        unrepeatable=unrepeatable,
        compared=_count(first),
        regions=regions,
        loss="" if loss is None else first_value(loss),
        zero_gradients=all(map(is_zero, gradients)),
    )


def run_once(run: Run, state: State) -> Outcome:
    """Run a step, hold what it left behind, and put everything back."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            results = run.step()
        return Outcome(run.roots, state, results)
    except BaseException as error:
        error.add_note(
            f"Raised in {run.label} of an audit; the state from before was put back."
        )
        raise
    finally:
        state.restore()


def _count(outcome: Outcome) -> Compared:
    gradients = outcome.of("gradient").values()
    return Compared(
        losses=len(outcome.of("loss")),
        outputs=len(outcome.of("output")),
        gradients=sum(held is not None for held in gradients),
        no_gradients=sum(held is None for held in gradients),
        parameters=len(outcome.of("parameter")),
        buffers=len(outcome.of("buffer")),
        attributes=len(outcome.of("attribute")),
        streams=len(outcome.streams),
    )
