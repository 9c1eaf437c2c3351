"""Train PyTorch models in the memory that you have."""

from membudget import compat
from membudget.apply import Applied, RegionStatus, Status, apply
from membudget.engine.region import checkpoint
from membudget.engine.retention import execution_group
from membudget.engine.sequential import checkpoint_sequential
from membudget.engine.switches import disable_checkpointing, is_recomputing
from membudget.errors import (
    ChangedSinceForwardError,
    CheckpointError,
    MembudgetError,
    MissingExtraError,
    OptionError,
    RecomputeMismatchError,
    ReentrantLimitError,
    SelectionError,
)

__all__ = [
    "Applied",
    "ChangedSinceForwardError",
    "CheckpointError",
    "MembudgetError",
    "MissingExtraError",
    "OptionError",
    "RecomputeMismatchError",
    "ReentrantLimitError",
    "RegionStatus",
    "SelectionError",
    "Status",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "compat",
    "disable_checkpointing",
    "execution_group",
    "is_recomputing",
]
