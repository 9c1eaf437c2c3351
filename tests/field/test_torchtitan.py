"""A plan file under torchtitan's own class of activation checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest

from membudget.integrations.torchtitan import PlannedCheckpointing
from tests.integrations.planned_layers import check_on_meta, check_planned, saved_plan

theirs = pytest.importorskip(
    "torchtitan.distributed.activation_checkpoint",
    reason="torchtitan is no part of the extra `field`: its models need triton",
)

pytestmark = [pytest.mark.field, pytest.mark.slow]


def test_a_plan_file_trains_as_without_under_torchtitan(tmp_path: Path):
    assert issubclass(PlannedCheckpointing, theirs.ActivationCheckpointing)
    check_planned(PlannedCheckpointing, saved_plan(tmp_path))


def test_a_plan_file_is_applied_before_the_parameters_have_memory(tmp_path: Path):
    check_on_meta(PlannedCheckpointing, saved_plan(tmp_path))
