"""The report of a fit: eight blocks of a transformer's MLP within 40 % of their peak.

The step is audited afterwards, plain and under the plan, so the exit code says whether
all bits are equal. The README shows what this prints.

    python examples/fit.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import membudget as mb


class Block(nn.Module):
    """Normalisation and an MLP four times as wide, added to the residual stream."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the model, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller batch")
    quick = parser.parse_args(arguments).quick
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(8)))
    batch = torch.randn(256 if quick else 1024, 64)
    with mb.fit(model, batch, "40%") as fitted:
        print(fitted.report())
        return 0 if fitted.audit().equal else 1


if __name__ == "__main__":
    sys.exit(main())
