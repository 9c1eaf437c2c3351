"""What the tests of pipelines train: blocks with dropout, and a step of a schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membudget.pipeline import PipelineSchedule

WIDTH = 8


class Block(nn.Module):
    """A block with dropout, whose weights and inputs need each other's activations."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        y: Tensor = x + self.dropout(self.down(hidden))
        return y


def chain(blocks: int, width: int = WIDTH) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(width) for _ in range(blocks)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    # `mse_loss` returns a number in a storage of its input's size.
    return (output - target).square().mean()


def run_step(
    schedule: PipelineSchedule, step: int = 0, rows: int = 1, **options: Any
) -> list[Tensor]:
    """Run a step from a known random stream; return losses, gradients and the stream.

    Args:
        schedule: What runs; the first stage gets the batch.
        step: Number of the step, which seeds its dropout.
        rows: Rows of a micro-batch.
        **options: Options of `schedule.step`.
    """
    width = next(schedule.stages[0].submod.parameters()).shape[-1]
    generator = torch.Generator().manual_seed(step)
    shape = (rows * schedule.order.micro_batches, width)
    x, target = (torch.randn(shape, generator=generator) for _ in range(2))
    for stage in schedule.stages:
        stage.submod.zero_grad()
    torch.manual_seed(step)
    losses: list[Tensor] = []
    first = any(stage.is_first for stage in schedule.stages)
    schedule.step(*([x] if first else []), target=target, losses=losses, **options)
    parameters = [p for s in schedule.stages for p in s.submod.parameters()]
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    return [*(loss.detach() for loss in losses), *gradients, torch.get_rng_state()]
