"""Profile the step that takes the most memory, where random numbers decide what runs.

A real step is metered with the numbers as they are drawn, with the largest and with the
smallest; a fake one is recorded with the largest and with the smallest. `draws` says
which numbers these are. Processes of a group have one of the two, because each of them
draws other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from membudget.allocation import is_out_of_memory
from membudget.draws import LARGEST, SMALLEST, Draws, drawing
from membudget.memory import peak_on
from membudget.profile.result import Profile
from membudget.step import Step

DECIDE = "random numbers decide what the step runs"
"""How the note begins."""


def warm_up(step: Step) -> None:
    """Run a step for the first time, and choose what its later runs draw."""
    step.draws = None
    with drawing(None) as seen:
        step.run()
    if not seen.may_decide:
        return
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    as_drawn = () if is_grouped else (None,)
    peaks = {d: _peak_bytes(step, d) for d in (*as_drawn, LARGEST, SMALLEST)}
    step.draws = max(peaks, key=peaks.__getitem__)


def _peak_bytes(step: Step, draws: Draws | None) -> int:
    """Return the peak of a step; 0 if it fails, as one may that drops all layers."""
    step.draws = draws
    step.prepare()
    try:
        return peak_on(step.device, step.run).peak_bytes
    except Exception as error:
        if draws is None or is_out_of_memory(error):
            raise
        return 0


def recorded_with_most(step: Step, record: Callable[[], Profile]) -> Profile:
    """Record a step once, or twice if random numbers decide what it runs."""
    failed: Exception | None = None
    found: dict[Draws, Profile] = {}
    decides = False
    for draws in (LARGEST, SMALLEST):
        step.draws = draws
        try:
            with drawing(None) as seen:
                found[draws] = record()
        except Exception as error:
            failed = failed or error
        decides |= seen.may_decide
        if not decides:
            break
    if failed is not None and not found:
        raise failed
    most = max(found, key=lambda draws: found[draws].peak_bytes)
    step.draws = most if decides else None
    return found[most]


def noting_draws(found: Profile, draws: Draws | None) -> Profile:
    """Return a profile that says what its step drew."""
    if draws is None:
        return found
    note = f"{DECIDE}: the {draws} that can be drawn, with which it takes most"
    return replace(found, draws=draws, notes=(*found.notes, note))
