"""Regions for the calls of a module that the model calls often, told apart by number.

A recurrent cell, the right side of a differential equation or a shared layer is one
module with many calls, and a plan may keep other outputs in one call than in the next.
Calls are counted from the start of the model's forward, so a step with more or fewer of
them, or one that an exception ends, shifts no later step. A call inside a function that
runs again as a whole has no region: the second run would go on counting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from membudget._torch import top_saved_tensors_hooks
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from membudget.engine.rerun import Rerun
from membudget.engine.rerun_frame import RerunFrame


@dataclass(slots=True)
class NumberedRegions:
    """Regions attached to one module, by the number of the call.

    Attributes:
        options: Options of the region of each call that has one, by number from 0.
        further: Options of the calls beyond those that the plan knows.
        times: How many calls the plan knows.
        statistics: Counters of all regions together.
        number: Number of the next call.
        kept: What an error says if memory runs out in the forward; may be empty.
    """

    options: Mapping[int, RegionOptions]
    further: RegionOptions
    times: int
    statistics: Statistics
    number: int = 0
    kept: str = ""

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward, as a region if this call has one."""
        options = self.options.get(self.number)
        if self.number >= self.times:
            options = self.further
        self.number += 1
        if options is None or _runs_again():
            return function(*args, **kwargs)
        return run_region(function, args, kwargs, options, self.statistics)


def _runs_again() -> bool:
    """Return whether a function that will run again as a whole has called this.

    A rerun region, or torch's checkpointing, must save the same tensors in the second
    run, in which the calls inside have other numbers.
    """
    hooks = top_saved_tensors_hooks()
    if hooks is None:
        return False
    owner = getattr(hooks[0], "__self__", None)
    module = getattr(hooks[0], "__module__", "")
    return isinstance(owner, RerunFrame | Rerun) or module == "torch.utils.checkpoint"


class CountedFrom:
    """Attached to the model: its forward starts the numbers of the calls inside."""

    statistics = None
    kept = ""

    def __init__(self, inside: Sequence[NumberedRegions]):
        """Store the regions whose calls are counted."""
        self._inside = inside

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the model's forward."""
        for regions in self._inside:
            regions.number = 0
        return function(*args, **kwargs)
