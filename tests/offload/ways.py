"""The ways of running a call while what autograd saves is offloaded."""

from __future__ import annotations

from typing import Any

import membudget as mb
from membudget import policies
from membudget.engine.policy import Policy, as_policy
from membudget.policies import Candidate
from tests.oracles import Way
from tests.zoo import Call

SMALL = 1
"""Offload every storage that has bytes."""


def offloaded(
    call: Call, window: int = 1 << 20, host: str = "4MiB", disk: str | int = 0
) -> Any:
    """Run a call with all it saves offloaded."""
    with mb.offload(host, window=window, smallest=SMALL, disk=disk):
        return call.function(*call.args, **call.kwargs)


def with_regions(engine: str, is_inside: bool) -> Way:
    """Return the way that offloads around a region, or inside of one."""

    def way(call: Call) -> Any:
        off = mb.offload("4MiB", window=0, smallest=SMALL)

        def inner(*args: Any, **kwargs: Any) -> Any:
            with off:
                return call.function(*args, **kwargs)

        if is_inside:
            return mb.checkpoint(engine=engine)(inner)(*call.args, **call.kwargs)
        with off:
            return mb.checkpoint(engine=engine)(call.function)(
                *call.args, **call.kwargs
            )

    return way


def kept_by(policy: Policy, window: int = 1 << 20, inside: str = "") -> Way:
    """Return the way that runs a replay region that offloads what it is to keep."""

    def way(call: Call) -> Any:
        off = mb.offload("4MiB", window=window, smallest=SMALL)
        keep = policies.offloaded(policy, off)
        region = mb.checkpoint(engine="replay", keep=keep)(call.function)
        if inside:
            region = mb.checkpoint(engine=inside)(region)
        return region(*call.args, **call.kwargs)

    return way


def inputs_of(engine: str) -> Way:
    """Return the way that runs a region whose inputs are offloaded."""

    def way(call: Call) -> Any:
        off = mb.offload("4MiB", window=0, smallest=SMALL)
        region = mb.checkpoint(engine=engine, offload=off)(call.function)
        return region(*call.args, **call.kwargs)

    return way


def is_even(candidate: Candidate) -> bool:
    return candidate.index % 2 == 0


WAYS: dict[str, Way] = {
    "offload": offloaded,
    "no window": lambda call: offloaded(call, window=0),
    "to the disk": lambda call: offloaded(call, window=0, host="512", disk="4MiB"),
    "around replay": with_regions("replay", is_inside=False),
    "around rerun": with_regions("rerun", is_inside=False),
    "inside replay": with_regions("replay", is_inside=True),
    "inside rerun": with_regions("rerun", is_inside=True),
    "kept by a policy": kept_by(policies.everything),
    "half kept": kept_by(as_policy(is_even), window=0),
    "inputs of replay": inputs_of("replay"),
    "inputs of rerun": inputs_of("rerun"),
    "kept in replay": kept_by(policies.everything, inside="replay"),
    "kept in rerun": kept_by(policies.everything, inside="rerun"),
}
