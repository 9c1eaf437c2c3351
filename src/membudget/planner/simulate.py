"""Definition of a step's live bytes, peak and time with recomputation.

Tests compare every solver with this simulation, and the simulation with the memory
meter. A tensor that a block makes and autograd saves is dropped unless the block's
choice keeps it; the engine of the choice recomputes a dropped tensor when the backward
pass first unpacks it: see `second_run` for the rerun engine, and `backward` for the
replay engine (`engine.replay`), whose rules are:

1. A storage is live while user code holds it, while autograd holds a saved tensor in it
   that is not dropped, or while it is the source (a kept storage or an input of the
   block) for recomputing a dropped tensor that autograd still holds.
2. When the backward pass unpacks a dropped tensor that is not live, the missing part of
   its recompute slice runs in forward order, each operator at most once per stage.
3. A recomputed storage stays live while the current stage needs it for another saved
   tensor or for an operator yet to run; a storage that the stage retains stays live
   until the next stage begins.
4. Views cost no memory. A storage that is written in place is recomputed by all
   operators that write it.
5. Autograd may overwrite an unpacked tensor, so autograd gets a copy if an operator of
   the stage has yet to read the tensor, or if the stage retains it for another to read.
6. If an operator overwrites a recomputed storage that earlier operators have yet to
   read, a copy of the old content is live until they have run.

What a block keeps may be moved to the host, and back before it is read: see `moved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.choice import Block, Choice, is_movable, made_in, once
from membudget.planner.ledger import Ledger, ListingLedger
from membudget.planner.moved import NO_MOVES, Host, Moves, Moving
from membudget.planner.step_events import StepEvents
from membudget.planner.timeline import PlainStep, Timeline, live_and_before


@dataclass(frozen=True)
class Simulation(Timeline):
    """The simulated timeline and duration of a step for a given set of choices.

    Attributes:
        seconds: Time of the step, including recomputation and waits for copies.
        replayed: Indices of the operators run by replays, in execution order.
        reran: Indices of the operators run by reruns, in execution order.
        moves: What the copies to the host, and back, take.
    """

    seconds: float
    replayed: tuple[int, ...]
    reran: tuple[int, ...] = ()
    moves: Moves = NO_MOVES

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Indices of all operators that run again."""
        return self.replayed + self.reran

    def share_over(self, budget_bytes: int) -> float:
        """Return the excess of the peak over a budget, as a fraction of the budget."""
        return max(0, self.peak_bytes - budget_bytes) / max(1, budget_bytes)


class BlockTimeline(NamedTuple):
    """Live bytes of one block's storages, constant between its events, as arrays.

    Attributes:
        starts: Op indices of the events, in order.
        ends: Op indices of the events that follow.
        alive_bytes: Live bytes after each event.
        peak_bytes: Maximum at each event, the operator's workspace included.
    """

    starts: np.ndarray
    ends: np.ndarray
    alive_bytes: np.ndarray
    peak_bytes: np.ndarray


def simulate(
    graph: StepGraph,
    choices: Iterable[Choice],
    plain: PlainStep | None = None,
    host: Host | None = None,
    orders: AskedOrders | None = None,
) -> Simulation:
    """Simulate a step for given choices of disjoint blocks.

    Many simulations of one step are faster if they share what is known of the `plain`
    one, and the `orders` in which it asks for what it keeps. If a choice moves
    storages, `host` says where to.

    Raises:
        OptionError: If blocks overlap or extend beyond the forward, or a block moves
            what it does not keep or what cannot be moved.
    """
    ordered = sorted(choices, key=lambda choice: choice.start)
    _check(graph, ordered)
    plain = plain or PlainStep(graph)
    return _run(graph, ordered, plain, host, Ledger(graph), orders)


class LiveAtPeak(NamedTuple):
    """What is live at the peak of a simulated step.

    Attributes:
        operator: Index of the operator that runs, for the first time or again.
        storages: The live storages, each as often as it has copies.
    """

    operator: int
    storages: tuple[int, ...]


def live_at_peak(
    graph: StepGraph, choices: Iterable[Choice], host: Host | None = None
) -> LiveAtPeak:
    """Return what is live at the peak of a step for given choices.

    Together, the storages and the operator's workspace have the bytes of the peak.
    """
    ordered, plain = sorted(choices, key=lambda choice: choice.start), PlainStep(graph)
    known = simulate(graph, ordered, plain, host)
    moment = known.peak_moment
    ledger = ListingLedger(graph, known.peak_bytes, moment)
    _run(graph, ordered, plain, host, ledger)
    # A recompute runs before what the step allocates at its moment.
    last = moment if ledger.operator is None else moment - 1
    moved = {storage for choice in ordered for storage in choice.offloaded}
    others = (
        index
        for index, storage in enumerate(graph.storages)
        if index not in moved and 0 <= storage.birth <= last
        if ledger.end_of(index) > moment
    )
    operator = moment if ledger.operator is None else ledger.operator
    return LiveAtPeak(operator, (*others, *ledger.live.elements()))


class _Ranges(NamedTuple):
    """Live ranges of the storages that a block allocates, as arrays, in some order."""

    places: dict[int, int]  # By storage.
    births: np.ndarray
    deaths: np.ndarray
    sizes: np.ndarray


@once
def _plain_ranges(graph: StepGraph, block: Block) -> _Ranges:
    """Return the live ranges in the plain step."""
    made = [*made_in(graph, block)]
    facts = [graph.storages[storage] for storage in made]
    rows = np.array([(f.birth, f.death, f.bytes) for f in facts], int).reshape(-1, 3)
    return _Ranges({storage: i for i, storage in enumerate(made)}, *rows.T.copy())


def simulate_block(
    graph: StepGraph, choice: Choice, plain: PlainStep | None = None
) -> BlockTimeline:
    """Simulate one block alone, counting only the storages that it allocates."""
    plain, count = plain or PlainStep(graph), len(graph.operators)
    events = StepEvents(ledger := Ledger(graph), [choice])
    own = _plain_ranges(graph, choice)
    ends = own.deaths.copy()
    for storage in own.places.keys() & ledger.ends.keys():
        ends[own.places[storage]] = ledger.ends[storage]
    alive, before = live_and_before(count, own.births, ends, own.sizes)
    again, peaks = events.run(before)
    alive += again
    # Every operator of the block is an event: its workspace counts.
    starts = {*events.moments(), *range(choice.start, choice.end), *ends.tolist()}
    moments = np.array(sorted(m for m in starts if m < count), int)
    ends = np.append(moments, count)[1:]
    most = np.maximum(alive + plain.workspaces, peaks)
    return BlockTimeline(moments, ends, alive[moments], most[moments])


def _check(graph: StepGraph, choices: Sequence[Choice]) -> None:
    end_before = 0
    for choice in choices:
        if not end_before <= choice.start <= choice.end <= graph.backward_start:
            raise OptionError(
                f"the block of operators {choice.start} to {choice.end} overlaps the "
                f"one before it or leaves the forward, which ends at "
                f"{graph.backward_start}"
            )
        end_before = choice.end
        movable = (is_movable(graph, choice, storage) for storage in choice.offloaded)
        if not (choice.offloaded <= choice.kept and all(movable)):
            raise OptionError(
                f"the block of operators {choice.start} to {choice.end} moves storages "
                "to the host that it does not keep, or that cannot be moved"
            )


def _run(
    graph: StepGraph,
    ordered: Sequence[Choice],
    plain: PlainStep,
    host: Host | None,
    ledger: Ledger,
    orders: AskedOrders | None = None,
) -> Simulation:
    if not any(choice.offloaded for choice in ordered):
        return _through(StepEvents(ledger, ordered), plain, None)
    if host is None:
        raise OptionError("a choice moves storages to a host, and none is given")
    moved = {storage for choice in ordered for storage in choice.offloaded}
    order = _order(graph, ordered) if orders is None else orders.of(ordered)
    moving = Moving(ledger, plain, host, [s for s in order if s in moved])
    return _through(StepEvents(ledger, ordered, moving), plain, moving)


class AskedOrders:
    """The orders in which steps ask for what they keep, which copies do not change."""

    def __init__(self, graph: StepGraph):
        """Know no order yet."""
        self._graph = graph
        self._known: dict[tuple[Choice, ...], list[int]] = {}

    def of(self, ordered: Sequence[Choice]) -> list[int]:
        """Return the kept storages in the order in which they are asked for first."""
        key = tuple(_unmoved(choice) for choice in ordered)
        if key not in self._known:
            self._known[key] = _order(self._graph, key)
        return self._known[key]


def _unmoved(choice: Choice) -> Choice:
    return replace(choice, offloaded=frozenset()) if choice.offloaded else choice


def _order(graph: StepGraph, ordered: Sequence[Choice]) -> list[int]:
    kept = {s for c in ordered for s in c.kept if s in graph.saved_on}
    return StepEvents(Ledger(graph), ordered).asked(kept)


def _through(events: StepEvents, plain: PlainStep, moving: Moving | None) -> Simulation:
    """Go through the events of a step."""
    ledger, graph = events.ledger, events.ledger.graph
    # Few live ranges change: all others are those of the plain step.
    alive, before = plain.with_ends(ledger.ends, events.moved)
    own, peaks = events.run(before)
    alive += own
    totals = np.maximum(alive + plain.workspaces, peaks)
    peak_moment = int(totals.argmax()) if len(totals) else 0
    again = [*ledger.replayed, *ledger.reran]
    again_s = sum(graph.operators[index].seconds for index in again)
    moves = NO_MOVES if moving is None else moving.moves()
    return Simulation(
        tuple(alive.tolist()),
        int(totals.max(initial=0)),
        peak_moment,
        graph.seconds + again_s + moves.wait_s,
        tuple(ledger.replayed),
        tuple(ledger.reran),
        moves,
    )
