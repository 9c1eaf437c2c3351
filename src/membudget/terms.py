"""The terms of a slowdown: priced as the race shows them, named where one is off.

A region lengthens the forward by the engine's overhead alone: noting what a rerun
needs, or recording operators for a replay. It lengthens the backward by what it
recomputes, and by what that takes beside the operators.

Constants know that overhead only roughly: between kernels that leave little of the
engine in the CPU's caches, an operator costs several times what it costs between
others. So the overhead of a plan that was raced is scaled to what the race measured in
the forward, and that of a rerun, which takes as long in the backward, in both passes.
What a replay takes in the backward is other code, whose time does not follow that of
recording: over the field suite, scaling it, too, doubled the largest errors. What is
off after that is said by name.
"""

from __future__ import annotations

from dataclasses import replace

from membudget.attempt import Attempt
from membudget.planner.choice import RERUN
from membudget.planner.schedule import Schedule
from membudget.planning import overheads_of
from membudget.profile import Profile
from membudget.race import Slowdown

MOST_OFF = 0.05
"""How far a measured slowdown may be off before the report says which term is."""

FAR_OFF = 0.1
"""How far a measured slowdown may be off before a race of few rounds goes on."""

DOUBT = 0.01
"""Down to which share of a plain step a race of few rounds can time a forward.

It is added to what is measured and to what is predicted before they are divided: the
scale of an overhead that is lost in the noise stays near 1.
"""


def repriced(profile: Profile, attempt: Attempt, slowdown: Slowdown) -> Attempt:
    """Return an attempt whose regions' overhead is scaled to the raced forward.

    It is returned as it is where the forward was not timed apart. What is recomputed
    keeps its price, and no decision changes.
    """
    plain_s = profile.graph.seconds
    if slowdown.forward is None or not plain_s:
        return attempt
    forward_s, scaled_s = _predicted_s(profile, attempt.schedule)
    scale = (max(slowdown.forward, 0.0) + DOUBT) / (forward_s / plain_s + DOUBT)
    overhead_s = attempt.schedule.overhead_s + (scale - 1) * scaled_s
    schedule = replace(attempt.schedule, overhead_s=overhead_s)
    plan = replace(attempt.plan, slowdown=schedule.slowdown)
    return replace(attempt, plan=plan, schedule=schedule, overhead_scale=scale)


def is_far_off(attempt: Attempt, slowdown: Slowdown) -> bool:
    """Return whether a race that priced an attempt contradicts that price."""
    return abs(slowdown.median - attempt.plan.slowdown) > FAR_OFF


def term_off(profile: Profile, attempt: Attempt, slowdown: Slowdown) -> str:
    """Return how far a prediction is off, and in which pass; empty if it is near."""
    plan = attempt.plan
    off = slowdown.median - plan.slowdown
    plain_s = profile.graph.seconds
    if abs(off) <= MOST_OFF or slowdown.forward is None or not plain_s:
        return ""
    forward_s = attempt.overhead_scale * _predicted_s(profile, attempt.schedule)[0]
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


def _predicted_s(profile: Profile, schedule: Schedule) -> tuple[float, float]:
    """Return the regions' overhead that constants predict of the forward.

    Then that of both passes which a race of the forward scales: all of a rerun's, and
    what recording takes.
    """
    overheads, graph = overheads_of(profile), profile.graph
    forward_s = scaled_s = 0.0
    for choice in schedule.choices:
        own_s = overheads.forward_of_s(graph, choice)
        forward_s += own_s
        reruns = choice.engine == RERUN
        scaled_s += overheads.region_of_s(graph, choice) if reruns else own_s
    return forward_s, scaled_s
