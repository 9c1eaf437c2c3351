"""The seconds that planning tests are given, in place of what was measured.

What a step takes depends on the machine and on what else it does, so no test may depend
on it. Everything is measured as always; then each operator's seconds are replaced by
what a made-up processor takes. `MEMBUDGET_SHAKE_SECONDS=N` multiplies each by a random
factor between 1/8 and 8, by seed N: no test may fail under any.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence

import pytest

from membudget import planning
from membudget.graph import StepGraph
from membudget.planner.overheads import FITTED_LAUNCH_S
from membudget.profile import cost, devices, profiling
from membudget.profile.devices import Device
from membudget.profile.events import TimerEvents

DEADLOCK_S = 1800.0
"""Longer than anything takes on any machine: waiting for it means a deadlock."""

PROCESSOR = Device("this CPU, given", {"float32": 5e10}, 1e10, 1e10)
_LAUNCH_S = 4e-6
_roofline, _share_out = cost.roofline, cost.share_out


def _shaken(graph: StepGraph, added_s: float) -> StepGraph:
    seed = os.environ.get("MEMBUDGET_SHAKE_SECONDS")
    generator, factor, operators = random.Random(seed), 1.0, []
    for operator in graph.operators:
        if seed:
            factor = 8 ** generator.uniform(-1, 1)
        seconds = (operator.seconds + added_s) * factor
        operators.append(dataclasses.replace(operator, seconds=seconds))
    return dataclasses.replace(graph, operators=tuple(operators))


def _given_measured(
    graph: StepGraph, recorded: TimerEvents, timed: Sequence[TimerEvents]
) -> StepGraph:
    graph = _roofline(_share_out(graph, recorded, timed), PROCESSOR)
    return _shaken(graph, _LAUNCH_S)


def _given_roofline(graph: StepGraph, device: Device) -> StepGraph:
    graph = _roofline(graph, device)
    return _shaken(graph, 0.0) if device is PROCESSOR else graph


def give(patch: pytest.MonkeyPatch) -> None:
    """Give every profile its seconds, until the patch is undone."""
    patch.setattr(profiling, "share_out", _given_measured)
    patch.setattr(profiling, "roofline", _given_roofline)
    for module in (cost, devices, planning):
        patch.setattr(module, "this_processor", lambda: PROCESSOR)
    patch.setattr(planning, "launch_seconds", lambda: FITTED_LAUNCH_S)
