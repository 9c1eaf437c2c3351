"""Regions: drop what autograd would save, and recompute it for the backward pass.

`region` runs a function under one of two engines, `rerun` (run the function again) or
`replay` (re-run recorded operators). Imports point from `region` to the two frames,
from there to what both share; `replay` never imports `rerun`.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as TorchCheckpointError

from membudget.errors import CheckpointError, MembudgetError

# `except torch.utils.checkpoint.CheckpointError` must catch a region's errors. The base
# cannot stand in the class statement, because `errors` must not import torch.
CheckpointError.__bases__ = (MembudgetError, TorchCheckpointError)
