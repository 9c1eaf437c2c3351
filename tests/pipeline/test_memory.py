"""Bytes of a pipeline: flat in the micro-batches, as predicted, within budgets.

All cases run in one group of four processes; see `memory_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.ranks import run_ranks

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.pipeline.memory_ranks import RANKS, SHARES

pytestmark = pytest.mark.distributed

Reports = list[dict[str, Any]]
RUNS = ("1F1B 8", "1F1B 64", "GPipe 8", "GPipe 16")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    script = Path(__file__).with_name("memory_ranks.py")
    return run_ranks(script, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
def test_peaks_of_1f1b_are_flat_in_the_number_of_micro_batches(
    ranks: Reports, rank: int
) -> None:
    found = ranks[rank]["measured"]
    assert found["1F1B 64"] <= 1.10 * found["1F1B 8"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_peaks_are_predicted_from_the_costs_of_another_step(
    ranks: Reports, rank: int, run: str
) -> None:
    measured, predicted = (ranks[rank][way][run] for way in ("measured", "predicted"))
    assert abs(predicted - measured) <= 0.02 * measured


@pytest.mark.parametrize("plan", range(len(SHARES)))
@pytest.mark.parametrize("rank", range(RANKS))
def test_plans_stay_within_the_budget_of_every_rank(
    ranks: Reports, rank: int, plan: int
) -> None:
    found = ranks[rank]["plans"][plan]
    assert found["peak"] <= found["budget"]
    assert found["predicted"] <= found["budget"]
    assert sum(found["recomputed"]) > 0
