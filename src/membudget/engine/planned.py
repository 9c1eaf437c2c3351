"""A policy that keeps exactly the outputs that a plan names.

The plan was made from one step. If another step takes another way, the operators that
pass are not those that the plan names: then nothing more is kept in that call, which is
always right and never takes more memory, and the difference is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from membudget.engine.policy import Candidate, Policy


class Planned(Policy):
    """Keep outputs by the number of the operator in the region's call.

    Attributes:
        differences: In how many calls other operators ran than the plan names.
    """

    def __init__(self, kept: Mapping[tuple[int, int], str]):
        """Keep what a plan says.

        Args:
            kept: The overload that is expected, by the number of the operator (from 1)
                and the index of its output.
        """
        self._kept = dict(kept)
        self._operators = frozenset(self._kept.values())
        self._numbers = {number: name for (number, _), name in self._kept.items()}
        self._last = 0
        self._has_differed = False
        self.differences = 0

    def keeps(self, candidate: Candidate) -> bool:
        """Tell whether the plan keeps the output."""
        if candidate.index < self._last:
            self._has_differed = False  # Another call begins.
        self._last = candidate.index
        if self._has_differed:
            return False
        expected = self._numbers.get(candidate.index)
        if expected is not None and expected != str(candidate.operator):
            self._has_differed = True
            self.differences += 1
            return False
        return (candidate.index, candidate.output_index) in self._kept
