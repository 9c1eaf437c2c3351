"""The most bytes that one rank of a pipeline holds in a step.

They depend on the rank's order alone, not on time:

    receive_forward   + input
    forward           + kept (or saved)                     its own peak on top
    receive_backward  + gradient of the output
    recompute         + recomputed                          its own peak on top
    backward          - all of these, + gradient of input   its own peak on top
    send_backward     the gradient of the input goes with the send after the next

Where a backward pass is taken apart, its part for the weights frees what is left. An
input from a stage on the same rank is the output of that stage, and takes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import le, mul
from typing import Any

import numpy as np

from membudget.planner.pipeline_costs import StageCosts, is_lazy
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder, is_sent

MOST_SENDS = 2
"""Sends of one stage and direction that may be under way at once."""

_Sent = tuple[int, int]  # A stage and a micro-batch.


class PipelineRankBytes:
    """The bytes of one rank, action by action.

    Attributes:
        live_bytes: Bytes live now.
        peak_bytes: The most so far.
    """

    def __init__(self, order: PipelineOrder, costs: Sequence[StageCosts], rank: int):
        """Begin a step with what is live before it."""
        self._order = order
        self._costs = costs
        self._stages = [s for s, r in order.rank_of.items() if r == rank]
        self.live_bytes = sum(costs[s].static_bytes for s in self._stages)
        self.peak_bytes = self.live_bytes
        self._without_gradients = set(self._stages)
        self._sending: dict[tuple[str, int], deque[_Sent]] = {}
        self._ended: set[_Sent] = set()

    def run(self, action: PipelineAction) -> None:
        """Run one action."""
        costs = self._costs[action.stage]
        match action.kind:
            case "receive_forward":
                self.live_bytes += costs.input_bytes
            case "receive_backward":
                self.live_bytes += costs.output_bytes
            case "forward":
                self._reach(costs.forward_peak_bytes)
                self.live_bytes += self._held_bytes(action, costs)
            case "recompute":
                self._reach(costs.recompute_peak_bytes)
                self.live_bytes += costs.recomputed_bytes
            case "backward" | "backward_input" | "backward_weight":
                self._run_backward(action, costs)
            case "send_forward" | "send_backward":
                self._send(action, costs)
        self._reach(0)

    def _reach(self, above_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + above_bytes)

    def _run_backward(self, action: PipelineAction, costs: StageCosts) -> None:
        self._differentiate(action, costs)
        if action.kind != "backward_weight" and action.stage > 0:
            self.live_bytes += costs.input_bytes  # Its gradient.
        if action.kind != "backward_input":
            self._end(action, costs)
        if is_lazy(self._order, action) and action.kind != "backward":
            # What the inputs' part recomputes stays until the weights' part.
            grows = action.kind == "backward_input"
            self.live_bytes += costs.recomputed_bytes * (1 if grows else -1)

    def _differentiate(self, action: PipelineAction, costs: StageCosts) -> None:
        lazy = is_lazy(self._order, action)
        self._reach(costs.lazy_peak_bytes if lazy else costs.backward_peak_bytes)
        if action.kind != "backward_input" and action.stage in self._without_gradients:
            self._without_gradients.remove(action.stage)
            self.live_bytes += costs.gradient_bytes

    def _end(self, action: PipelineAction, costs: StageCosts) -> None:
        at = (action.stage, action.micro_batch)
        self.live_bytes -= self._held_bytes(action, costs)
        if action.stage < self._order.stages - 1:
            self.live_bytes -= costs.output_bytes  # Its gradient.
        if is_sent(self._order.rank_of, action.stage, action.stage - 1):
            self.live_bytes -= costs.input_bytes
        if at in self._order.recomputed_ahead:
            self.live_bytes -= costs.recomputed_bytes
        if at in self._sending.get(("send_forward", action.stage), ()):
            self.live_bytes += costs.output_bytes  # The send still holds the output.
            self._ended.add(at)

    def _send(self, action: PipelineAction, costs: StageCosts) -> None:
        gone = self._sent(action)
        if action.kind == "send_backward" and gone is not None:
            self.live_bytes -= costs.input_bytes
        elif gone in self._ended:
            self._ended.remove(gone)
            self.live_bytes -= costs.output_bytes

    def _sent(self, action: PipelineAction) -> _Sent | None:
        """Note a send; return the one that is over when it begins."""
        sends = self._sending.setdefault((action.kind, action.stage), deque())
        gone = sends.popleft() if len(sends) >= MOST_SENDS else None
        sends.append((action.stage, action.micro_batch))
        return gone

    def _held_bytes(self, action: PipelineAction, costs: StageCosts) -> int:
        drops = self._order.recomputes(action.stage, action.micro_batch)
        return costs.kept_bytes if drops else costs.saved_bytes


_Sum = tuple[int, ...]  # How often each field of bytes counts.


class PeakOfStage:
    """The peak of a rank with one stage, for any costs, without running its order.

    What is live in an action is a sum of the costs' fields, each a number of times that
    the order alone decides. The peak is the largest of few such sums.
    """

    FIELDS = tuple(f.name for f in fields(StageCosts) if f.name.endswith("_bytes"))

    def __init__(self, order: PipelineOrder, stage: int):
        """Run the order once, to find the sums that can be the largest."""
        units: Any = np.eye(len(self.FIELDS), dtype=int)
        costs = StageCosts(
            forward_s=0, backward_s=0, **dict(zip(self.FIELDS, units, strict=True))
        )
        rank = order.rank_of[stage]
        held = _SumsOfRank(order, [costs] * order.stages, rank)
        for action in order.ranks[rank]:
            held.run(action)
        self._sums = _largest(held.sums)

    def of(self, costs: StageCosts) -> int:
        """Return the peak for these costs of the stage."""
        given: list[int] = [getattr(costs, name) for name in self.FIELDS]
        peak_bytes: int = max(sum(map(mul, times, given)) for times in self._sums)
        return peak_bytes


class _SumsOfRank(PipelineRankBytes):
    """The bytes of a rank as sums of fields, which come as unit vectors."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.sums: set[_Sum] = set()

    def _reach(self, above_bytes: Any) -> None:
        reached: Any = self.live_bytes + above_bytes
        self.sums.add(tuple(reached.tolist()))


def _largest(sums: Iterable[_Sum]) -> list[_Sum]:
    """Return the sums than which no other is as large in every field."""
    given = [*sums]
    return [
        one
        for one in given
        if not any(all(map(le, one, more)) for more in given if more != one)
    ]
