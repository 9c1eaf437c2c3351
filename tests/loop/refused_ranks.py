"""One rank of a loop in DistributedDataParallel whose other rank is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from tests.behaviours.sharded_models import Feeds, batch
from tests.faults.ranks import report_end, told

FAILING = 1


def outcome(rank: int, _: Path) -> dict[str, Any]:
    """Train under a budget that is too small for one rank; report how that ends."""
    model = DistributedDataParallel(Feeds())
    budget = "1%" if rank == FAILING else "1GiB"
    try:
        with mb.budget(model, budget):
            model(batch(rank)).backward()
    except (mb.BudgetError, RuntimeError) as error:
        return told(error)
    return {"kind": "no error", "text": ""}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report_end(outcome)
