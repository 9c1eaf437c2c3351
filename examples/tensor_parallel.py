"""Fit a tensor-parallel model: one plan for all ranks.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--quick]

Ranks share each matrix, and so the batch. A region that communicates is rerun as a
whole, with its collectives, on all ranks.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from together import device, main


def share(model: Any) -> Any:
    """Share the matrices of each block among the ranks."""
    mesh = init_device_mesh(device().type, (get_world_size(),))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    return model


if __name__ == "__main__":
    main(share, is_shared=True)
