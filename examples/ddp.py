"""Fit a model in DistributedDataParallel: one plan for all ranks.

    torchrun --nproc-per-node 2 examples/ddp.py [--quick]

Each rank prints whether its gradients are those of the plain step, rank 0 the report.
On GPUs it runs unchanged: ranks then talk by NCCL, else by gloo.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from together import main


def wrap(model: nn.Module) -> nn.Module:
    """Wrap a model, so that all ranks average its gradients."""
    return DistributedDataParallel(model)


if __name__ == "__main__":
    main(wrap)
