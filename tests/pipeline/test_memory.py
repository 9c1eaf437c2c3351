"""Bytes of a pipeline: flat in the micro-batches, as predicted, within budgets.

All cases run in one group of three processes; see `memory_ranks`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.pipeline.memory_ranks import (
    BUDGETS,
    QUICK_BUDGETS,
    QUICK_RUNS,
    RANKS,
    RUNS,
)
from tests.pipeline.shares import run_share

pytestmark = pytest.mark.distributed

Reports = list[dict[str, Any]]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    return run_share(request, tmp_path_factory, "memory_ranks.py", RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
def test_peaks_of_1f1b_are_flat_in_the_number_of_micro_batches(
    ranks: Reports, rank: int
) -> None:
    found = ranks[rank]["measured"]
    assert found["1F1B 64"] <= 1.10 * found["1F1B 8"]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(f"{name} {size}", marks=[slow] * (name not in QUICK_RUNS))
        for name, sizes in RUNS.items()
        for size in sizes
    ],
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_peaks_are_predicted_from_the_costs_of_another_step(
    ranks: Reports, rank: int, run: str
) -> None:
    measured, predicted = (ranks[rank][way][run] for way in ("measured", "predicted"))
    assert abs(predicted - measured) <= 0.02 * measured


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(number, marks=[slow] * (budget not in QUICK_BUDGETS))
        for number, budget in enumerate(BUDGETS)
    ],
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_plans_stay_within_the_budget_of_every_rank(
    ranks: Reports, rank: int, plan: int
) -> None:
    found = ranks[rank]["plans"][plan]
    assert found["peak"] <= found["budget"]
    assert found["predicted"] <= found["budget"]
    # Blocks were measured one by one: together they hold a little less.
    assert found["peak"] <= found["predicted"] <= 1.02 * found["peak"]
    assert sum(found["recomputed"]) > 0
