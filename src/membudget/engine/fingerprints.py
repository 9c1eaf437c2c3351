"""Fingerprints of what is saved, in the calls that are verified.

`determinism_check="values"` verifies all of them.

They must not be taken before the content is there. Some operators save a tensor first
and fill it later (RReLU its noise), but none after it has ended: the tensors of one
operator wait until another one saves.
"""

from __future__ import annotations

from types import CodeType

from torch import Tensor

from membudget._torch import node_sequence_number, without_modes
from membudget.state.bits import SKIPPED, Fingerprint, content_of, may_be_a_workspace

# Operators that save memory of which they leave parts unfilled, or all: RReLU its noise
# in evaluation, lstsq the residuals of a singular system, the CTC loss its table.
_LEAVES_UNFILLED = frozenset(("rrelu", "lstsq", "ctc_loss"))


class Fingerprints:
    """The fingerprints of the tensors that one run saves, in order.

    Attributes:
        taken: Those of operators that have ended.
    """

    __slots__ = ("_operator", "_waiting", "taken")

    def __init__(self) -> None:
        """Begin with none."""
        self.taken: list[Fingerprint] = []
        self._waiting: list[Tensor] = []
        self._operator = -1

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that an operator is saving, before or after it fills it."""
        # Each operator makes one node, before it saves, and numbers rise with nodes.
        operator = node_sequence_number()
        if operator != self._operator:
            self.settle()
            self._operator = operator
        self._waiting.append(tensor)

    def settle(self) -> None:
        """Take the fingerprints that are still to be taken."""
        if self._waiting:
            with without_modes():
                self.taken += map(_fingerprint, self._waiting)
            self._waiting.clear()


class Comparison(Fingerprints):
    """The fingerprints of a recompute, beside those of its forward.

    Attributes:
        waited: Whether an operator filled a tensor only after it had saved it.
    """

    __slots__ = ("_compared", "_expected", "_unfilled", "waited")

    def __init__(self, forward: Fingerprints):
        """Compare with what `forward` has taken, by the time of each comparison."""
        super().__init__()
        self._expected = forward.taken
        self._compared = 0
        self._unfilled: set[int] = set()
        self.waited = False

    def add_saved_by(self, caller: CodeType, tensor: Tensor) -> None:
        """Note a tensor that an operator saves, called by Python code."""
        if not _LEAVES_UNFILLED.isdisjoint(caller.co_names):
            self._unfilled.add(len(self.taken) + len(self._waiting))
        self.add(tensor)

    def difference(self) -> int | None:
        """Return the index of the first tensor that differs and was not compared."""
        start, self._compared = self._compared, len(self.taken)
        return self._first_difference(self.taken[start:], start)

    def is_filled(self) -> bool:
        """Tell whether the operator that is saving has filled what it saved so far."""
        with without_modes():
            now = [_fingerprint(tensor) for tensor in self._waiting]
        if self._first_difference(now, len(self.taken)) is not None:
            self.waited = True
            return False
        return True

    def _first_difference(self, taken: list[Fingerprint], start: int) -> int | None:
        for index, both in enumerate(zip(taken, self._expected[start:], strict=False)):
            differ = both[0] != both[1] and SKIPPED not in both
            if differ and start + index not in self._unfilled:
                return start + index
        return None


def _fingerprint(tensor: Tensor) -> Fingerprint:
    # FSDP frees a parameter's memory between its saving and now.
    return SKIPPED if may_be_a_workspace(tensor) else content_of(tensor)
