"""What a policy is asked about, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from membudget.offload import Offload

Answer = bool | Offload
"""Keep an output on the device (true), by an `Offload`, or recompute it (false)."""


def as_answer(given: Any) -> Answer:
    """Return what a policy has answered, if not with an `Offload`, as a `bool`."""
    return given if isinstance(given, Offload) else bool(given)


class Candidate:
    """An operator output that a policy may keep.

    Attributes:
        operator: The overload that was called, e.g. `torch.ops.aten.mm.default`.
        args: Positional arguments of the operator.
        kwargs: Keyword arguments of the operator.
        output: The output tensor.
        index: The operator's number within the region, counted from 1; the number of
            its counterpart, if the policy's operators are those of a recorded call.
        output_index: Index among the operator's outputs and written arguments.
    """

    __slots__ = (
        *("_module_path", "args", "index", "kwargs", "operator", "output"),
        "output_index",
    )

    def __init__(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Tensor,
        index: int,
        output_index: int,
        module_path: Callable[[], str],
    ):
        """Describe an operator output; the module path is computed only on request."""
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.index = index
        self.output_index = output_index
        self._module_path = module_path

    @property
    def module_path(self) -> str:
        """Name of the innermost running module in the region; `""` without one."""
        return self._module_path()
