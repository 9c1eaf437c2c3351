"""The orders of schedules, with their transfers."""

from __future__ import annotations

from collections import Counter

import pytest

from membudget.errors import OptionError
from membudget.pipeline import SCHEDULES, StageCosts, pipeline_order, simulate_pipeline
from membudget.planner.pipeline_order import PipelineOrder, is_sent

COSTS = StageCosts(forward_s=1.0, backward_s=2.0, recompute_s=1.0)
schedules = pytest.mark.parametrize("name", SCHEDULES)


def order(name: str, micro_batches: int = 6, **options: object) -> PipelineOrder:
    stages = 1 if name in ("GPipe", "1F1B") else 2
    return pipeline_order(
        name,
        ranks=3,
        micro_batches=micro_batches,
        stages_per_rank=stages,
        **options,  # type: ignore[arg-type]
    )


@schedules
def test_every_transfer_has_both_its_ends(name: str) -> None:
    made = order(name)
    counts = Counter(a for actions in made.ranks for a in actions)
    for stage in range(made.stages):
        crosses = is_sent(made.rank_of, stage, stage + 1)
        for number in range(made.micro_batches):
            expected = {
                ("send_forward", stage): crosses,
                ("receive_forward", stage + 1): crosses,
                ("send_backward", stage + 1): crosses,
                ("receive_backward", stage): crosses,
            }
            for (kind, at), times in expected.items():
                assert counts[kind, at, number] == times  # type: ignore[index]


@schedules
@pytest.mark.parametrize("ahead", [False, True])
def test_no_rank_waits_for_ever(name: str, ahead: bool) -> None:
    made = order(name, ahead=ahead)
    found = simulate_pipeline(made, [COSTS] * made.stages, latency_s=0.3)
    assert found.step_s > 0


@schedules
def test_recomputing_ahead_is_never_slower_in_the_simulation(name: str) -> None:
    costs = [COSTS] * order(name).stages
    for latency_s in (0.0, 0.5, 1.0):
        ahead, lazily = (
            simulate_pipeline(order(name, ahead=way), costs, latency_s=latency_s)
            for way in (True, False)
        )
        assert ahead.step_s <= lazily.step_s


def test_v_schedules_put_the_first_and_the_last_stage_on_one_rank() -> None:
    assert order("ZBVZeroBubble").rank_of == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(OptionError, match=r"schedule is one of 'GPipe'.*got '2F2B'"):
        pipeline_order("2F2B", ranks=2, micro_batches=2)


def test_numbers_that_a_schedule_does_not_take_are_refused() -> None:
    with pytest.raises(OptionError, match="DualPipeV does not exist for 3 ranks of 2"):
        order("DualPipeV", micro_batches=2)


def test_several_stages_per_rank_need_an_interleaved_schedule() -> None:
    with pytest.raises(OptionError, match="1F1B has one stage per rank, not 2"):
        pipeline_order("1F1B", ranks=2, micro_batches=2, stages_per_rank=2)


@pytest.mark.parametrize("number", [0, -1, True, 1.5])
def test_numbers_are_whole_and_positive(number: int) -> None:
    with pytest.raises(OptionError, match="micro_batches is a whole number from 1"):
        pipeline_order("1F1B", ranks=2, micro_batches=number)
