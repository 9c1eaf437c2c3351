"""Models of one process are not taken for several's; the others are in row B2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from membudget.sharding import check_replaceable, replicas_of, sharding_of


def test_a_model_of_one_process_is_not_sharded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    assert sharding_of(model) is None
    assert replicas_of(model) == 1
    check_replaceable(model)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Make this process a group of its own."""
    method = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.usefixtures("process_group")
def test_a_model_in_ddp_is_fitted_where_it_has_one_process() -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    x = torch.randn(256, 16)

    assert replicas_of(model) == 1
    with mb.fit(model, x, "60%") as fitted:
        assert fitted.plan.regions
        assert fitted.audit().equal
