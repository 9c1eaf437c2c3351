"""A loop in DDP or of shards: each rank plans for itself, and none waits.

All cases run in one pair of processes, see `budget_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.ranks import RunWanted, run_ranks

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.loop.budget_ranks import CASES, STEPS
from tests.loop.refused_ranks import FAILING

pytestmark = pytest.mark.distributed
every_case = pytest.mark.parametrize("case", CASES)

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(run_wanted: RunWanted) -> Reports:
    return run_wanted("budget_ranks.py")


@every_case
def test_each_rank_computes_the_bits_of_the_plain_loop(
    ranks: Reports, case: str
) -> None:
    for report in ranks:
        assert report["cases"][case]["equal"]
        assert report["cases"][case]["recomputes"]
        assert report["cases"][case]["uses"] >= STEPS


@every_case
def test_each_rank_keeps_its_own_budget(ranks: Reports, case: str) -> None:
    for report in ranks:
        found = report["cases"][case]
        assert 0 < found["peak"] <= found["limit"]
    first, other = (report["cases"][case]["limit"] for report in ranks)
    assert other > 1.2 * first


@every_case
def test_a_budget_communicates_nothing(ranks: Reports, case: str) -> None:
    for report in ranks:
        plain, planned = report["cases"][case]["collectives"]
        assert plain == planned


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("FSDP1", "FSDP shards the parameters of"),
        ("tensor parallel", "no longer match and the ranks would deadlock"),
        ("FSDP2 and tensor parallel", "sharded along several dimensions"),
        ("copied", "sharded along several dimensions"),
        ("half", "call fully_shard(model), too, after its blocks"),
        (
            "integers",
            "Longest waits for other ranks in its forward, or sends them integers",
        ),
        ("part", "is part of a model that fully_shard shards"),
        ("step", "2 ranks train the model together. step() would"),
    ],
)
def test_what_would_wait_for_other_ranks_is_refused_on_all(
    ranks: Reports, name: str, refusal: str
) -> None:
    for report in ranks:
        assert refusal in report["refusals"][name]


def test_no_rank_alone_runs_a_micro_batch_again_for_which_memory_ran_out(
    ranks: Reports,
) -> None:
    for report in ranks:
        assert report["out of memory"]["runs"] == 1
        assert "2 ranks train the model together" in report["out of memory"]["notes"]
        assert "step()" not in report["out of memory"]["notes"]


def test_a_rank_that_is_refused_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    reports = run_ranks(Path(__file__).with_name("refused_ranks.py"), tmp_path)
    refused, waiting = reports[FAILING], reports[1 - FAILING]

    assert refused["kind"] == "BudgetError"
    assert "no plan fits" in refused["text"]
    assert "the other ranks wait for this one" in refused["text"]
    assert waiting["kind"] != "no error"
    assert f"rank {FAILING} left before: BudgetError: " in waiting["text"]
    assert "start the processes again" in waiting["text"]
