"""Fit a model that `fully_shard` shards: one plan for all ranks.

    torchrun --nproc-per-node 2 examples/fsdp.py [--quick]

Each block is a unit, and the plan's regions lie inside of the units, so that FSDP
gathers parameters no more often than without a plan.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard

from together import main


def shard(model: Any) -> Any:
    """Shard each block, and what is left."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


if __name__ == "__main__":
    main(shard)
