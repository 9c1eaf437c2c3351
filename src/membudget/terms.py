"""Say which term of a slowdown is off, where a plan takes longer than predicted.

A region lengthens the forward by the engine's overhead alone: noting what a rerun
needs, or recording operators for a replay. It lengthens the backward by what it
recomputes, and by serving saved tensors. Timed apart, the passes tell which is off.
"""

from __future__ import annotations

from membudget.attempt import Attempt
from membudget.planning import overheads_of
from membudget.profile import Profile
from membudget.race import Slowdown

MOST_OFF = 0.05
"""How far a measured slowdown may be off before the report says which term is."""


def term_off(profile: Profile, attempt: Attempt, slowdown: Slowdown) -> str:
    """Return how far a prediction is off, and in which pass; empty if it is near."""
    plan, schedule = attempt.plan, attempt.schedule
    off = slowdown.median - plan.slowdown
    plain_s = profile.graph.seconds
    if abs(off) <= MOST_OFF or slowdown.forward is None or not plain_s:
        return ""
    overheads = overheads_of(profile)
    choices = schedule.choices
    forward_s = sum(overheads.forward_of_s(profile.graph, c) for c in choices)
    predicted = {"forward": forward_s / plain_s}
    predicted["backward"] = plan.slowdown - 1 - predicted["forward"]
    measured = {"forward": slowdown.forward}
    measured["backward"] = slowdown.median - 1 - slowdown.forward
    term = max(measured, key=lambda name: (measured[name] - predicted[name]) / off)
    why = {
        "forward": "the regions' overhead in the forward",
        "backward": "recomputation and saved tensors in the backward",
    }
    return (
        f"{off:+.3f}: {why[term]} took {measured[term]:.3f} of the plain step, "
        f"predicted {predicted[term]:.3f}"
    )
