"""Ready-made policies for what a replay region keeps, composable with `|`, `&` and `~`.

    >>> import membudget as mb
    >>> keep = mb.policies.matmuls | mb.policies.attention

`Planned` is the policy of a plan, which is made from one recorded step. A later step
may take a different path through the code, so that its operators differ from the
plan's. The region then keeps what it shares with the plan, recomputes the rest, and
counts the difference; the call stays exact. Its operators, and the stages of its
backward pass, are matched with the plan's by `engine.alignment`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from membudget.engine.alignment import Alignment, OperatorSequence
from membudget.engine.candidate import Answer, Candidate
from membudget.engine.elsewhere import offloaded
from membudget.engine.policy import (
    Policy,
    everything,
    inside,
    named,
    nothing,
    operators,
)
from membudget.engine.stages import Stages
from membudget.errors import PlanError
from membudget.offload import Offload
from membudget.operator_names import ATTENTION, common_name, in_place_or_not, role_of

__all__ = [
    "Candidate",
    "Policy",
    "attention",
    "convolutions",
    "everything",
    "inside",
    "matmuls",
    "named",
    "nothing",
    "offloaded",
    "operators",
]


matmuls = operators(
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    *("linear", "mkldnn_linear", "_addmm_activation"),
)


convolutions = operators(
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    *("convolution_overrideable", "_slow_conv2d_forward", "conv_depthwise3d"),
    *("cudnn_convolution_transpose", "miopen_convolution"),
)


attention = operators(*ATTENTION)


_NONE: dict[tuple[int, int], Offload] = {}


class Planned(Policy):
    """Keeps the outputs that a plan names by operator number and output index.

    Those that the plan offloads are held by an `Offload`, the others on the device.

    Attributes:
        names: The overload that produces kept outputs, by the operator's number.
        last: The number of the last such operator.
        differences: Number of calls whose operators differed from those in the plan.
    """

    reads_arguments = False

    def __init__(
        self,
        kept: Mapping[tuple[int, int], str],
        stages: Stages | None = None,
        made_for: str = "",
        operators: int = 0,
        sequence: Sequence[str] = (),
        offloaded: Mapping[tuple[int, int], Offload] = _NONE,
    ):
        """Create a policy that keeps the outputs that a plan names.

        Args:
            kept: Name of the overload that produces each kept output, keyed by operator
                number (from 1) and output index.
            stages: Stages of the region's backward pass; `None` for a single stage.
            made_for: Type of the device that the plan was made for, if that is another;
                operators that differ are then an error.
            operators: How many operators the region runs there.
            sequence: Names of these operators, in order. Without it, a call keeps
                nothing from the first operator on that differs.
            offloaded: What holds those of the kept outputs that are offloaded.
        """
        self._kept = {
            place: name
            for (number, output), name in kept.items()
            for place in in_place_or_not_at(number, output, name)
        }
        self._offloaded = {
            place: by
            for (number, output), by in offloaded.items()
            for place in in_place_or_not_at(number, output, kept[number, output])
        }
        self.names = {number: name for (number, _), name in self._kept.items()}
        self.last = max(self.names, default=0)
        self.made_for = made_for
        self.operators = operators
        self.stages = stages
        self.sequence = OperatorSequence(sequence) if sequence else None
        self.differences = 0

    @property
    def key(self) -> Hashable:
        """A reference that does not own what the policy offloads to."""
        return ref(self)

    def begin(self) -> Policy:
        """Return a policy for one call of the region."""
        return _PlannedCall(self)

    def keeps(self, candidate: Candidate) -> Answer:
        """Return the plan's answer for an output, without checking other operators."""
        place = (candidate.index, candidate.output_index)
        expected = self._kept.get(place)
        is_kept = expected is not None and _is(candidate.operator, expected)
        return is_kept and self.where(place)

    def has(self, place: tuple[int, int]) -> bool:
        """Return whether the plan names an output, whichever operator makes it."""
        return place in self._kept

    def where(self, place: tuple[int, int]) -> Answer:
        """Return what holds a kept output: the device, or an `Offload`."""
        return self._offloaded.get(place, True)


class Unplanned(Planned):
    """Keeps nothing, in calls of a module beyond those that a plan knows.

    Each of these calls counts as a difference from the plan.
    """

    def __init__(self) -> None:
        """Create a policy that keeps nothing."""
        super().__init__({})

    def begin(self) -> Policy:
        """Count the call."""
        self.differences += 1
        return self


class _PlannedCall(Policy):
    """Applies a plan to one call of a region, comparing operators with the plan.

    Each output that the plan keeps is kept once: a layer that the plan does not know is
    recomputed, and later ones are kept as planned.
    """

    reads_arguments = False

    def __init__(self, plan: Planned):
        self._plan = plan
        self.stages = plan.stages
        self.alignment = None if plan.sequence is None else Alignment(plan.sequence)
        self._is_strict = bool(plan.made_for and plan.stages)
        self.numbers = None if self._is_strict else plan.names
        self._met: set[tuple[int, int]] = set()  # Outputs that the plan keeps, and
        self._followed = 0  # how far operators have run as in an earlier call.
        self._has_differed = False

    def keeps(self, candidate: Candidate) -> Answer:
        number, place = candidate.index, (candidate.index, candidate.output_index)
        if self._is_unknown(place):
            return False
        expected = self._plan.names.get(number)
        if expected is None:
            self._check_saves(candidate)
            return False
        if _is(candidate.operator, expected):
            self._met.add(place)
            return self._plan.has(place) and self._plan.where(place)
        if common_name(str(candidate.operator)) == common_name(expected):
            self._check_saves(candidate)
            # Its other outputs are not those of the plan's, and take few bytes.
            self._met.add(place)
            return self._plan.where(place)
        self._differ(number, str(candidate.operator))
        return False

    def _is_unknown(self, place: tuple[int, int]) -> bool:
        """Return whether the plan does not say of an output whether it is kept."""
        if self.alignment is None:
            return self._has_differed
        return place in self._met or place[0] <= self._followed

    @property
    def differs(self) -> bool:
        has_left = self.alignment is not None and self.alignment.has_left
        return has_left or self._has_differed

    def followed(self, operators: int, differs: bool) -> None:
        self._followed = operators
        if differs:
            self._count()

    def end(self, operators: int) -> None:
        if self._followed < self._plan.last and (absent := self._absent()):
            self._differ(min(absent), "absent")
        elif self.alignment is not None and self.alignment.has_left:
            self._count()
        # Numbers that are shifted may name an operator of the same kind.
        if self._plan.made_for and operators != self._plan.operators:
            self._refuse(
                f"a region runs {self._plan.operators} operators; here it runs "
                f"{operators}"
            )

    def _absent(self) -> set[int]:
        """Return the operators of which the plan keeps an output that have not run."""
        met = {number for number, _ in self._met}
        return {n for n in self._plan.names if n > self._followed} - met

    def _check_saves(self, candidate: Candidate) -> None:
        """Raise where stages count what is saved: another kernel may save more."""
        name = str(candidate.operator)
        if self._is_strict and role_of(name):
            self._refuse(
                "a backward pass runs in stages, counted by what operators save; here "
                f"{name} may save others"
            )

    def _refuse(self, why: str) -> None:
        raise PlanError(
            f"the plan was made for {self._plan.made_for}, where {why}, because the "
            "devices choose different kernels. Make the plan on this device, by fit or "
            "by profile(..., fake=True)"
        )

    def _differ(self, number: int, found: str) -> None:
        if self._plan.made_for:
            expected = self._plan.names[number]
            self._refuse(
                f"operator {number} of a region is {expected}; here it is {found}"
            )
        self._count()

    def _count(self) -> None:
        """Count the call as a difference, once."""
        self._plan.differences += not self._has_differed
        self._has_differed = True


def _is(operator: Any, expected: str) -> bool:
    """Return whether an operator is the expected one, in place or not.

    Fake tensors are a tensor subclass, for which torch may run `add` where a real step
    runs `add_`.
    """
    name = str(operator)
    return name == expected or in_place_or_not(name) == in_place_or_not(expected)


def in_place_or_not_at(
    number: int, output: int, name: str
) -> tuple[tuple[int, int], ...]:
    """Return where an output is, whether its operator runs in place or not.

    What an operator in place has written is its output 1; its output 0 is the tensor
    that it returns. Its variant that makes a new tensor has that as its output 0.

    Example:
        >>> in_place_or_not_at(3, 0, "aten.add.Tensor")
        ((3, 0), (3, 1))
        >>> in_place_or_not_at(3, 0, "aten.native_layer_norm.default")
        ((3, 0),)
    """
    library, operator, *_ = *in_place_or_not(name).split("."), ""
    if output > 1 or not hasattr(getattr(torch.ops, library), f"{operator}_"):
        return ((number, output),)
    return (number, 0), (number, 1)
