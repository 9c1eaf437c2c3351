"""Every exception that membudget raises on purpose.

    MembudgetError
    ├── OptionError (ValueError)          an option that cannot be meant
    │   └── OptionTypeError (TypeError)   an argument of a type that it cannot have
    ├── SelectionError (ValueError)       a selection that matches nothing
    ├── MissingExtraError (ImportError)   an optional dependency is not installed
    ├── PlanError (ValueError)            a plan that is not whole, or for another model
    ├── BudgetError (ValueError)          a budget that nothing fits into
    └── CheckpointError (RuntimeError)    a region cannot do what was asked of it; also
        │                                 a `torch.utils.checkpoint.CheckpointError`
        ├── RecomputeMismatchError        the recompute is not the forward again
        ├── ChangedSinceForwardError      what the region read was changed since
        └── ReentrantLimitError           a limit of the classic, reentrant variant
    OverwrittenWarning (UserWarning)      a saved tensor was written before the backward
    UnrepeatableWarning (UserWarning)           a value did not come back and is kept
    SearchWarning (UserWarning)           a search of all schedules gave no answer

Each message says what was asked, what was found and what to do; the facts are
attributes. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence


class MembudgetError(Exception):
    """The root of membudget's exceptions."""


class OptionError(MembudgetError, ValueError):
    """An option or argument has a value that cannot be meant."""


class OptionTypeError(OptionError, TypeError):
    """An argument is of a type that it cannot have, where torch raises `TypeError`."""


class SelectionError(MembudgetError, ValueError):
    """A selection of modules matches nothing, or cannot carry a region."""


class MissingExtraError(MembudgetError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        package: The package that is missing.
        extra: The extra of membudget that brings it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Name the package, the extra that brings it, and what it is for."""
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "membudget[{extra}]"'
        )
        self.package = package
        self.extra = extra


class PlanError(MembudgetError, ValueError):
    """A plan is not whole, of a newer version, or for another model."""


class BudgetError(MembudgetError, ValueError):
    """No plan fits into the bytes that were given.

    Attributes:
        asked_bytes: What was given.
        least_bytes: The least that some plan is known to fit into.
    """

    def __init__(self, message: str, *, asked_bytes: int, least_bytes: int) -> None:
        """Hold the message and the facts behind it."""
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.least_bytes = least_bytes


class CheckpointError(MembudgetError, RuntimeError):
    """A region cannot do what was asked of it.

    Code written for torch catches torch's error of this name, so `engine`, which
    imports torch, makes that one a base of this.

    Attributes:
        remedy: What happens to the region from now on, and what to do; may be empty.
    """

    remedy = ""

    def add_remedy(self, remedy: str) -> None:
        """Add to the message what to do."""
        self.remedy = remedy
        self.args = (f"{self}\n  {remedy}",)


class RecomputeMismatchError(CheckpointError):
    """The recompute of a region made other tensors than its forward did.

    Attributes:
        index: Which saved tensor of the region differs, counted from 0 in the order
            in which the forward saved them; `None` if their number differs.
        module_path: The module whose forward was running, such as `"h.3.mlp"`;
            empty outside every module.
        operator: The function that was called, such as `"torch.nn.functional.gelu"`.
        line: The user's line, as `"file.py:12"`.
        saved: What the forward saved, as text.
        recomputed: What the recompute made, as text.
        causes: What probably made the difference, the likeliest first.
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
        """Hold the message and the facts behind it."""
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
        by_region: Whether the forward of the region itself changed it.
    """

    def __init__(
        self, message: str, names: Sequence[str] = (), by_region: bool = False
    ) -> None:
        """Hold the message, the names of what was changed, and by whom."""
        super().__init__(message)
        self.names = tuple(names)
        self.by_region = by_region


class ReentrantLimitError(CheckpointError):
    """A limit of `use_reentrant=True`, which would otherwise lose gradients."""


class OverwrittenWarning(UserWarning):
    """A saved tensor was written before the backward: plain autograd would raise."""


class UnrepeatableWarning(UserWarning):
    """A value of a replay region did not come back bit for bit, and is kept."""


class SearchWarning(UserWarning):
    """The search of all schedules that was asked for gave no answer."""
