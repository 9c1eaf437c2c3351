"""Train two steps in an address space that is limited to what is there and some more.

    python limited_step.py MEBIBYTES FILE [MODE BUDGET_MEBIBYTES [FAKE]]

The limit is so much more than what is there before the first step; 0 is none. With a
mode the model is fitted into a budget, of so much above what is there before the step.
With FAKE "no" the plain step is tried, which runs out of memory.
The losses are written to FILE.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import membudget as mb

MIB = 1 << 20
BLOCKS, ROWS, WIDTH = 16, 4096, 256
"""An activation of a block has 4 MiB, and the plain step takes 209 MiB."""


def make() -> tuple[nn.Module, Tensor]:
    """Return the model, and its batch."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Tanh())
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks), torch.randn(ROWS, WIDTH)


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    """Return how far the output is from the batch."""
    return (output - batch).square().mean()


def load_everything() -> None:
    """Load what torch and membudget load on first use, before the limit."""
    small = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1))
    for fake in (True, False):
        with mb.fit(small, torch.randn(2, 4), "100%", loss_of, fake=fake):
            pass


def limit(more_mib: int) -> None:
    """Allow so much more address space than there is now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def train(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the losses of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main(
    more_mib: str, path: str, mode: str = "", budget_mib: str = "0", fake: str = "yes"
) -> None:
    """Train, and write the losses."""
    torch.set_num_threads(1)
    model, batch = make()
    load_everything()
    if int(more_mib):
        limit(int(more_mib))
    if mode:
        before = mb.storage_bytes([*model.parameters(), batch])
        budget = before + int(budget_mib) * MIB
        asked = fake == "yes"
        fitted = mb.fit(model, batch, budget, loss_of, mode=mode, fake=asked)
        sys.stdout.write(fitted.report())
        assert fitted.plan.regions
        assert fitted.profile.tensors == "fake"
        assert asked or "the plain step ran out of memory" in fitted.report()
        assert fitted.plan.plain_peak_bytes > int(more_mib) * MIB
    torch.save(train(model, batch), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
