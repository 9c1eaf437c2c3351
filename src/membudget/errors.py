"""All exceptions that membudget raises on purpose.

    MembudgetError
    ├── OptionError (ValueError)          an option or argument has an invalid value
    │   └── OptionTypeError (TypeError)   an argument has an invalid type
    ├── SelectionError (ValueError)       a selection of modules matches nothing
    ├── MissingExtraError (ImportError)   an optional dependency is not installed
    ├── PlanError (ValueError)            a plan is incomplete, or for another model
    ├── BudgetError (ValueError)          no plan fits in the budget
    └── CheckpointError (RuntimeError)    a region cannot do what was asked of it; also
        │                                 a `torch.utils.checkpoint.CheckpointError`
        ├── RecomputeMismatchError        the recompute differs from the forward
        ├── ChangedSinceForwardError      something that the region read was changed
        └── ReentrantLimitError           a limit of the classic, reentrant variant
    OverwrittenWarning (UserWarning)      a saved tensor was written before the backward
    UnrepeatableWarning (UserWarning)     an output is kept: replaying it differed

Each message says what was asked, what was found and what to do; the facts are
attributes. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence


class MembudgetError(Exception):
    """The root of membudget's exceptions."""


class OptionError(MembudgetError, ValueError):
    """An option or argument has an invalid value."""


class OptionTypeError(OptionError, TypeError):
    """An argument has an invalid type, where torch raises `TypeError`."""


class SelectionError(MembudgetError, ValueError):
    """A selection of modules matches nothing, or a module cannot carry a region."""


class MissingExtraError(MembudgetError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        package: The missing package.
        extra: The extra of membudget that installs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Name the package, the extra that installs it, and its purpose."""
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "membudget[{extra}]"'
        )
        self.package = package
        self.extra = extra


class PlanError(MembudgetError, ValueError):
    """A plan is incomplete, of a newer version, or for another model."""


class BudgetError(MembudgetError, ValueError):
    """No plan fits in the budget.

    Attributes:
        asked_bytes: The budget.
        least_bytes: The smallest budget for which a plan is known.
    """

    def __init__(self, message: str, *, asked_bytes: int, least_bytes: int) -> None:
        """Store the message and the facts behind it."""
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.least_bytes = least_bytes


class CheckpointError(MembudgetError, RuntimeError):
    """A region cannot do what was asked of it.

    Code written for torch catches torch's error of this name, so `engine`, which
    imports torch, makes that error a base of this one.

    Attributes:
        remedy: What happens to the region from now on, and what to do; may be empty.
    """

    remedy = ""

    def add_remedy(self, remedy: str) -> None:
        """Append a remedy to the message."""
        self.remedy = remedy
        self.args = (f"{self}\n  {remedy}",)


class RecomputeMismatchError(CheckpointError):
    """The recompute of a region gave other tensors than its forward.

    Attributes:
        index: The index of the saved tensor that differs, in the order in which the
            forward saved them; `None` if their number differs.
        module_path: The module whose forward was running, such as `"h.3.mlp"`; empty
            outside every module.
        operator: The function that was called, such as `"torch.nn.functional.gelu"`.
        line: The user's line, as `"file.py:12"`.
        saved: What the forward saved, as text.
        recomputed: What the recompute produced, as text.
        causes: Probable causes, the most probable first.
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
        """Store the message and the facts behind it."""
        super().__init__(message)
        self.index = index
        self.module_path = module_path
        self.operator = operator
        self.line = line
        self.saved = saved
        self.recomputed = recomputed
        self.causes = tuple(causes)


class ChangedSinceForwardError(CheckpointError):
    """Something that a region read was changed before the region was recomputed.

    Attributes:
        names: What was changed, such as `("argument 0", "parameter 'fc.weight'")`.
        by_region: Whether the region's own forward changed it.
    """

    def __init__(
        self, message: str, names: Sequence[str] = (), by_region: bool = False
    ) -> None:
        """Store the message, the names of what was changed, and who changed it."""
        super().__init__(message)
        self.names = tuple(names)
        self.by_region = by_region


class ReentrantLimitError(CheckpointError):
    """A limit of `use_reentrant=True`, which would silently lose gradients."""


class OverwrittenWarning(UserWarning):
    """A saved tensor was written before the backward: plain autograd would raise."""


class UnrepeatableWarning(UserWarning):
    """An output of a replay region is kept, because replaying it was not exact."""
