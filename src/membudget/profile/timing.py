"""Time plain steps, block by block, without a recorder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import Module

from membudget.profile.cost import step_clock
from membudget.profile.events import TimerEvents
from membudget.step import Step

FEWEST_TIMED, MOST_TIMED = 3, 15
TIMED_S = 0.5
"""Short steps are timed for at least this long: a machine may be slow for a moment."""


def is_grouped() -> bool:
    """Return whether all processes of a group must run as many steps.

    They wait for each other in a step's collectives, however fast each of them is, and
    whatever it draws.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def timed_steps(step: Step, blocks: dict[str, Module]) -> Iterator[TimerEvents]:
    """Run a step some times, and yield when its parts began in each."""
    end_s = time.monotonic() + TIMED_S
    for number in range(FEWEST_TIMED if is_grouped() else MOST_TIMED):
        if number >= FEWEST_TIMED and time.monotonic() >= end_s:
            break
        step.prepare()
        events = TimerEvents(step_clock())
        with events.on(blocks):
            events.note("start")
            step.run(partial(events.note, "loss"))
            events.note("end")
        yield events
