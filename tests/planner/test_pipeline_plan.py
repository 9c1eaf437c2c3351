"""Where a pipeline recomputes, and which stage gets which blocks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from membudget.errors import BudgetError, OptionError
from membudget.planner.pipeline_costs import BlockOfPipeline
from membudget.planner.pipeline_cuts import StageCuts
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder
from membudget.planner.pipeline_plan import plan_pipeline
from tests.planner.pipelines import order_of

BLOCK = BlockOfPipeline(
    forward_s=1.0, backward_s=2.0, saved_bytes=100, kept_bytes=5, working_bytes=20
)


def test_without_a_need_nothing_is_recomputed_and_stages_are_equal() -> None:
    plan = plan_pipeline(order_of("1F1B", 4, 8), [BLOCK] * 32, 10**9)
    assert plan.sizes == (8, 8, 8, 8)
    assert plan.recomputed == ((),) * 4
    assert plan.checkpoint == ("never",) * 4
    assert plan.equal is not None
    assert plan.equal.step_s == plan.simulation.step_s


@pytest.mark.parametrize("budget_bytes", [1400, 2000, 2500, 3000])
def test_stages_recompute_by_depth_and_fit(budget_bytes: int) -> None:
    plan = plan_pipeline(order_of("1F1B", 4, 16), [BLOCK] * 32, budget_bytes)
    counts = [len(chosen) for chosen in plan.recomputed]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert max(plan.simulation.peak_bytes) <= budget_bytes
    assert sum(plan.sizes) == 32


def test_depth_and_partition_beat_recomputing_everywhere_by_a_tenth() -> None:
    plan = plan_pipeline(order_of("1F1B", 4, 16), [BLOCK] * 32, 2000)
    assert plan.everywhere.step_s / plan.simulation.step_s > 1.10
    assert plan.equal is not None
    assert plan.equal.step_s > plan.simulation.step_s


def unequal(seed: int, count: int) -> list[BlockOfPipeline]:
    chance = random.Random(seed)
    return [
        BlockOfPipeline(
            forward_s=chance.randint(1, 4),
            backward_s=chance.randint(2, 8),
            saved_bytes=chance.randint(50, 150),
            kept_bytes=chance.randint(1, 20),
            static_bytes=chance.randint(0, 50),
            gradient_bytes=chance.randint(0, 50),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_small_chains_are_near_the_fastest_cut(seed: int) -> None:
    blocks, stages, budget_bytes = unequal(seed, 8), 3, 900
    order = order_of("1F1B", stages, 6)
    plan = plan_pipeline(order, blocks, budget_bytes)
    cuts = StageCuts(order, blocks, [budget_bytes] * stages, 0.0)
    sizes = itertools.product(range(1, 7), repeat=stages)
    fastest_s = min(
        cuts.simulated(cut, cuts.recomputed(cut)).step_s
        for cut in sizes
        if sum(cut) == len(blocks) and cuts.fits(cut)
    )
    assert fastest_s <= plan.simulation.step_s <= fastest_s * 1.05
    assert max(plan.simulation.peak_bytes) <= budget_bytes


def test_each_rank_may_have_a_budget_of_its_own() -> None:
    free = plan_pipeline(order_of("1F1B", 2, 4), [BLOCK] * 4, 10**6)
    most = free.simulation.peak_bytes
    plan = plan_pipeline(order_of("1F1B", 2, 4), [BLOCK] * 4, [most[0] - 1, most[1]])
    assert plan.simulation.peak_bytes[0] < most[0]
    assert plan.recomputed[0]
    assert not plan.recomputed[1]


def test_where_budgets_are_tight_backward_passes_recompute() -> None:
    order = order_of("1F1B", 4, 16)
    with pytest.raises(BudgetError, match="no cut of the 32 blocks") as error:
        plan_pipeline(order, [BLOCK] * 32, 150)
    tight, loose = (
        plan_pipeline(order, [BLOCK] * 32, budget_bytes)
        for budget_bytes in (error.value.least_bytes, 2000)
    )
    assert (tight.ahead, loose.ahead) == (False, True)
    assert tight.order.recomputed_ahead == frozenset()


def test_transfers_have_the_bytes_of_the_blocks_at_the_cuts() -> None:
    sizes = [1, 2, 3, 4]
    blocks = [
        replace(BLOCK, input_bytes=1000 * size, output_bytes=1000 * (size + 1))
        for size in sizes
    ]
    plan = plan_pipeline(order_of("GPipe", 2, 1), blocks, 10**9)
    without = plan_pipeline(order_of("GPipe", 2, 1), [BLOCK] * 4, 10**9)
    assert plan.sizes == (2, 2)
    added = map(int.__sub__, plan.simulation.peak_bytes, without.simulation.peak_bytes)
    # The first receives the gradient of its output, the second its input.
    assert [*added] == [3000, 3000]


def test_balanced_stages_are_even_in_seconds_and_not_in_blocks() -> None:
    blocks = [replace(BLOCK, forward_s=seconds) for seconds in (12.0, 1.0, 1.0, 1.0)]
    plan = plan_pipeline(order_of("1F1B", 2, 4), blocks, 10**9)
    assert plan.plain_sizes == plan.sizes == (1, 3)
    assert plan.plain.step_s == plan.simulation.step_s
    assert plan.equal is not None
    assert plan.equal.step_s > plan.simulation.step_s


def test_a_plan_prints_its_stages_and_the_other_ways_beside_it() -> None:
    text = str(plan_pipeline(order_of("1F1B", 4, 16), [BLOCK] * 32, 2000))
    assert "in flight" in text
    assert "equal stages, recomputed by depth: x1.0" in text
    assert "equal stages, all recomputed: x1.1" in text


def test_budgets_that_nothing_fits_are_refused_with_what_would() -> None:
    order = order_of("1F1B", 4, 16)
    with pytest.raises(
        BudgetError, match=r"needs .* on stage 2, .*; its budget is 150"
    ) as error:
        plan_pipeline(order, [BLOCK] * 32, 150)
    plan = plan_pipeline(order, [BLOCK] * 32, error.value.least_bytes)
    assert max(plan.simulation.peak_bytes) <= error.value.least_bytes


def test_several_stages_on_a_rank_are_refused() -> None:
    actions = tuple(PipelineAction("forward", stage, 0) for stage in range(2))
    order = PipelineOrder("both", (actions,), 1, ("never", "never"))
    with pytest.raises(OptionError, match="one stage per rank; both has 2 stages on 1"):
        plan_pipeline(order, [BLOCK] * 2, 100)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(
        OptionError, match="4 stages need at least as many blocks; the chain has 3"
    ):
        plan_pipeline(order_of("1F1B", 4, 4), [BLOCK] * 3, 100)


def test_budgets_for_other_ranks_are_refused() -> None:
    with pytest.raises(OptionError, match="names 3 ranks, and the order has 4"):
        plan_pipeline(order_of("1F1B", 4, 4), [BLOCK] * 4, [100, 100, 100])
