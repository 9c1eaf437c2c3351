"""Row B2: models sharded by DDP, FSDP and tensor parallelism, on every rank.

The cases of all ways run in one pair of processes, see `sharded_ranks`; the bytes in
one process, see `sharded_peaks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tests.faults.ranks import ROOT, RunWanted

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.behaviours.sharded_models import DDP, WAYS
from tests.behaviours.sharded_ranks import REGIONS, USES

pytestmark = pytest.mark.distributed

Report = dict[str, dict[str, str]]
every_way = pytest.mark.parametrize("way", WAYS)
every_sharded_way = pytest.mark.parametrize("way", [way for way in WAYS if way != DDP])


@pytest.fixture(scope="module")
def ranks(run_wanted: RunWanted) -> list[Report]:
    return run_wanted("sharded_ranks.py")


@pytest.fixture(scope="module")
def peaks(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, tuple[int, int]]]:
    script = Path(__file__).with_name("sharded_peaks.py")
    report = tmp_path_factory.mktemp("peaks") / "report.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ran = subprocess.run(
        [sys.executable, str(script), str(report)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, dict[str, tuple[int, int]]] = json.loads(report.read_text())
    return found


@every_way
@pytest.mark.parametrize("use", [u for u in USES if u not in ("fit", "fake profile")])
def test_row_b02_a_sharded_model_can_be_profiled_and_audited(
    ranks: list[Report], way: str, use: str
) -> None:
    assert [report[way][use] for report in ranks] == ["right"] * 2


@every_way
@pytest.mark.parametrize("use", REGIONS)
def test_row_b02_regions_on_a_sharded_model_train_as_without(
    ranks: list[Report], way: str, use: str
) -> None:
    assert [report[way][use] for report in ranks] == ["right"] * 2


@every_way
@pytest.mark.parametrize("use", USES)
def test_row_b02_a_sharded_model_trains_afterwards_as_before(
    ranks: list[Report], way: str, use: str
) -> None:
    found = [report[way][f"trained after {use}"] for report in ranks]

    assert found == ["right"] * 2


@every_way
def test_row_b02_all_ranks_fit_a_sharded_model_together(
    ranks: list[Report], way: str
) -> None:
    for report in ranks:
        found = report[way]["fit"]

        if "FSDP1" in way:
            assert found.startswith("OptionError: FullyShardedDataParallel flattens")
            assert "shard by fully_shard" in found
            assert "apply(model, blocks=Block)" in found
        else:
            assert found == "right"


@pytest.mark.parametrize("what", ["fitted", "planned"])
def test_row_b02_what_ddp_wraps_can_be_fitted_and_trains_as_without(
    ranks: list[Report], what: str
) -> None:
    for name in (what, f"trained {what}"):
        assert [report[DDP][name] for report in ranks] == ["right"] * 2


@every_way
def test_row_b02_a_fake_profile_under_a_wrapper_says_what_to_do(
    ranks: list[Report], way: str
) -> None:
    for report in ranks:
        found = report[way]["fake profile"]

        if "FSDP" in way or way == DDP:
            assert found.startswith("OptionError: ")
            assert "pass fake=False" in found
        else:
            assert found == "right"


@every_sharded_way
@pytest.mark.parametrize("of", ["peak", "parameters", "state"])
def test_row_b02_profiled_bytes_are_the_measured_ones_of_this_rank(
    peaks: dict[str, dict[str, tuple[int, int]]], way: str, of: str
) -> None:
    profiled, measured = peaks[way][of]

    assert profiled == measured > 0
