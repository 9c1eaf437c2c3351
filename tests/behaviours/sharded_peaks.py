"""Row B2: profiled and measured bytes of sharded steps, in one process.

The group is torch's fake one, whose collectives return at once. With gloo, whose
threads release what they sent when they get to it, bytes differ from run to run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import membudget as mb
from tests.behaviours.sharded_models import DDP, WAYS, batch, sharded
from tests.faults.ranks import WORLD_SIZE


def bytes_of(way: str) -> dict[str, list[int]]:
    """Return pairs of profiled and measured bytes."""
    model, x = sharded(way), batch(0)
    optimizer = torch.optim.AdamW(model.parameters())
    found = mb.profile(model, x, optimizer=optimizer)

    def step() -> None:
        model(x).backward()
        optimizer.step()

    step()  # Makes the state.
    model.zero_grad()
    measured = mb.peak(step).peak_bytes
    state = [t for tensors in optimizer.state.values() for t in tensors.values()]
    static = found.graph.static
    return {
        "peak": [found.peak_bytes, measured],
        "parameters": [static.parameters, mb.storage_bytes(model.parameters())],
        "state": [static.optimizer, mb.storage_bytes(state)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    # The C++ code of DDP does not run on a fake group.
    report = {way: bytes_of(way) for way in WAYS if way != DDP}
    Path(sys.argv[1]).write_text(json.dumps(report))
