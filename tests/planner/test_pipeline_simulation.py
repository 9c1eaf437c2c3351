"""The simulated step of a pipeline equals what can be worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from membudget.errors import OptionError
from membudget.planner.pipeline_bytes import (
    MOST_SENDS,
    PeakOfStage,
    PipelineRankBytes,
)
from membudget.planner.pipeline_costs import COMPUTES, StageCosts
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder
from membudget.planner.pipeline_simulation import bubble, simulate_pipeline
from tests.planner.pipelines import COSTS, PLAIN, order_of

SIZES = [(2, 2), (2, 7), (4, 4), (4, 8), (4, 16), (8, 8)]
sizes = pytest.mark.parametrize(("n", "m"), SIZES)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@sizes
def test_equal_stages_take_the_time_of_the_formula(name: str, n: int, m: int) -> None:
    f, b, r = COSTS.forward_s, COSTS.backward_s, COSTS.recompute_s
    times = {}
    for ahead in (False, True):
        order = order_of(name, n, m, ahead=ahead)
        times[ahead] = simulate_pipeline(order, [COSTS] * n).step_s
    plain = simulate_pipeline(order_of(name, n, m, checkpoint="never"), [PLAIN] * n)

    assert times[False] == (m + n - 1) * (f + b + r)
    assert times[True] == (m + n - 1) * (f + b) + m * r
    assert plain.step_s == (m + n - 1) * (f + b)
    assert plain.bubble == pytest.approx((n - 1) / (m + n - 1))


@sizes
def test_all_ranks_do_what_their_order_says(n: int, m: int) -> None:
    order = order_of("1F1B", n, m)
    found = simulate_pipeline(order, [COSTS] * n)
    for rank, actions in enumerate(order.ranks):
        own = [event for event in found.events if event.rank == rank]
        assert tuple(e.action for e in own if e.action.kind != "wait") == actions
        assert [e.start_s for e in own[1:]] == [e.end_s for e in own[:-1]]


@pytest.mark.parametrize("ahead", [False, True])
def test_recomputing_ahead_hides_the_latency_of_the_gradient(ahead: bool) -> None:
    # Stage 0: F, then its gradient comes at F + latency + F + B + R + latency.
    costs, order = [COSTS] * 2, order_of("1F1B", 2, 1, ahead=ahead)
    found = simulate_pipeline(order, costs, latency_s=0.5)
    f, b, r, c = 1.0, 2.0, 1.0, 0.5
    arrives = f + c + f + b + r + c
    assert found.step_s == arrives + b + (0 if ahead else r)


def test_a_third_send_waits_for_the_first_to_arrive() -> None:
    costs = [StageCosts(forward_s=1.0, backward_s=1.0)] * 2
    order = order_of("GPipe", 2, 4, checkpoint="never")
    found = simulate_pipeline(order, costs, latency_s=10.0)
    sends = [e.start_s for e in found.events if e.action.kind == "send_forward"]
    # The receive of micro-batch i is posted when i - 1 has been computed.
    assert sends == [1.0, 2.0, 11.0, 22.0]


def test_peaks_follow_from_the_order_alone() -> None:
    costs = StageCosts(
        forward_s=1.0,
        backward_s=1.0,
        recompute_s=1.0,
        static_bytes=1000,
        gradient_bytes=500,
        kept_bytes=10,
        recomputed_bytes=90,
        backward_peak_bytes=7,
        lazy_peak_bytes=30,
    )
    found = simulate_pipeline(order_of("1F1B", 3, 8), [costs] * 3)
    # Micro-batches in flight, one recomputed, gradients, the backward pass's own.
    assert found.peak_bytes == (
        1000 + 500 + 3 * 10 + 90 + 7,
        1000 + 500 + 2 * 10 + 90 + 7,
        1000 + 500 + 1 * 10 + 30,
    )


@pytest.mark.parametrize("stage", range(3))
def test_peaks_do_not_grow_with_the_micro_batches(stage: int) -> None:
    costs = [
        replace(
            COSTS, kept_bytes=10, input_bytes=3, output_bytes=3, recomputed_bytes=50
        )
    ] * 3
    peaks = {
        m: simulate_pipeline(order_of("1F1B", 3, m), costs).peak_bytes[stage]
        for m in (8, 64)
    }
    assert peaks[8] == peaks[64]


def test_bytes_come_back_to_where_they_began() -> None:
    costs = [
        replace(
            COSTS, kept_bytes=10, input_bytes=3, output_bytes=5, recomputed_bytes=50
        )
    ] * 3
    for name in ("GPipe", "1F1B"):
        order = order_of(name, 3, 6)
        held = PipelineRankBytes(order, costs, 1)
        for action in order.ranks[1]:
            held.run(action)
        # The last sends of both directions are under way.
        assert held.live_bytes == MOST_SENDS * (3 + 5)


def test_posting_a_transfer_keeps_the_rank_busy() -> None:
    costs = [StageCosts(forward_s=1.0, backward_s=1.0, transfer_s=0.25)] * 2
    found = simulate_pipeline(order_of("1F1B", 2, 1, checkpoint="never"), costs)
    # A forward and its send; a forward, a backward pass and its send; a backward pass.
    # Receives are posted while the other rank computes.
    assert found.step_s == 1 + 0.25 + 1 + 1 + 0.25 + 1


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_peak_is_known_for_any_costs_without_running_the_order(
    name: str, checkpoint: str, ahead: bool
) -> None:
    chance = random.Random(name + checkpoint)
    order = order_of(name, 3, 5, checkpoint=checkpoint, ahead=ahead)
    for stage in range(3):
        peak = PeakOfStage(order, stage)
        for _ in range(20):
            given = {f: chance.randint(0, 100) for f in PeakOfStage.FIELDS}
            costs = replace(COSTS, **given)
            held = PipelineRankBytes(order, [costs] * 3, stage)
            for action in order.ranks[stage]:
                held.run(action)
            assert peak.of(costs) == held.peak_bytes


def apart(n: int, m: int, checkpoint: str = "never") -> PipelineOrder:
    """Return GPipe with gradients of weights last, but for the first stage's."""
    order = order_of("GPipe", n, m, checkpoint=checkpoint)
    ranks = []
    for stage, actions in enumerate(order.ranks):
        found: list[PipelineAction] = []
        for action in actions:
            if action.kind == "backward":
                found.append(action._replace(kind="backward_input"))
                if stage == 0:
                    found.append(action._replace(kind="backward_weight"))
            else:
                found.append(action)
        if stage:
            found += [PipelineAction("backward_weight", stage, i) for i in range(m)]
        ranks.append(tuple(found))
    return replace(order, ranks=tuple(ranks))


def test_backward_passes_taken_apart_shorten_the_bubble() -> None:
    n, m = 4, 4
    whole = simulate_pipeline(order_of("GPipe", n, m, checkpoint="never"), [PLAIN] * n)
    found = simulate_pipeline(apart(n, m), [PLAIN] * n)
    # The gradient reaches stage 0 after 7 forwards and 3 parts for the inputs.
    assert (whole.step_s, found.step_s) == (21.0, 7 + 3 + m * 2.0)
    busy = sum(e.end_s - e.start_s for e in found.events if e.action.kind in COMPUTES)
    assert busy == n * m * (PLAIN.forward_s + PLAIN.backward_s)


def test_what_two_part_backwards_recompute_stays_until_the_weights() -> None:
    costs = replace(COSTS, kept_bytes=1, recomputed_bytes=100)
    ahead = simulate_pipeline(apart(2, 3, "always"), [costs] * 2)
    assert ahead.peak_bytes == (3 * 1 + 100, 3 * 101)


def test_the_bubble_of_no_events_is_nothing() -> None:
    assert bubble([]) == 0.0


def test_ranks_that_would_wait_for_ever_are_refused() -> None:
    order = order_of("1F1B", 2, 2)
    without = tuple(a for a in order.ranks[0] if a.kind != "send_forward")
    stuck = replace(order, ranks=(without, order.ranks[1]))
    with pytest.raises(OptionError, match="rank 0 deadlocks: no rank sends"):
        simulate_pipeline(stuck, [COSTS] * 2)


def test_costs_for_other_stages_are_refused() -> None:
    with pytest.raises(OptionError, match="has 2 stages, and costs has 3 entries"):
        simulate_pipeline(order_of("1F1B", 2, 2), [COSTS] * 3)
