"""How the way back through a region is divided, so that less is there at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

Output = tuple[int, int]
"""The number of an operator in the region's call, from 1, and which of its outputs."""


@dataclass(frozen=True)
class Stages:
    """Parts of the way back; each makes again what it serves, and lets go of the rest.

    Attributes:
        firsts: The first saved tensor of each stage, by its number among those that the
            region saves, from 0, in the order of the forward.
        held: What each stage leaves for later ones once it has made it.
    """

    firsts: Sequence[int]
    held: Sequence[Collection[Output]]

    def of(self, saved: int) -> int:
        """Return the stage that serves a saved tensor."""
        return max(0, bisect_right(self.firsts, saved) - 1)
