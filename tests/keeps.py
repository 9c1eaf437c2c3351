"""What replay regions are told to keep, and how a step runs under them."""

from __future__ import annotations

from typing import Any

import membudget as mb
from membudget import policies
from membudget.engine.options import Verify
from membudget.engine.policy import Policy
from membudget.engine.stages import Stages
from membudget.policies import Candidate
from tests.oracles import Backward, Way, backward_once, backward_twice, double_backward
from tests.zoo import Call


def every_second(candidate: Candidate) -> bool:
    """Keep what every second operator of the region makes."""
    return candidate.index % 2 == 0


class ByStages(Policy):
    """Keep nothing; go back by stages of three operators, which hold some outputs.

    No plan would be so careless: what is held is not needed, and what is needed is not.
    """

    stages = Stages(
        [(n, 0) for n in range(0, 3000, 3)],
        [{(n, 0) for n in range(1, 400, 2)}] * 1000,
    )

    def keeps(self, candidate: Candidate) -> bool:
        return False


KEEPS: dict[str, Any] = {
    "nothing": policies.nothing,
    "matmuls": policies.matmuls,
    "every-second": every_second,
    "everything": policies.everything,
    "by-stages": ByStages(),
}

# Of a product with all, what finds most: these two keep little and much, at odds.
QUICK = ("nothing", "every-second")

VERIFIES: tuple[Verify, ...] = (False, True, "fingerprints")

BACKWARDS: dict[str, Backward] = {
    "once": backward_once,
    "retain-graph": backward_twice,
    "double-backward": double_backward,
}


def replay(keep: Any = policies.nothing, *, verify: Verify = False) -> Any:
    """Return what turns a function into a replay region, as a decorator does."""
    return mb.checkpoint(engine="replay", keep=keep, verify=verify)


def replayed(keep: Any, *, verify: Verify = False) -> Way:
    """Return the way that runs a call as one replay region."""
    region = replay(keep, verify=verify)

    def way(call: Call) -> Any:
        return region(call.function)(*call.args, **call.kwargs)

    return way


def replayed_twice(keep: Any) -> Way:
    """Return the way that runs a call twice, each time as a replay region."""
    way = replayed(keep)
    return lambda call: [way(call), way(call)]
