"""What ranks do together, seen from a group of one; several are in row C12."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import membudget as mb
from membudget._torch_accelerator import HOST
from membudget._torch_distributed import common_store
from membudget.planned import model_parameters
from membudget.planner.plan import RegionPlan
from membudget.ranks import Ranks, _packed, _unpacked

pytestmark = pytest.mark.distributed


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Make this process a group of its own."""
    method = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield Ranks(HOST)
    dist.destroy_process_group()


def test_a_model_that_one_process_trains_has_no_ranks(ranks: Ranks) -> None:
    assert Ranks.of(nn.Linear(2, 2), HOST) is None


def test_numbers_come_back_as_they_are(ranks: Ranks) -> None:
    large = (1 << 62) + 1  # More than a float holds.

    assert ranks.most([large, -3]) == [large, -3]
    assert ranks.slowest([0.1]) == [0.1]
    assert ranks.of_all("x") == ["x"]
    assert ranks.shared(lambda: {"a": 1}) == {"a": 1}


def test_an_error_of_rank_0_is_raised_on_all(ranks: Ranks) -> None:
    def refuse() -> None:
        raise mb.BudgetError("no", asked_bytes=1, least_bytes=2, before_bytes=0)

    with pytest.raises(mb.BudgetError, match=r"^no$") as caught:
        ranks.shared(refuse)
    assert caught.value.least_bytes == 2


def test_an_error_travels_with_its_attributes() -> None:
    error = mb.BudgetError("no", asked_bytes=1, least_bytes=2, before_bytes=0)
    with pytest.raises(TypeError, match="required keyword-only argument"):
        pickle.loads(pickle.dumps(error))

    found = _unpacked(_packed(error))

    assert (type(found), str(found)) == (mb.BudgetError, "no")
    assert vars(found) == vars(error)


def test_a_rank_that_fails_tells_why_and_raises_its_own_error(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"^mine") as caught, ranks.together("trying"):
        raise ValueError("mine")

    assert "rank 0 failed trying" in caught.value.__notes__[0]
    assert common_store().get("membudget/left") == b"0 ValueError: mine"


def test_a_reason_is_forgotten_when_its_rank_begins_anew(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"^mine"), ranks.together("trying"):
        raise ValueError("mine")

    again = Ranks(HOST)
    with (
        pytest.raises(KeyError, match="another") as caught,
        again.together("trying again"),
    ):
        raise KeyError("another")
    assert "rank 0 failed trying again" in caught.value.__notes__[0]
    assert common_store().get("membudget/left") == b"0 KeyError: 'another'"


def test_a_reason_of_another_rank_stays_when_one_begins_anew(ranks: Ranks) -> None:
    common_store().set("membudget/left", "3 MemoryError: full")
    Ranks(HOST)
    assert common_store().get("membudget/left") == b"3 MemoryError: full"


def test_a_rank_that_waited_raises_the_reason_of_the_other(ranks: Ranks) -> None:
    common_store().set("membudget/left", "3 MemoryError: full")

    refusal = r"rank 3 failed trying \(MemoryError: full\)"
    with pytest.raises(mb.RankError, match=refusal) as caught, ranks.together("trying"):
        raise RuntimeError("connection closed")
    assert caught.value.rank == 3
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_reason_that_went_with_its_rank_is_said_to_be_unknown(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr("membudget.ranks.common_store", gone)
    refusal = "another rank failed trying"
    with pytest.raises(mb.RankError, match=refusal) as caught, ranks.together("trying"):
        raise RuntimeError("connection closed")
    assert caught.value.rank is None


def test_a_plan_with_a_region_around_units_is_refused(ranks: Ranks) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 1))
    plan = mb.Plan(
        *("Sequential", model_parameters(model), 1, 1, 1, 1.0, 1.0, "cpu"),
        regions=(RegionPlan("0", 2, ()),),
    )
    fully_shard(model.get_submodule("0.0"))

    refusal = "a region on '0', inside of which fully_shard shards '0'"
    with pytest.raises(mb.PlanError, match=refusal):
        mb.apply(model, plan)
