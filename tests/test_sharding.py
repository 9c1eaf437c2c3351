"""Models of one process are not taken for sharded ones; the others are in row B2."""

from __future__ import annotations

from torch import nn

from membudget.sharding import check_replaceable, sharding_of


def test_a_model_of_one_process_is_not_sharded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    assert sharding_of(model) is None
    check_replaceable(model)
