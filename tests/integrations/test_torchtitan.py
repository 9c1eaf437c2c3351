"""A plan file under the protocol of torchtitan; tests/field has torchtitan's class."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import membudget as mb
from tests.integrations import titan_protocol
from tests.integrations.planned_layers import check_on_meta, check_planned, saved_plan

OURS = "membudget.integrations.torchtitan"
THEIRS = "torchtitan.distributed.activation_checkpoint"


def imported(monkeypatch: pytest.MonkeyPatch, theirs: ModuleType | None) -> Any:
    """Return our class, imported where torchtitan is this module, or is missing."""
    names = ["torchtitan", "torchtitan.distributed"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, theirs and ModuleType(name))
    monkeypatch.setitem(sys.modules, THEIRS, theirs)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    found = importlib.import_module(OURS)
    monkeypatch.delitem(sys.modules, OURS)
    return found.PlannedCheckpointing


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(monkeypatch, titan_protocol)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return saved_plan(tmp_path)


def test_a_plan_file_trains_as_without_under_the_trainers_protocol(policy, path):
    assert issubclass(policy, titan_protocol.ActivationCheckpointing)
    check_planned(policy, path)


def test_a_plan_file_is_applied_before_the_parameters_have_memory(policy, path):
    check_on_meta(policy, path)


def test_a_plan_of_another_model_is_refused(policy, path):
    built = policy.Config(plan=path).build(dump_folder="")
    with pytest.raises(mb.PlanError, match="with other parameters than this Linear"):
        built.apply(nn.Linear(2, 2))


def test_no_plan_is_refused(policy):
    with pytest.raises(mb.OptionError, match="needs a plan: give Config"):
        policy.Config().build(dump_folder="").apply(nn.Linear(2, 2))


def test_without_torchtitan_the_class_says_what_to_install(monkeypatch):
    policy = imported(monkeypatch, None)
    with pytest.raises(mb.MissingExtraError, match=r'install "membudget\[torchtitan'):
        policy.Config(plan="plan.json")


def test_the_library_is_imported_without_torchtitan():
    code = "import sys, membudget.loop; print('torchtitan' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
