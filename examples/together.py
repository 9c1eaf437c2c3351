"""What the examples for several ranks share: a model, its data, and the comparison."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int) -> None:
        """Create the matrices."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes to its input."""
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Model(nn.Module):
    """Blocks in a row; the output is the loss."""

    def __init__(self, width: int, depth: int) -> None:
        """Create the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def device() -> torch.device:
    """Return this rank's device, an accelerator's if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        return torch.empty(0, device=torch.accelerator.current_accelerator()).device
    return torch.device("cpu")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a step from one random state, and return this rank's gradients."""
    torch.manual_seed(7)
    model.zero_grad()
    model(x).backward()
    found: list[Any] = [p.grad for p in model.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in found]


def main(wrap: Callable[[nn.Module], nn.Module], is_shared: bool = False) -> None:
    """Fit on all ranks, and compare with the plain step; exit with 1 if a bit differs.

    Args:
        wrap: Wraps or shards the model.
        is_shared: Whether all ranks get the same batch.
    """
    torch.set_num_threads(1)
    dist.init_process_group()
    rank = dist.get_rank()
    width, count = (32, 64) if "--quick" in sys.argv else (256, 512)
    torch.manual_seed(0)
    model = wrap(Model(width, 6).to(device()))
    torch.manual_seed(0 if is_shared else rank)
    x = torch.randn(count, 16, width, device=device())
    plain = gradients(model, x)
    model.zero_grad()
    fitted = mb.fit(model, x, "60%")
    is_equal = all(map(torch.equal, gradients(model, x), plain))
    if rank == 0:
        print(fitted.report())
    how = "equal" if is_equal else "NOT equal"
    print(f"rank {rank}: the gradients are {how} to the plain step's, bit for bit")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if is_equal else 1)  # Gloo's threads may abort in the teardown.


if __name__ == "__main__":
    print(__doc__)
