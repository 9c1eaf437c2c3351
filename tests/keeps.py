"""What replay regions are told to keep, and how a step runs under them."""

from __future__ import annotations

from typing import Any

import membudget as mb
from membudget import policies
from membudget.policies import Candidate
from tests.oracles import Backward, Way, backward_once, backward_twice, double_backward
from tests.zoo import Call


def every_second(candidate: Candidate) -> bool:
    """Keep what every second operator of the region makes."""
    return candidate.index % 2 == 0


KEEPS: dict[str, Any] = {
    "nothing": policies.nothing,
    "matmuls": policies.matmuls,
    "every-second": every_second,
    "everything": policies.everything,
}

BACKWARDS: dict[str, Backward] = {
    "once": backward_once,
    "retain-graph": backward_twice,
    "double-backward": double_backward,
}


def replay(keep: Any = policies.nothing, *, verify: bool = False) -> Any:
    """Return what turns a function into a replay region, as a decorator does."""
    return mb.checkpoint(engine="replay", keep=keep, verify=verify)


def replayed(keep: Any, *, verify: bool = False) -> Way:
    """Return the way that runs a call as one replay region."""
    region = replay(keep, verify=verify)

    def way(call: Call) -> Any:
        return region(call.function)(*call.args, **call.kwargs)

    return way


def replayed_twice(keep: Any) -> Way:
    """Return the way that runs a call twice, each time as a replay region."""
    way = replayed(keep)
    return lambda call: [way(call), way(call)]
