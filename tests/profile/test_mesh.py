"""The step of one rank of a mesh is predicted in one process, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from tests.faults.ranks import ROOT

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.profile.mesh_peaks import CASES

Report = dict[str, Any]
distributed = pytest.mark.distributed
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    path = tmp_path_factory.mktemp("mesh") / "report.json"
    places = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mesh_peaks.py")), str(path)],
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Report] = json.loads(path.read_text())
    return found


@distributed
@every_case
@pytest.mark.parametrize("step", ["plain", "planned"])
def test_the_predicted_peak_of_a_rank_is_the_measured_one(
    reports: dict[str, Report], case: str, step: str
) -> None:
    predicted, measured = reports[case][step]

    assert predicted == measured > 0


@distributed
@every_case
def test_regions_lie_inside_of_what_fsdp_shards(
    reports: dict[str, Report], case: str
) -> None:
    regions = reports[case]["regions"]

    assert regions
    assert all(path.startswith("blocks.") for path in regions)


@distributed
@every_case
def test_the_kinds_of_bytes_add_up_to_the_peak(
    reports: dict[str, Report], case: str
) -> None:
    found = reports[case]
    kinds = found["kinds"]

    assert sum(kinds.values()) == found["total"]
    assert kinds["activations"] > found["total"] // 2
    is_gathered = "gathered parameters" in kinds
    assert is_gathered == (case != "tensor parallel")
    assert "this rank, at its peak" in found["report"]


@distributed
@every_case
def test_the_model_is_not_sharded_and_no_group_stays(
    reports: dict[str, Report], case: str
) -> None:
    assert reports[case]["untouched"]
    assert reports[case]["alone"]


class Blocks(nn.Sequential):
    """Two blocks, of which a plan names a style that does not exist."""

    tp_plan = {"*": "diagonal"}


@pytest.mark.parametrize(
    ("mesh", "options", "refusal"),
    [
        ({}, {}, r"mesh is the number of processes along each dimension.*got \{\}"),
        ({"dp_shard": 0}, {}, r"such as .*; got \{'dp_shard': 0\}"),
        ({"pp": 2}, {}, "nothing is known of the mesh's dimension 'pp'"),
        ({"dp_replicate": 2}, {}, "'dp_replicate' copies what 'dp_shard' shards"),
        ({"tp": 2}, {}, "Sequential has no tp_plan"),
        (
            {"dp_shard": 2},
            {"fake": False},
            "mesh= simulates processes that do not exist",
        ),
        (
            {"dp_shard": 2},
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "give its class, as in optimizer=SGD",
        ),
    ],
)
def test_a_mesh_of_which_nothing_is_known_is_refused(
    mesh: dict[str, int], options: dict[str, Any], refusal: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    with pytest.raises(mb.OptionError, match=refusal):
        mb.profile(model, torch.ones(2, 4), mesh=mesh, **options)


def test_a_step_function_is_refused_on_a_mesh() -> None:
    model = nn.Linear(4, 4)

    with pytest.raises(mb.OptionError, match="a step function calls the model itself"):
        mb.profile(lambda: None, modules=model, mesh={"dp_shard": 2})


@distributed
def test_an_unknown_style_is_refused_and_leaves_no_group() -> None:
    model = Blocks(nn.Linear(4, 4), nn.Linear(4, 4))

    with pytest.raises(mb.OptionError, match="the tp_plan names the style 'diagonal'"):
        mb.profile(model, torch.ones(2, 4), mesh={"tp": 2})
    assert not torch.distributed.is_initialized()
