"""A CNN with BatchNorm and dropout inside its regions, on images shaped like CIFAR-10.

Two copies train side by side on data that is made here, one plain and one with a
region round each stage. Afterwards every weight and every buffer (BatchNorm's
statistics, which other checkpointing advances twice a step) is compared bit for bit.

    python examples/cifar_cnn.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from terminal import human

CLASSES = 10


class Stage(nn.Sequential):
    """Convolution, BatchNorm, an in-place ReLU, dropout, twice; then half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Make the layers from `inputs` to `outputs` channels."""
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1),
            ]
        super().__init__(*layers, nn.MaxPool2d(2))


def make_model(width: int) -> nn.Sequential:
    """Return the network, of about 20 `width`² parameters."""
    widths = (3, width, 2 * width, 4 * width)
    stages = [Stage(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(4 * width * 16, CLASSES))


def make_batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images whose brightest quarter tells their class, with noise on top."""
    labels = torch.randint(CLASSES, (size,), generator=generator)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    columns = torch.arange(32) * CLASSES // 32
    return images + (columns == labels[:, None])[:, None, None, :], labels


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run forward and backward."""
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both copies; return 1 if they differ in one bit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short")
    quick = parser.parse_args(arguments).quick
    steps, size, width = (3, 8, 8) if quick else (40, 64, 32)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    plain = make_model(width)
    budgeted = copy.deepcopy(plain)
    applied = mb.apply(budgeted, blocks=Stage)
    models = (plain, budgeted)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models
    ]
    losses: list[Tensor] = []
    for step in range(steps):
        batch = make_batch(size, generator)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)  # Both copies see the same dropout.
            optimizer.zero_grad()
            losses.append(train_step(model, batch))
            optimizer.step()
    equal = torch.equal(*losses) and _equal(*models)
    console = Console()
    for name, model in zip(("plain", "regions"), models, strict=True):
        model.zero_grad()
        peak = mb.peak(train_step, model, batch).peak_bytes
        console.print(f"{name}: peak {human(peak)} a step")
    console.print(str(applied.status()))
    console.print(f"loss after {steps} steps: {losses[0]:.6f} and {losses[1]:.6f}")
    console.print("weights and buffers equal bit for bit" if equal else "they DIFFER")
    return 0 if equal else 1


def _equal(a: nn.Module, b: nn.Module) -> bool:
    """Compare every weight and every buffer."""
    states = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in states)


if __name__ == "__main__":
    sys.exit(main())
