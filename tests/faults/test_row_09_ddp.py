"""Row 9: "marked ready only once" under DistributedDataParallel.

The backward inside a reentrant region fires the hooks of DDP at a time at which DDP
does not expect them, if parameters are searched for use or a module runs twice. The
matrix is {reentrant} x {module reused} x {find_unused_parameters} x {static_graph}, two
steps each, on two processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

from tests.faults.ddp_ranks import CASES
from tests.faults.implementations import torch_fails
from tests.faults.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not torch.distributed.is_available(),
        reason="torch was built without distributed",
    ),
]

Outcomes = dict[str, list[str]]
KNOWN_TO_FAIL = [
    (reentrant, reused, unused, static)
    for reentrant, reused, unused, static in CASES
    if reentrant and (reused or unused) and not static
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    script = Path(__file__).with_name("ddp_ranks.py")
    return run_ranks(script, tmp_path_factory.mktemp("ddp"))


def failing(outcomes: list[str]) -> list[tuple[bool, ...]]:
    return [c for c, found in zip(CASES, outcomes, strict=True) if found != "equal"]


def test_row09_regions_equal_plain_under_ddp(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        assert not [case for case in failing(outcomes["ours"]) if not case[0]]


def test_row09_reentrant_regions_never_differ_silently(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        assert "differs" not in outcomes["ours"]
        assert set(failing(outcomes["ours"])) <= set(KNOWN_TO_FAIL)


@torch_fails
def test_row09_torch_reentrant_fails_three_of_sixteen(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        assert failing(outcomes["torch"]) == KNOWN_TO_FAIL
        assert sum("marked" in found for found in outcomes["torch"]) == 3
