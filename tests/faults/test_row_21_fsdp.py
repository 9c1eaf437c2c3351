"""Row 21: extra all-gathers, and modules left unsharded, under FSDP.

A sharded block gathers its parameters before its forward and before its backward. A
recompute that goes through the module's hooks may gather once more, and one that does
not may find freed parameters. FSDP2 with torch's checkpoint gathers no more than
without; neither may ours, whichever of the two is put on the model first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.fsdp_ranks import BLOCKS, MODELS
from tests.faults.implementations import torch_fails
from tests.faults.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not torch.distributed.is_available(),
        reason="torch was built without distributed",
    ),
]

# For each model its all-gathers in one step, and the gradients of this rank's shards.
Report = dict[str, tuple[int, Any]]
every_order = pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("plain", "torch")]
)
every_reshard = pytest.mark.parametrize("reshard", [True, False])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    script = Path(__file__).with_name("fsdp_ranks.py")
    return run_ranks(script, tmp_path_factory.mktemp("fsdp"))


@every_order
@every_reshard
def test_row21_regions_gather_no_more_than_plain(
    ranks: list[Report], name: str, reshard: bool
) -> None:
    for report in ranks:
        found, gradients = report[f"{name}, reshard={reshard}"]

        assert found == report[f"plain, reshard={reshard}"][0], gradients
        assert found == (2 * BLOCKS if reshard else BLOCKS)


@every_order
@every_reshard
def test_row21_gradients_of_shards_equal_plain(
    ranks: list[Report], name: str, reshard: bool
) -> None:
    for report in ranks:
        found = report[f"{name}, reshard={reshard}"][1]

        assert found == report[f"plain, reshard={reshard}"][1]


@torch_fails
@every_reshard
def test_row21_torch_gathers_no_more_either(ranks: list[Report], reshard: bool) -> None:
    for report in ranks:
        assert (
            report[f"torch, reshard={reshard}"] == report[f"plain, reshard={reshard}"]
        )
