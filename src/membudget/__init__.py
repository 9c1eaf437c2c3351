"""Train PyTorch models in the memory that you have."""

from membudget.engine.region import checkpoint
from membudget.engine.retention import execution_group
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
    "ChangedSinceForwardError",
    "CheckpointError",
    "MembudgetError",
    "MissingExtraError",
    "OptionError",
    "RecomputeMismatchError",
    "ReentrantLimitError",
    "SelectionError",
    "checkpoint",
    "disable_checkpointing",
    "execution_group",
    "is_recomputing",
]
