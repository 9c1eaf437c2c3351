"""Let calls follow routes: begin and end trips and surveys (Rule 11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from membudget.engine.options import RegionOptions
from membudget.engine.replay.checks import Checks
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.forward_record import ForwardRecord
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.routes import Routes
from membudget.engine.replay.verified import Verified

# The routes of calls that are not verified, and so have no signature.
_UNVERIFIED: dict[Any, Routes] = {}
_MOST_KEYS = 4096


def routes_of(
    options: RegionOptions, function: Callable[..., Any], known: Verified | None
) -> Routes | None:
    """Return what is known of the routes of a call; `None` if it may follow none.

    Calls that are not verified share them by policy and by code: a route that is not
    theirs is left at the first operator that differs.
    """
    if not EXTENSION or not options.may_follow:
        return None
    if known is not None:
        return known.routes
    key = options.policy.key, _code_of(function)
    found = _UNVERIFIED.get(key)
    if found is None:
        found = _UNVERIFIED[key] = Routes()
        if len(_UNVERIFIED) > _MOST_KEYS:
            del _UNVERIFIED[next(iter(_UNVERIFIED))]
    return found


def _code_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    is_module = isinstance(function, Module)
    return type(function) if is_module else getattr(function, "__code__", None)


def set_out(recording: ForwardRecord, replayer: Replayer, checks: Checks) -> None:
    """Let a call follow the route of its path, or survey it for later calls."""
    routes = recording.routes
    if routes is None:
        return
    if not checks.is_sampled:
        recording.trip = replayer.trip = routes.trip(recording.path, replayer)
    if recording.trip is None:
        recording.survey = routes.survey()


def arrive(recording: ForwardRecord) -> None:
    """End the trip of a call whose forward has ended."""
    if recording.trip is not None:
        EXTENSION[0].arrive(recording)


def end_trip(recording: ForwardRecord, has_arrived: bool) -> None:
    """Note that a call has followed its route to the end, or to its latest operator."""
    recording.policy.followed(recording.number)
    assert recording.routes is not None
    recording.routes.end_trip(has_arrived)


def note_route(recording: ForwardRecord, replayer: Replayer) -> None:
    """Note the route of a call that was surveyed, if it was on its path to the end."""
    routes, path, number = recording.routes, recording.path, recording.number
    if recording.survey is None or routes is None or not replayer.handles:
        return
    is_whole = recording.taken is None and (path is None or number == len(path))
    if is_whole and not recording.policy.differs:
        saved, stages = len(replayer.handles), replayer.stages
        held = () if stages is None else stages.held
        routes.note(path, EXTENSION[0].route(recording.survey, number, saved, held))
