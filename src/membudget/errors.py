"""Exceptions and warnings that membudget raises deliberately.

    MembudgetError
    ├── OptionError (ValueError)          an option or argument has an invalid value
    │   └── OptionTypeError (TypeError)   an argument has an invalid type
    ├── SelectionError (ValueError)       a selection of modules matches nothing
    ├── MissingExtraError (ImportError)   an optional dependency is not installed
    ├── PlanError (ValueError)            a plan is incomplete, or for another model
    ├── BudgetError (ValueError)          no plan fits in the budget
    ├── OutOfMemoryError (RuntimeError)   a step that fits the budget found no memory;
    │                                     also a `torch.OutOfMemoryError`
    ├── RankError (RuntimeError)          another rank of the process group failed
    └── CheckpointError (RuntimeError)    a region cannot run or recompute; also
        │                                 a `torch.utils.checkpoint.CheckpointError`
        ├── RecomputeMismatchError        the recompute differs from the forward
        ├── ChangedSinceForwardError      data that the region read was modified
        └── ReentrantLimitError           an unsupported use of the reentrant variant
    BudgetWarning (UserWarning)           a training loop is, or may be, over its budget
    OverwrittenWarning (UserWarning)      a saved tensor was written before the backward
    UnrepeatableWarning (UserWarning)     an output is kept: replaying it differed

Each message states what was requested, what was found and how to fix it; attributes
hold the details. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class MembudgetError(Exception):
    """Base class of membudget's exceptions."""


class OptionError(MembudgetError, ValueError):
    """An option or argument has an invalid value."""


class OptionTypeError(OptionError, TypeError):
    """An argument has an invalid type, for which torch raises `TypeError`."""


class SelectionError(MembudgetError, ValueError):
    """A selection matches no modules, or a selected module cannot have a region."""


class MissingExtraError(MembudgetError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        package: The missing package.
        extra: The optional extra of membudget that installs the package.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Compose the message and store the names of the package and its extra."""
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "membudget[{extra}]"'
        )
        self.package = package
        self.extra = extra


class PlanError(MembudgetError, ValueError):
    """A plan is incomplete, for another model, or of an unsupported version."""


HolderKind = Literal[
    "loss",
    "layer",
    "activations",
    "embedding",
    "gradients",
    "earlier gradients",
    "optimizer step",
    "optimizer state",
    "parameters",
    "inputs",
    "regions",
    "other",
]
"""What holds bytes at a peak; see `report.holders`."""


class ByteHolder(NamedTuple):
    """What holds bytes at the peak of a step.

    Attributes:
        kind: What it is.
        name: The same in words, with the module or parameter.
        bytes: Its bytes.
        remedy: What lowers them; empty if nothing is known to.
    """

    kind: HolderKind
    name: str
    bytes: int
    remedy: str = ""


class BudgetError(MembudgetError, ValueError):
    """No plan fits in the budget.

    Each is a total, like a budget in bytes: `fit` accepts `least_bytes`.

    Attributes:
        asked_bytes: The budget.
        least_bytes: The smallest budget that is known to suffice for mode `"auto"`. It
            depends on bytes alone, not on measured times.
        before_bytes: Bytes in use before the step, included in the other two.
        holders: What holds the bytes at the peak of the smallest plan, what is in use
            before the step included; largest first, then the rest. They add up to the
            predicted peak: `least_bytes` differs where more was measured, and has a
            margin where nothing was. Empty if the refused step is not predicted.
    """

    def __init__(
        self,
        message: str,
        *,
        asked_bytes: int,
        least_bytes: int,
        before_bytes: int,
        holders: Sequence[ByteHolder] = (),
    ) -> None:
        """Store the message and the byte counts."""
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.least_bytes = least_bytes
        self.before_bytes = before_bytes
        self.holders = tuple(holders)


class OutOfMemoryError(MembudgetError, RuntimeError):
    """A step that is within the budget found no memory: the limit lies elsewhere.

    Code written for torch catches `torch.OutOfMemoryError`, so `allocation`, which
    imports torch, makes that a base of this class.

    Attributes:
        asked_bytes: The budget, in all.
        predicted_bytes: Predicted peak of the step under its plan, in all; while there
            is no plan yet, of the plain step.
    """

    def __init__(self, message: str, *, asked_bytes: int, predicted_bytes: int) -> None:
        """Store the message and the byte counts."""
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.predicted_bytes = predicted_bytes


class RankError(MembudgetError, RuntimeError):
    """Another rank of the process group failed in what all ranks do together.

    Attributes:
        rank: Number of the rank that failed first, which raises its own error; `None`
            if it took the reason with it.
        why: That error, as text; else that of this rank, which waited for it.
    """

    def __init__(self, rank: int | None, why: str, what: str = "") -> None:
        """Compose the message and store the rank and its reason."""
        doing = f" {what}" if what else ""
        name = "another rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{name} failed{doing} ({why}), and the other ranks cannot go on "
            "without it: start the processes again"
        )
        self.rank = rank
        self.why = why


class CheckpointError(MembudgetError, RuntimeError):
    """A region cannot run or recompute its function.

    Code written for torch catches torch's own `CheckpointError`, so `engine`, which
    imports torch, makes torch's class a base of membudget's.

    Attributes:
        remedy: How the region now behaves and what the user can do; may be empty.
    """

    remedy = ""

    def add_remedy(self, remedy: str) -> None:
        """Append a remedy to the error message."""
        self.remedy = remedy
        self.args = (f"{self}\n  {remedy}",)


class RecomputeMismatchError(CheckpointError):
    """The recompute of a region produced tensors that differ from the forward's.

    Attributes:
        index: Index of the saved tensor that differs, in the order of saving; `None` if
            the number of saved tensors differs.
        module_path: Innermost module in which the tensors differed, such as
            `"h.3.mlp"`; empty if there is none or it is unknown.
        operator: Call whose saved tensor differed, such as `"functional.gelu(x)"`.
        line: Line of user code where the tensors differed, as `"file.py:12"`.
        saved: Description of what the forward saved.
        recomputed: Description of what the recompute produced.
        causes: Probable causes, most likely first.
    """

    def __init__(
        self,
        message: str,
        *,
        index: int | None = None,
        module_path: str = "",
        operator: str = "",
        line: str = "",
        saved: str = "",
        recomputed: str = "",
        causes: Sequence[str] = (),
    ) -> None:
        """Store the message and the details of the mismatch."""
        super().__init__(message)
        self.index = index
        self.module_path = module_path
        self.operator = operator
        self.line = line
        self.saved = saved
        self.recomputed = recomputed
        self.causes = tuple(causes)


class ChangedSinceForwardError(CheckpointError):
    """Data that a region read was modified between its forward and its recompute.

    Attributes:
        names: What was modified, such as `("argument 0", "parameter 'fc.weight'")`.
        by_region: Whether the region's own forward made the change.
    """

    def __init__(
        self, message: str, names: Sequence[str] = (), by_region: bool = False
    ) -> None:
        """Store the message and what was modified."""
        super().__init__(message)
        self.names = tuple(names)
        self.by_region = by_region


class ReentrantLimitError(CheckpointError):
    """A use of `use_reentrant=True` that would silently lose gradients."""


class BudgetWarning(UserWarning):
    """A training loop is over its budget, or nothing is known that would tell."""


class OverwrittenWarning(UserWarning):
    """A saved tensor was overwritten before the backward; plain autograd would fail."""


class UnrepeatableWarning(UserWarning):
    """A replay region keeps an output because its replay gave different bits."""
