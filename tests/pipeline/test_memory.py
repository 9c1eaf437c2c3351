"""Bytes of a pipeline: flat in the micro-batches, as predicted, within budgets.

All cases run in one group of three processes; see `memory_ranks`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

from tests.faults.ranks import RunWanted

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.pipeline.memory_ranks import BUDGETS, RANKS, RUNS

pytestmark = pytest.mark.distributed

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(run_wanted: RunWanted) -> Reports:
    return run_wanted("memory_ranks.py", RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", ["1F1B"])
def test_peaks_of_1f1b_are_flat_in_the_number_of_micro_batches(
    ranks: Reports, case: str, rank: int
) -> None:
    few, many = ranks[rank]["measured"][case]
    assert RUNS[case] == (8, 64)
    assert many <= 1.10 * few


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", RUNS)
def test_peaks_are_predicted_from_the_costs_of_another_step(
    ranks: Reports, case: str, rank: int
) -> None:
    measured, predicted = (ranks[rank][way][case] for way in ("measured", "predicted"))
    for found, said in zip(measured, predicted, strict=True):
        assert abs(said - found) <= 0.02 * found


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", BUDGETS)
def test_plans_stay_within_the_budget_of_every_rank(
    ranks: Reports, case: str, rank: int
) -> None:
    found = ranks[rank]["plans"][case]
    assert found["peak"] <= found["budget"]
    assert found["predicted"] <= found["budget"]
    # Blocks were measured one by one: together they hold a little less.
    assert found["peak"] <= found["predicted"] <= 1.02 * found["peak"]
    assert sum(found["recomputed"]) > 0
