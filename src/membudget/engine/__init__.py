"""Checkpointed regions: drop saved tensors and recompute them in the backward pass.

`region` runs a function under one of two engines, `rerun` (run the function again) or
`replay` (re-run recorded operators). The modules of both engines may import shared
modules, but `replay` never imports `rerun`.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as TorchCheckpointError

from membudget.errors import CheckpointError, MembudgetError

# `except torch.utils.checkpoint.CheckpointError` must catch a region's errors. The base
# class is added here, because `errors` must not import torch.
CheckpointError.__bases__ = (MembudgetError, TorchCheckpointError)
