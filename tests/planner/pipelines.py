"""Orders and costs of pipelines, without torch, for the tests of their numbers."""

from __future__ import annotations

from typing import Any

from membudget.planner.pipeline_costs import StageCosts
from membudget.planner.pipeline_order import (
    PipelineAction,
    PipelineOrder,
    checked_modes,
    gpipe,
    one_forward_one_backward,
    recomputing_ahead,
)

COSTS = StageCosts(forward_s=1.0, backward_s=2.0, recompute_s=1.0)
PLAIN = StageCosts(forward_s=1.0, backward_s=2.0)

_MAKERS = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


def order_of(
    name: str,
    stages: int,
    micro_batches: int,
    *,
    checkpoint: Any = "always",
    ahead: bool = True,
) -> PipelineOrder:
    """Return an order whose transfers are posted as late as they are of use.

    A send follows its computation, and a receive stands right before what needs it.
    """
    ranks = [
        tuple(
            transfer
            for action in actions
            for transfer in _with_transfers(action, stages)
        )
        for actions in _MAKERS[name](stages, micro_batches).values()
    ]
    modes = checked_modes(checkpoint, stages)
    order = PipelineOrder(name, tuple(ranks), micro_batches, modes)
    return recomputing_ahead(order) if ahead else order


def _with_transfers(action: PipelineAction, stages: int) -> list[PipelineAction]:
    forwards = action.kind == "forward"
    source, target = (-1, 1) if forwards else (1, -1)
    found = [action]
    if 0 <= action.stage + source < stages:
        kind: Any = "receive_forward" if forwards else "receive_backward"
        found.insert(0, action._replace(kind=kind))
    if 0 <= action.stage + target < stages:
        kind = "send_forward" if forwards else "send_backward"
        found.append(action._replace(kind=kind))
    return found
