"""Reruns with cuts: small rerun regions that end in a matrix product, beside plans.

A rerun stops once the last saved tensor is back, so the product that ends a region
never runs again, and its output is kept for nothing. The last blocks of a GPT of width
256 are cut by hand into such regions, four in each. `fit` plans a copy within the peak
of that, and both are timed in turns with the plain step (CPU time).

    python3 run.py bench cuts [--seconds 12]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import models
import torch
import torch.nn.functional as F
from harness import Case, in_turns, machine
from torch import Tensor, nn

import membudget as mb

BLOCKS = 12
CUT = (3, 6, 9, 12)
"""How many blocks are cut."""


class CutBlock(nn.Module):
    """A block of a GPT in four rerun regions, each of which ends in a product."""

    def __init__(self, block: nn.Module) -> None:
        """Take a block apart."""
        super().__init__()
        assert isinstance(block, models.GPTBlock)
        self.block = block
        region = mb.checkpoint(engine="rerun")
        parts = (self._project, self._attend, self._widen, self._narrow)
        self._parts = tuple(map(region, parts))

    def _project(self, x: Tensor) -> Tensor:
        made: Tensor = self.block.project_in(self.block.attention_norm(x))
        return made

    def _attend(self, split: Tensor) -> Tensor:
        split = split.unflatten(-1, (3, self.block.heads, -1))
        attended = self.block.attend(*split.permute(2, 0, 3, 1, 4))
        made: Tensor = self.block.project_out(attended.transpose(1, 2).flatten(2))
        return made

    def _widen(self, x: Tensor) -> Tensor:
        made: Tensor = self.block.mlp_in(self.block.mlp_norm(x))
        return made

    def _narrow(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.block.mlp_out(F.gelu(hidden))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream `x` with this block's two additions."""
        project, attend, widen, narrow = self._parts
        x = x + self.block.dropout(attend(project(x)))
        made: Tensor = x + self.block.dropout(narrow(widen(x)))
        return made


def subject(cut: int = 0) -> tuple[models.Model, tuple[Tensor, Tensor]]:
    """Return the same GPT each time, with its last blocks cut."""
    torch.manual_seed(0)
    model, batch = models.gpt(blocks=BLOCKS, width=256, heads=4, batch=8, length=128)
    kept = list(model.runs[: BLOCKS - cut])
    model.runs = (*kept, *(CutBlock(b) for b in model.blocks[BLOCKS - cut :]))
    return model, batch


def step_of(model: models.Model, batch: tuple[Tensor, Tensor]) -> Case:
    """Return a training step without an optimizer."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(*batch).backward()

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a line for each number of cut blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    seconds = parser.parse_args(arguments).seconds
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    plain = step_of(*subject())
    plain()
    plain_bytes = mb.peak(plain).peak_bytes
    for cut in CUT:
        by_hand = step_of(*subject(cut))
        by_hand()
        peak_bytes = mb.peak(by_hand).peak_bytes
        model, batch = subject()
        plan = mb.fit(model, batch, f"{100 * peak_bytes / plain_bytes:.6f}%").plan
        cases = {"cuts": by_hand, "plan": step_of(model, batch), "plain": plain}
        found, rounds = in_turns(cases, seconds=seconds)
        ratios = [found[way].ratio(found["plain"]) for way in ("cuts", "plan")]
        print(
            f"{cut} blocks cut: {peak_bytes / 2**20:.1f} of {plain_bytes / 2**20:.1f} "
            f"MiB; cuts {ratios[0][0]:.3f}, plan {ratios[1][0]:.3f} "
            f"({plan.peak_bytes / 2**20:.1f} MiB, predicted {plan.slowdown:.3f}), "
            f"{rounds} rounds",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
