"""Train PyTorch models in the memory that you have.

Public names are imported on first use: importing torch takes seconds, and
`membudget --help` must respond at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from membudget import compat, policies
    from membudget.apply import Applied, RegionStatus, Status, apply
    from membudget.audit import AuditReport, audit
    from membudget.engine.controls import (
        Regions,
        collect_regions,
        disable_checkpointing,
        is_recomputing,
    )
    from membudget.engine.groups import execution_group
    from membudget.engine.region import checkpoint
    from membudget.engine.replay.recorder import name, opaque
    from membudget.engine.sequential import checkpoint_sequential
    from membudget.errors import (
        BudgetError,
        BudgetWarning,
        ChangedSinceForwardError,
        CheckpointError,
        MembudgetError,
        MissingExtraError,
        OptionError,
        OptionTypeError,
        OutOfMemoryError,
        OverwrittenWarning,
        PlanError,
        RankError,
        RecomputeMismatchError,
        ReentrantLimitError,
        SelectionError,
        UnrepeatableWarning,
    )
    from membudget.fit import fit
    from membudget.fitted import Fitted
    from membudget.graph import StepGraph
    from membudget.loop import Budgeted, budget
    from membudget.memory import (
        Peak,
        SavedReport,
        SavedTensor,
        peak,
        saved,
        storage_bytes,
    )
    from membudget.offload import Offload, offload
    from membudget.offload.status import OffloadStatus
    from membudget.planner.plan import Plan
    from membudget.profile import Device, Profile, Sweep, profile, sweep
    from membudget.tradeoff import Tradeoff, tradeoff

__all__ = [
    "Applied",
    "AuditReport",
    "BudgetError",
    "BudgetWarning",
    "Budgeted",
    "ChangedSinceForwardError",
    "CheckpointError",
    "Device",
    "Fitted",
    "MembudgetError",
    "MissingExtraError",
    "Offload",
    "OffloadStatus",
    "OptionError",
    "OptionTypeError",
    "OutOfMemoryError",
    "OverwrittenWarning",
    "Peak",
    "Plan",
    "PlanError",
    "Profile",
    "RankError",
    "RecomputeMismatchError",
    "ReentrantLimitError",
    "RegionStatus",
    "Regions",
    "SavedReport",
    "SavedTensor",
    "SelectionError",
    "Status",
    "StepGraph",
    "Sweep",
    "Tradeoff",
    "UnrepeatableWarning",
    "apply",
    "audit",
    "budget",
    "checkpoint",
    "checkpoint_sequential",
    "collect_regions",
    "compat",
    "disable_checkpointing",
    "execution_group",
    "fit",
    "is_recomputing",
    "name",
    "offload",
    "opaque",
    "peak",
    "policies",
    "profile",
    "saved",
    "storage_bytes",
    "sweep",
    "tradeoff",
]

_HOMES = {
    "membudget.apply": ("Applied", "RegionStatus", "Status", "apply"),
    "membudget.audit": ("AuditReport", "audit"),
    "membudget.engine.region": ("checkpoint",),
    "membudget.engine.replay.recorder": ("name", "opaque"),
    "membudget.engine.controls": (
        *("Regions", "collect_regions"),
        *("disable_checkpointing", "is_recomputing"),
    ),
    "membudget.engine.groups": ("execution_group",),
    "membudget.engine.sequential": ("checkpoint_sequential",),
    "membudget.errors": tuple(
        name for name in __all__ if name.endswith(("Error", "Warning"))
    ),
    "membudget.fit": ("fit",),
    "membudget.fitted": ("Fitted",),
    "membudget.graph": ("StepGraph",),
    "membudget.loop": ("Budgeted", "budget"),
    "membudget.memory": (
        "Peak",
        "SavedReport",
        "SavedTensor",
        "peak",
        "saved",
        "storage_bytes",
    ),
    "membudget.offload": ("Offload", "offload"),
    "membudget.offload.status": ("OffloadStatus",),
    "membudget.planner.plan": ("Plan",),
    "membudget.profile": ("Device", "Profile", "Sweep", "profile", "sweep"),
    "membudget.tradeoff": ("Tradeoff", "tradeoff"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name in ("compat", "policies"):
        return import_module(f"membudget.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'membudget' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    """List all public names, including those not imported yet."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `membudget.apply` and `membudget.audit` bound to the public functions.

    On import of the submodule `apply` or `audit`, Python assigns the submodule to the
    package attribute of the same name; `__setattr__` ignores this assignment.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
