"""Every schedule with checkpointing equals itself without, and recomputes once.

All cases run in one pair of processes; see `schedule_ranks`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

from tests.faults.ranks import RunWanted

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from membudget.pipeline import SCHEDULES
from tests.pipeline.schedule_ranks import BLOCKS, MICRO_BATCHES, WAYS

pytestmark = pytest.mark.distributed

TAKEN_APART = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

Reports = list[dict[str, Any]]
schedules = pytest.mark.parametrize("name", SCHEDULES)
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def ranks(run_wanted: RunWanted) -> Reports:
    return run_wanted("schedule_ranks.py")


@schedules
@ways
def test_a_schedule_equals_itself_without_checkpointing(
    ranks: Reports, name: str, way: str
) -> None:
    assert [report[name][way]["equal"] for report in ranks] == [True, True]


@schedules
@ways
def test_each_region_is_recomputed_once_per_micro_batch(
    ranks: Reports, name: str, way: str
) -> None:
    dropped = MICRO_BATCHES - (way == "all but the last")
    for report in ranks:
        found = report[name][way]["recomputes"]
        assert found == [dropped] * (BLOCKS // 2)


@schedules
@pytest.mark.parametrize("way", ["rerun ahead", "replay ahead"])
def test_a_recompute_stands_right_before_the_backward_it_serves(
    ranks: Reports, name: str, way: str
) -> None:
    for report in ranks:
        kinds = [k for k in report[name][way]["kinds"] if k != "wait"]
        following = [kinds[i + 1] for i, k in enumerate(kinds) if k == "recompute"]
        assert set(following) <= {"backward", "backward_input"}
        assert len(following) <= MICRO_BATCHES * 2
    assert "recompute" in ranks[0][name][way]["kinds"]


@schedules
@pytest.mark.parametrize("way", ["rerun lazily", "replay lazily"])
def test_nothing_is_recomputed_ahead_if_lazily_is_asked(
    ranks: Reports, name: str, way: str
) -> None:
    for report in ranks:
        assert "recompute" not in report[name][way]["kinds"]


@pytest.mark.parametrize("name", TAKEN_APART)
@ways
def test_zero_bubble_schedules_take_backward_passes_apart(
    ranks: Reports, name: str, way: str
) -> None:
    for report in ranks:
        kinds = report[name][way]["kinds"]
        assert kinds.count("backward_input") == kinds.count("backward_weight") > 0


@schedules
@ways
def test_events_and_costs_of_all_ranks_are_gathered(
    ranks: Reports, name: str, way: str
) -> None:
    lengths = [len(report[name][way]["kinds"]) for report in ranks]
    assert [r[name][way]["gathered"] for r in ranks] == [sum(lengths)] * 2
    stages = 2 if name in ("GPipe", "1F1B") else 4
    assert [r[name][way]["costs"] for r in ranks] == [stages] * 2
