"""Simulate one step of a pipeline: what each rank does when, and in how many bytes.

The simulated rank runs its actions as `membudget.pipeline` does:

1. An action begins when the rank has finished the one before it. A forward and a
   backward pass also wait for what another rank sends.
2. A transfer begins when its sender and its receiver have both posted it, takes
   `latency_s`, and keeps neither from computing, but for the `transfer_s` in which it
   is posted. But a rank posts a send only when
   the last but one of the same stage and direction has arrived (`MOST_SENDS`).
3. Bytes depend on the order alone: see `pipeline_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from membudget.errors import OptionError
from membudget.planner.pipeline_bytes import MOST_SENDS, PipelineRankBytes
from membudget.planner.pipeline_costs import COMPUTES, StageCosts
from membudget.planner.pipeline_order import (
    BACKWARDS,
    PipelineAction,
    PipelineOrder,
    is_sent,
)


class PipelineEvent(NamedTuple):
    """What a rank did, and when; measured or simulated.

    Attributes:
        rank: The rank.
        action: What it did. A `"wait"` names the stage and micro-batch of the action
            that had to wait.
        start_s: When it began, in seconds since the step began.
        end_s: When it ended.
    """

    rank: int
    action: PipelineAction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineSimulation:
    """One simulated step.

    Attributes:
        order: What was simulated.
        step_s: Seconds from the first action to the end of the last.
        peak_bytes: Most live bytes of each rank; activations beside what `StageCosts`
            names. Workspaces outside of tensors are not counted.
        events: What each rank did when, rank by rank.
    """

    order: PipelineOrder
    step_s: float
    peak_bytes: tuple[int, ...]
    events: tuple[PipelineEvent, ...]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they compute nothing."""
        return bubble(self.events)


def bubble(events: Sequence[PipelineEvent]) -> float:
    """Return the share of the ranks' time in which they compute nothing.

    Args:
        events: Those of all ranks in one step.
    """
    ranks = {event.rank for event in events}
    start_s, end_s = span_s(events)
    busy_s = sum(e.end_s - e.start_s for e in events if e.action.kind in COMPUTES)
    whole_s = len(ranks) * (end_s - start_s)
    return 1 - busy_s / whole_s if whole_s else 0.0


def span_s(events: Sequence[PipelineEvent]) -> tuple[float, float]:
    """Return when the first event begins and the last one ends."""
    if not events:
        return 0.0, 0.0
    return min(e.start_s for e in events), max(e.end_s for e in events)


def simulate_pipeline(
    order: PipelineOrder, costs: Sequence[StageCosts], *, latency_s: float = 0.0
) -> PipelineSimulation:
    """Predict the time, the bubble and the bytes of a pipeline's step.

    Args:
        order: What each rank does; see `membudget.pipeline.pipeline_order`.
        costs: What one micro-batch costs each stage.
        latency_s: Seconds that a tensor travels from one rank to another.

    Returns:
        The simulated step. Its time does not include the optimizer's step, nor what the
        ranks lose by sharing cores, memory bandwidth or links.

    Raises:
        OptionError: There are not as many costs as stages, or the order makes ranks
            wait for each other for ever.
    """
    if len(costs) != order.stages:
        raise OptionError(
            f"the order has {order.stages} stages, and costs has {len(costs)} entries"
        )
    run = _PlayedOrder(order, costs, latency_s)
    run.run()
    peaks = []
    for rank, actions in enumerate(order.ranks):
        held = PipelineRankBytes(order, costs, rank)
        for action in actions:
            held.run(action)
        peaks.append(held.peak_bytes)
    events = sorted(run.events, key=lambda event: (event.rank, event.start_s))
    _, step_s = span_s(events)
    return PipelineSimulation(order, step_s, tuple(peaks), tuple(events))


class _PlayedOrder:
    """Plays the ranks of an order against each other."""

    def __init__(
        self, order: PipelineOrder, costs: Sequence[StageCosts], latency_s: float
    ):
        self._order, self._costs, self._latency_s = order, costs, latency_s
        self._clocks = [0.0] * len(order.ranks)
        self._next = [0] * len(order.ranks)
        self._posted: dict[PipelineAction, float] = {}
        self._sends: dict[tuple[str, int], list[PipelineAction]] = {}
        self.events: list[PipelineEvent] = []

    def run(self) -> None:
        """Run every action of every rank."""
        ranks = range(len(self._order.ranks))
        while sum(map(self._advance, ranks)):  # Every rank gets its turn.
            pass
        if stuck := [r for r in ranks if self._next[r] < len(self._order.ranks[r])]:
            action = self._order.ranks[stuck[0]][self._next[stuck[0]]]
            raise OptionError(
                f"rank {stuck[0]} deadlocks: no rank sends what its action "
                f"{self._next[stuck[0]]}, {action.kind} of stage {action.stage} for "
                f"micro-batch {action.micro_batch}, needs"
            )

    def _advance(self, rank: int) -> bool:
        """Run the actions of a rank until one needs what is not known yet."""
        before = self._next[rank]
        actions = self._order.ranks[rank]
        while self._next[rank] < len(actions):
            action = actions[self._next[rank]]
            ready_s = self._ready_s(action)
            if ready_s is None:
                break
            self._perform(rank, action, ready_s)
            self._next[rank] += 1
        return self._next[rank] > before

    def _perform(self, rank: int, action: PipelineAction, ready_s: float) -> None:
        now_s = self._clocks[rank]
        start_s = max(now_s, ready_s)
        if start_s > now_s:
            wait = action._replace(kind="wait")
            self.events.append(PipelineEvent(rank, wait, now_s, start_s))
        end_s = start_s + self._costs[action.stage].seconds(self._order, action)
        self.events.append(PipelineEvent(rank, action, start_s, end_s))
        self._clocks[rank] = end_s
        self._posted[action] = end_s
        if action.kind.startswith("send"):
            self._sends.setdefault((action.kind, action.stage), []).append(action)

    def _ready_s(self, action: PipelineAction) -> float | None:
        """Return when an action may begin, or `None` if that is not known yet."""
        kind, stage, rank_of = action.kind, action.stage, self._order.rank_of
        if kind == "forward" and is_sent(rank_of, stage, stage - 1):
            return self._arrived_s(action._replace(kind="receive_forward"))
        if kind in BACKWARDS and is_sent(rank_of, stage, stage + 1):
            return self._arrived_s(action._replace(kind="receive_backward"))
        sends = self._sends.get((kind, stage), [])
        if len(sends) >= MOST_SENDS:
            return self._arrived_s(_receive_of(sends[-MOST_SENDS]))
        return 0.0

    def _arrived_s(self, receive: PipelineAction) -> float | None:
        posted_s = self._posted.get(receive)
        sent_s = self._posted.get(_send_of(receive))
        if posted_s is None or sent_s is None:
            return None
        return max(posted_s, sent_s) + self._latency_s


def _receive_of(send: PipelineAction) -> PipelineAction:
    if send.kind == "send_forward":
        return send._replace(kind="receive_forward", stage=send.stage + 1)
    return send._replace(kind="receive_backward", stage=send.stage - 1)


def _send_of(receive: PipelineAction) -> PipelineAction:
    if receive.kind == "receive_forward":
        return receive._replace(kind="send_forward", stage=receive.stage - 1)
    return receive._replace(kind="send_backward", stage=receive.stage + 1)
