"""One rank of row C12: the other runs out of memory while both fit a model.

The name of the folder says in which pass. The process of the rank that fails ends with
its report, as that of a script does with the error.
"""

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

import membudget as mb
from tests.behaviours.sharded_models import batch, sharded
from tests.faults.ranks import WORLD_SIZE

FAILING = 1
PASSES = {"forward": 1, "backward": 7}
"""In which call of the pass it fails: while recording, and while measuring."""


def fails_in(model: Any, name: str) -> None:
    """Let a pass of the second block run out of memory once."""
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == PASSES[name]:
            raise torch.OutOfMemoryError("this device has 0 bytes left")

    block = model.blocks[1]
    if name == "forward":
        block.register_forward_pre_hook(fail)
    else:  # Not a hook of the module, which would add operators.
        block.register_forward_hook(
            lambda *found: (found[2].register_hook(fail), None)[1]
        )


def outcome(rank: int, folder: Path) -> dict[str, Any]:
    """Fit, and report how that ends."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting-point'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=300),
    )
    model = sharded("FSDP2")
    if rank == FAILING:
        fails_in(model, folder.name)
    try:
        mb.fit(model, batch(rank), "70%")
    except RuntimeError as error:
        return {
            "kind": type(error).__name__,
            "text": "\n".join([str(error), *getattr(error, "__notes__", ())]),
            "rank": getattr(error, "rank", None),
        }
    return {"kind": "no error"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own_rank, place = int(sys.argv[1]), Path(sys.argv[2])
    found = outcome(own_rank, place)
    (place / f"report-{own_rank}.json").write_text(json.dumps(found))
    os._exit(0)  # As in `report_rank`.
