"""One rank of row C12: the other runs out of memory while both fit a model.

The name of the folder says in which pass. The process of the rank that fails ends with
its report, as that of a script does with the error.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import membudget as mb
from tests.behaviours.sharded_models import batch, sharded
from tests.faults.ranks import report_end, told
from tests.situations import Notes

FAILING = 1
PASSES = {"forward": 1, "backward": 7}
"""In which call of the pass it fails: while recording, and while measuring."""


def fails_in(model: Any, name: str) -> None:
    """Let a pass of the second block run out of memory once."""
    calls = Notes()

    def fail(*_: Any) -> None:
        calls(name)
        if len(calls.items) == PASSES[name]:
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
    model = sharded("FSDP2")
    if rank == FAILING:
        fails_in(model, folder.name)
    try:
        mb.fit(model, batch(rank), "70%")
    except RuntimeError as error:
        return {**told(error), "rank": getattr(error, "rank", None)}
    return {"kind": "no error"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report_end(outcome)
