"""One rank of a loop in DistributedDataParallel whose other rank is refused."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from tests.behaviours.sharded_models import Feeds, batch
from tests.faults.ranks import WORLD_SIZE

FAILING = 1


def outcome(rank: int, folder: Path) -> dict[str, Any]:
    """Train under a budget that is too small for one rank; report how that ends."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting-point'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=300),
    )
    model = DistributedDataParallel(Feeds())
    budget = "1%" if rank == FAILING else "1GiB"
    try:
        with mb.budget(model, budget):
            model(batch(rank)).backward()
    except (mb.BudgetError, RuntimeError) as error:
        notes = getattr(error, "__notes__", ())
        return {"kind": type(error).__name__, "text": "\n".join([str(error), *notes])}
    return {"kind": "no error", "text": ""}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own_rank, place = int(sys.argv[1]), Path(sys.argv[2])
    found = outcome(own_rank, place)
    (place / f"report-{own_rank}.json").write_text(json.dumps(found))
    os._exit(0)  # As in `report_rank`; the other rank waits for this.
