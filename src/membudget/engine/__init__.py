"""How one region drops what autograd would save, and gives it back in time."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as TorchCheckpointError

from membudget.errors import CheckpointError, MembudgetError

# `except torch.utils.checkpoint.CheckpointError` must catch what a region raises. The
# base cannot stand in the class statement: `errors` must not import torch.
CheckpointError.__bases__ = (MembudgetError, TorchCheckpointError)
