"""Execute the three runs of an audit: plain, plain again, and budgeted.

    state ──> plain run ────────> outcome 1 ─┬─ compare: is the step repeatable?
      ├─────> second plain run ─> outcome 2 ─┘
      │                           outcome 1 ─┬─ compare: the verdict
      └─────> budgeted run ─────> outcome 3 ─┘

Each run starts from the captured state, without gradients, and restores the state on
exit. The budgeted run uses the model's own regions, or applies temporary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import sub
from typing import Any

import torch
from torch.nn import Module

from membudget.apply import RegionStatus, apply
from membudget.attach import has_region, statistics_of
from membudget.audit.differences import Outcome, Results, compare
from membudget.audit.verdict import AuditReport, Compared
from membudget.engine.controls import disable_checkpointing
from membudget.engine.options import Statistics
from membudget.errors import OptionError
from membudget.selection import default_names
from membudget.state.identity import first_value, is_zero
from membudget.state.snapshot import State


class RegionCounts:
    """Counts the forwards and recomputes of regions during an audit."""

    def __init__(self, modules: Iterable[Module]) -> None:
        """Start counting for the regions on the modules and on all submodules."""
        self._before = {
            id(statistics): (name, statistics, _counts(statistics))
            for root in modules
            for name, module in root.named_modules()
            if (statistics := statistics_of(module)) is not None
        }

    def since(self) -> tuple[RegionStatus, ...]:
        """Return the forwards and recomputes of each region since counting began."""
        return tuple(
            RegionStatus(name, *map(sub, _counts(statistics), before))
            for name, statistics, before in self._before.values()
        )

    def restore(self) -> None:
        """Restore the counters, because audit steps do not count as training steps."""
        for _, statistics, before in self._before.values():
            statistics.forwards, statistics.recomputes, statistics.skipped = before


def _counts(statistics: Statistics) -> tuple[int, int, int]:
    return statistics.forwards, statistics.recomputes, statistics.skipped


@contextmanager
def counting(modules: Iterable[Module] = ()) -> Iterator[RegionCounts]:
    """Count forwards and recomputes of regions on `modules`; reset counters on exit."""
    counts = RegionCounts(modules)
    try:
        yield counts
    finally:
        counts.restore()


@contextmanager
def with_regions(model: Module, selection: dict[str, Any]) -> Iterator[RegionCounts]:
    """Apply regions to `model`, count their recomputes, and remove them on exit."""
    applied = apply(model, **selection)
    try:
        yield RegionCounts([model])
    finally:
        applied.remove()


def regions_for(
    model: Module, selection: dict[str, Any]
) -> Callable[[], AbstractContextManager[RegionCounts]]:
    """Return a function that returns a context manager for the budgeted run's regions.

    Raises:
        OptionError: If the model already has regions and `selection` is not empty.
        SelectionError: If no selected module can get a region.
    """
    if any(has_region(module) for module in model.modules()):
        if selection:
            raise OptionError(
                f"the model carries regions already, and those are audited; "
                f"{', '.join(selection)} would ask for others. Leave that out, or call "
                f"remove() on what apply() returned"
            )
        return partial(counting, [model])
    if all(selection.get(key) is None for key in ("blocks", "names", "where")):
        selection = selection | {"names": default_names(model)}
    if selection.get("engine", "auto") != "replay" and selection.get("keep") is None:
        # The audit names every difference; a region that verifies raises at the first.
        selection = {"verify": False, **selection}
    # Reject a wrong selection before the plain step runs, not after.
    apply(model, **selection).remove()
    return partial(with_regions, model, selection)


@dataclass(frozen=True)
class Run:
    """A run of a step in an audit, plain or budgeted.

    Attributes:
        label: Name of the run in error messages.
        step: Function that runs the step.
        roots: Objects that the step may change, keyed by their names in the report.
        regions: Function that creates a context manager to count recomputes.
    """

    label: str
    step: Callable[[], Results]
    roots: dict[str, Any]
    regions: Callable[[], AbstractContextManager[RegionCounts]] = counting


def compare_runs(plain: Run, budgeted: Run) -> AuditReport:
    """Run the plain step twice and the budgeted step once, each from the same state."""
    state = State([*plain.roots.items(), *budgeted.roots.items()])
    try:
        state.restore()  # Sets the gradients aside.
        with disable_checkpointing():
            first = run_once(plain, state)
            second = run_once(replace(plain, label="the second plain run"), state)
        unrepeatable = compare(first, second, "the second run").differences
        del second  # Free its copies before the next run.
        with budgeted.regions() as counts:
            other = run_once(budgeted, state)
            regions = counts.since() or None
    finally:
        state.restore_gradients()
    compared = compare(first, other, "budgeted")
    loss = first.of("loss").get("loss")
    gradients = [copy for copy in first.of("gradient").values() if copy is not None]
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
    """Run a step, record its outcome, and restore the state."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            results = run.step()
        return Outcome(run.roots, state, results)
    except BaseException as error:
        error.add_note(
            f"Raised in {run.label} of an audit; the state before it was restored."
        )
        raise
    finally:
        state.restore()


def _count(outcome: Outcome) -> Compared:
    gradients = outcome.of("gradient").values()
    return Compared(
        losses=len(outcome.of("loss")),
        outputs=len(outcome.of("output")),
        gradients=sum(copy is not None for copy in gradients),
        no_gradients=sum(copy is None for copy in gradients),
        parameters=len(outcome.of("parameter")),
        buffers=len(outcome.of("buffer")),
        attributes=len(outcome.of("attribute")),
        streams=len(outcome.streams),
    )
