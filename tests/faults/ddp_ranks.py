"""One rank of row 9: sixteen ways to use a region under DistributedDataParallel."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    plain,
    torch_reentrant,
    torch_rerun,
)
from tests.faults.ranks import report_rank

STEPS = 2


def ours_rerun(function: Checkpoint, *args: Tensor) -> Any:
    return mb.checkpoint(function, *args)


def ours_reentrant(function: Checkpoint, *args: Tensor) -> Any:
    return mb.checkpoint(function, *args, use_reentrant=True)


CHECKPOINTS: dict[str, dict[bool, Checkpoint]] = {
    "ours": {False: ours_rerun, True: ours_reentrant},
    "torch": {False: torch_rerun, True: torch_reentrant},
}
CASES = list(itertools.product([False, True], repeat=4))


class Model(nn.Module):
    """Runs one region, or two over the same module."""

    def __init__(self, checkpoint: Checkpoint, reused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoint = checkpoint
        self.reused = reused
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.checkpoint(self.block, self.first(x))
        return self.checkpoint(self.block, x) if self.reused else x


def train(
    checkpoint: Checkpoint, rank: int, reused: bool, unused: bool, static: bool
) -> dict[str, Tensor | None]:
    """Train for some steps on this rank's data; return the last gradients."""
    model = DistributedDataParallel(
        Model(checkpoint, reused),
        find_unused_parameters=unused,
        static_graph=static,
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
    return gradients(model)


def outcome(checkpoint: Checkpoint, rank: int, *flags: bool) -> str:
    """Return "equal", "differs", or the error of a case."""
    expected = train(plain, rank, *flags)
    try:
        found = train(checkpoint, rank, *flags)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "equal" if are_equal(found, expected) else "differs"


def all_outcomes(rank: int) -> dict[str, list[str]]:
    # DDP warns of unused parameters that it was told to look for in vain.
    warnings.simplefilter("ignore")
    return {
        name: [outcome(kinds[case[0]], rank, *case[1:]) for case in CASES]
        for name, kinds in CHECKPOINTS.items()
    }


if __name__ == "__main__":
    report_rank(all_outcomes)
