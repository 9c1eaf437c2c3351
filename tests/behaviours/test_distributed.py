"""Behaviours 138-141: regions under DistributedDataParallel and FSDP2.

All cases run in one pair of processes; see `distributed_ranks`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

from tests.faults.ranks import run_ranks

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.behaviours.distributed_ranks import CASES

pytestmark = pytest.mark.distributed

Outcomes = dict[str, str]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    script = Path(__file__).with_name("distributed_ranks.py")
    return run_ranks(script, tmp_path_factory.mktemp("ranks"))


def cases(number: int) -> pytest.MarkDecorator:
    """Run a test for each case of one behaviour."""
    names = [name for name in CASES if name.startswith(str(number))]
    return pytest.mark.parametrize("name", names)


def assert_equal(ranks: list[Outcomes], name: str) -> None:
    assert [outcomes[name] for outcomes in ranks] == ["equal"] * 2


@cases(138)
def test_b138_a_layer_in_a_region_equals_plain_under_ddp(
    ranks: list[Outcomes], name: str
) -> None:
    assert_equal(ranks, name)


@cases(139)
def test_b139_a_layer_used_twice_or_not_at_all_equals_plain_under_ddp(
    ranks: list[Outcomes], name: str
) -> None:
    assert_equal(ranks, name)


@cases(140)
def test_b140_shared_weights_equal_plain_under_ddp(
    ranks: list[Outcomes], name: str
) -> None:
    assert_equal(ranks, name)


@cases(141)
def test_b141_regions_and_offloading_equal_plain_under_fsdp(
    ranks: list[Outcomes], name: str
) -> None:
    assert_equal(ranks, name)
