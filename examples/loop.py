"""A training loop under a budget: changing lengths, two micro-batches a step, AdamW.

The loop runs plainly first, then again under 60 % of what that took, from the same
weights. The exit code says whether all weights are equal to the last bit. The README
shows what this prints.

    python examples/loop.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb

WORDS = 512


class Language(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next words."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, lengths: Sequence[int]
) -> None:
    """Train on random words; membudget is not in here."""
    for number, length in enumerate(lengths):
        tokens = torch.randint(WORDS, (8, length))
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train plainly and under a budget; compare the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sequences")
    quick = parser.parse_args(arguments).quick
    lengths = [24, 32, 16, 32] if quick else [96, 128, 64, 128, 80, 112, 96, 128]
    ends = []
    for is_budgeted in (False, True):
        torch.manual_seed(0)
        model = Language(width=64, depth=3) if quick else Language()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        budget = mb.budget(model, "60%", optimizer=optimizer)
        with budget if is_budgeted else nullcontext():
            train(model, optimizer, lengths)
        ends.append([parameter.detach() for parameter in model.parameters()])
    print(budget.report())
    is_equal = all(map(torch.equal, *ends))
    print(f"\nweights {'equal to the last bit' if is_equal else 'differ'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
