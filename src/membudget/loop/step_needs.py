"""What the next step of an optimizer needs that was not given from the start.

State is made for a parameter in the first step in which it has a gradient, which may be
a late one: layers are dropped at random, or parameters unfrozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.nn import Module
from torch.optim import Optimizer

from membudget.profile.optimizer_step import next_step_bytes


@dataclass
class _Needs:
    trained: set[int] = field(default_factory=set)  # Parameters, by identity.
    beside_bytes: int = 0


class StepNeeds:
    """Needs of the steps of one model's optimizers."""

    def __init__(self, model: Module):
        """Store the model; no optimizer is known."""
        self._model = model
        # Weak: a later optimizer may have the address of one that is gone.
        self._known: WeakKeyDictionary[Optimizer, _Needs] = WeakKeyDictionary()

    def bytes_of(self, optimizer: Optimizer) -> int:
        """Return the bytes of state that an optimizer lacks, and of temporaries.

        Its step is recorded if a parameter has a gradient that had none before.

        Raises:
            OptionError: If the optimizer cannot step on fake tensors.
        """
        known = self._known.setdefault(optimizer, _Needs())
        trained = {id(p) for p in self._model.parameters() if p.grad is not None}
        lacking_bytes = 0
        if not trained <= known.trained:
            known.trained |= trained
            lacking_bytes, beside_bytes = next_step_bytes(self._model, optimizer)
            known.beside_bytes = max(known.beside_bytes, beside_bytes)
        return lacking_bytes + known.beside_bytes
