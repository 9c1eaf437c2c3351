"""Ready-made policies for what a replay region keeps, composable with `|`, `&` and `~`.

    >>> import membudget as mb
    >>> keep = mb.policies.matmuls | mb.policies.attention

`Planned` is the policy of a plan, which is made from one recorded step. If a later step
takes a different path through the code, so that its operators differ from the plan's,
the region keeps no further outputs in that call and counts the difference; the call
stays exact and takes no additional memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from membudget.engine.policy import (
    Candidate,
    Policy,
    Stages,
    everything,
    inside,
    named,
    nothing,
    operators,
)

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


attention = operators(
    *("_scaled_dot_product_flash_attention", "_flash_attention_forward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_forward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_attention_math_for_mps", "_cudnn_attention_forward"),
    "_scaled_dot_product_fused_attention_overrideable",
)


class Planned(Policy):
    """Keeps the outputs that a plan names by operator number and output index.

    Attributes:
        differences: Number of calls whose operators differed from those in the plan.
    """

    reads_arguments = False

    def __init__(
        self, kept: Mapping[tuple[int, int], str], stages: Stages | None = None
    ):
        """Create a policy that keeps the outputs that a plan names.

        Args:
            kept: Name of the overload that produces each kept output, keyed by operator
                number (from 1) and output index.
            stages: Stages of the region's backward pass; `None` for a single stage.
        """
        self._kept = dict(kept)
        self.stages = stages
        self.differences = 0

    def begin(self) -> Policy:
        """Return a policy for one call of the region."""
        return _PlannedCall(self, self._kept)

    def keeps(self, candidate: Candidate) -> bool:
        """Return whether the plan keeps an output, without checking other operators."""
        expected = self._kept.get((candidate.index, candidate.output_index))
        return expected is not None and _is(candidate.operator, expected)


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
    """Applies a plan to one call of a region, comparing operators with the plan."""

    reads_arguments = False

    def __init__(self, plan: Planned, kept: Mapping[tuple[int, int], str]):
        self._plan = plan
        self.stages = plan.stages
        self._kept = kept
        self.numbers = names = {number: name for (number, _), name in kept.items()}
        self._names = names
        self._awaited = set(names)
        self._has_differed = False

    def keeps(self, candidate: Candidate) -> bool:
        if self._has_differed:
            return False
        number = candidate.index
        expected = self._names.get(number)
        if expected is None:
            return False
        if not _is(candidate.operator, expected):
            self._differ()
            return False
        self._awaited.discard(number)
        return (number, candidate.output_index) in self._kept

    def end(self) -> None:
        if self._awaited and not self._has_differed:
            self._differ()

    def _differ(self) -> None:
        self._has_differed = True
        self._plan.differences += 1


def _is(operator: Any, expected: str) -> bool:
    """Return whether an operator is the expected one, in place or not.

    Fake tensors are a tensor subclass, for which torch may run `add` where a real step
    runs `add_`.
    """
    name = str(operator)
    return name == expected or in_place_or_not(name) == in_place_or_not(expected)


def in_place_or_not(name: str) -> str:
    """Return an operator's name without the underscore that marks in-place variants.

    Example:
        >>> in_place_or_not("aten.add_.Tensor"), in_place_or_not("aten.add.Tensor")
        ('aten.add.Tensor', 'aten.add.Tensor')
    """
    return name.replace("_.", ".")
