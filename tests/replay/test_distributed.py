"""Replay regions under DistributedDataParallel, FSDP2 and tensor parallel.

Under FSDP a region meets parameters whose memory is freed when a layer's forward has
ended, and filled again before its backward; under tensor parallel, operators on
DTensors that communicate. All cases run in one pair of processes; see
`distributed_ranks`.
"""

from __future__ import annotations

import pytest
import torch.distributed

from tests.faults.ranks import RunWanted

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.replay.distributed_ranks import WAYS

pytestmark = pytest.mark.distributed

# By case, by the options of the regions.
Outcomes = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def ranks(run_wanted: RunWanted) -> list[Outcomes]:
    return run_wanted("distributed_ranks.py")


def cases(is_count: bool) -> pytest.MarkDecorator:
    """Run a test for each case, with each of its options."""
    pairs = [
        (case, way)
        for case, ways in WAYS.items()
        for way in ways
        if ("gathers" in case) is is_count
    ]
    return pytest.mark.parametrize(("case", "options"), pairs)


@cases(False)
def test_training_on_two_ranks_equals_training_without_regions(
    ranks: list[Outcomes], case: str, options: str
) -> None:
    assert [outcomes[case][options] for outcomes in ranks] == ["equal"] * 2


@cases(True)
def test_a_replay_gathers_no_parameters(
    ranks: list[Outcomes], case: str, options: str
) -> None:
    assert [outcomes[case][options] for outcomes in ranks] == ["equal"] * 2
