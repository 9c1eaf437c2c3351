"""What the next step of an optimizer needs that was not given from the start.

State is made for a parameter in the first step in which it has a gradient, which may be
a late one: layers are dropped at random, or parameters unfrozen.
"""

from __future__ import annotations

from torch.nn import Module
from torch.optim import Optimizer

from membudget.profile.optimizer_step import next_step_bytes


class StepNeeds:
    """Needs of the steps of one model's optimizers."""

    def __init__(self, model: Module):
        """Store the model; no optimizer is known."""
        self._model = model
        self._seen: dict[int, set[int]] = {}
        self._beside_bytes: dict[int, int] = {}

    def bytes_of(self, optimizer: Optimizer) -> int:
        """Return the bytes of state that an optimizer lacks, and of temporaries.

        Its step is recorded if a parameter has a gradient that had none before.

        Raises:
            OptionError: If the optimizer cannot step on fake tensors.
        """
        key = id(optimizer)
        trained = {id(p) for p in self._model.parameters() if p.grad is not None}
        seen = self._seen.setdefault(key, set())
        lacking_bytes = 0
        if not trained <= seen:
            seen |= trained
            lacking_bytes, beside_bytes = next_step_bytes(self._model, optimizer)
            known_bytes = self._beside_bytes.get(key, 0)
            self._beside_bytes[key] = max(known_bytes, beside_bytes)
        return lacking_bytes + self._beside_bytes.get(key, 0)
