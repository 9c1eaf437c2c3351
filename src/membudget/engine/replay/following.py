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
from membudget.engine.replay.routes import Known, Routes
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
    """Let a call follow the routes of its signature, or survey it for later calls."""
    routes = recording.routes
    if routes is None:
        return
    if routes.is_due or not routes.known:
        recording.survey = routes.survey()
    if recording.survey is None and routes.known and not checks.is_sampled:
        recording.path = routes.known[0].path
        recording.trip = replayer.trip = EXTENSION[0].trip(routes.known, replayer)


def arrive(recording: ForwardRecord) -> None:
    """End the trip of a call whose forward has ended."""
    if recording.trip is not None:
        EXTENSION[0].arrive(recording)


def end_trip(
    recording: ForwardRecord, last: Known, has_arrived: bool, reached: int
) -> None:
    """Note that a call has followed routes to the end, or to its latest operator.

    Args:
        recording: The record of the call.
        last: The route that it has followed in the end.
        has_arrived: Whether it has left none.
        reached: The last operator on the way, by its number for the policy.
    """
    recording.policy.followed(reached, has_arrived and last.differs)
    assert recording.routes is not None
    is_surveyed = recording.survey is not None
    recording.routes.end_trip(last, has_arrived, is_surveyed)


def realign(recording: ForwardRecord, steps: list[tuple[str, int]]) -> None:
    """Number the operators of a call that has left its route, for the policy.

    Args:
        recording: The record of the call.
        steps: Their names, and how many operations were on the tape before each.
    """
    tracker = recording.tracker
    recorded, recording.place = tracker.clock, 0
    for number, (name, before) in enumerate(steps, 1):
        recording.number, tracker.clock = number, before
        recording.align(name)
    tracker.clock = recorded


def note_route(
    recording: ForwardRecord, replayer: Replayer, verified: Verified | None
) -> None:
    """Note the route of a call that was surveyed, if it is verified to the end."""
    routes, path, number = recording.routes, recording.path, recording.number
    if recording.survey is None or routes is None or not replayer.handles:
        return
    if recording.taken is not None:
        routes.give_back()  # The call is being verified.
        return
    is_whole = True
    if path is not None:
        path = path[:number]
        is_whole = len(path) == number and (verified is None or path in verified.paths)
    if is_whole:
        held = () if replayer.stages is None else replayer.stages.held
        count = len(replayer.handles)
        route = EXTENSION[0].route(recording.survey, number, count, held)
        if route is not None:
            routes.note(Known(path, route, recording.policy.differs))
        else:
            routes.is_due = True  # Seen from its start, a call may have a route.
