"""What the next step of an optimizer needs that was not given from the start.

State is made for a parameter in the first step in which it has a gradient, which may be
a late one: layers are dropped at random, or parameters unfrozen.

That of LBFGS reads numbers and calls a closure, so it cannot be recorded on fake
tensors: there is a closed form. Any other step that cannot be recorded is measured.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from membudget.errors import BudgetWarning, OptionError
from membudget.memory.optimizer_states import lbfgs_step_bytes
from membudget.profile.optimizer_step import held_by, next_step_bytes, unwrapped


@dataclass
class _Needs:
    trained: set[int] = field(default_factory=set)  # Parameters, by identity.
    beside_bytes: int = 0
    # The last two: one that makes state says too much of those that have it.
    measured: deque[int] = field(default_factory=lambda: deque(maxlen=2))


def given_to(
    models: Sequence[Module], given: Optimizer | Sequence[Optimizer] | None
) -> list[Optimizer | None]:
    """Return, for each model, the given optimizer that steps most of its parameters.

    Raises:
        OptionError: If something given is no optimizer, or steps none of the models.
    """
    optimizers: list[Any] = [*given] if isinstance(given, list | tuple) else [given]
    found: list[tuple[int, Optimizer | None]] = [(0, None)] * len(models)
    for optimizer in map(unwrapped, optimizers):
        if optimizer is None:
            continue
        if not isinstance(optimizer, Optimizer):
            raise OptionError(
                "optimizer must be a torch.optim.Optimizer, or a list of them; got "
                f"{optimizer!r:.60}"
            )
        held = held_by(optimizer)
        numbers = [sum(id(p) in held for p in model.parameters()) for model in models]
        if not any(numbers):
            raise OptionError(
                f"the {type(optimizer).__name__} steps none of the parameters under "
                "this budget: give the optimizers of its models"
            )
        found = [
            (number, optimizer) if number > most else (most, known)
            for number, (most, known) in zip(numbers, found, strict=True)
        ]
    return [optimizer for _, optimizer in found]


def stepping(models: Sequence[Module], given: Sequence[Any]) -> list[Any]:
    """Return the optimizers that step parameters of some models, not copies of them.

    Warns:
        BudgetWarning: If none does, so that the memory of their steps is not foreseen.
    """
    known = {id(p) for model in models for p in model.parameters()}
    found = [o for o in given if not known.isdisjoint(held_by(unwrapped(o)))]
    if given and not found:
        warnings.warn(
            "no optimizer of the trainer steps the parameters under the budget, but "
            "copies of them, say: what its step takes is not foreseen",
            BudgetWarning,
            stacklevel=3,
        )
    return found


class StepNeeds:
    """Needs of the steps of one model's optimizers.

    An optimizer that was not given is not held: its state is freed when the loop drops
    it.

    Attributes:
        given: The optimizer that was known from the start.
        why_not: Why a step cannot be recorded; empty if all can.
    """

    def __init__(self, model: Module, given: Optimizer | None = None):
        """Store the model, and its optimizer if that is known."""
        self.given = given
        self.why_not = ""
        self._model = model
        # Weak: a later optimizer may have the address of one that is gone.
        self._known: WeakKeyDictionary[Optimizer, _Needs] = WeakKeyDictionary()
        self._noticed: ref[Optimizer] | None = None
        self._stepping: ref[Optimizer] | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the model, given or noticed; `None` if none is known."""
        return self.given or _alive(self._noticed)

    def is_given(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was known from the start."""
        return unwrapped(optimizer) is self.given

    def begin(self, optimizer: Optimizer, is_measured: bool) -> None:
        """Note that an optimizer is about to step, and whether that is measured."""
        if self.optimizer is None:
            self._noticed = ref(optimizer)
        self._stepping = ref(optimizer) if is_measured else None

    def bytes_of(self, optimizer: Optimizer) -> int:
        """Return the bytes of state that an optimizer lacks, and of temporaries.

        Its step is recorded if a parameter has a gradient that had none before. If that
        fails, the next step is expected to take what the last two did.
        """
        inner = unwrapped(optimizer)
        if isinstance(inner, LBFGS):
            return _bytes_of_lbfgs(inner)
        known = self._known_of(optimizer)
        trained = {id(p) for p in self._model.parameters() if p.grad is not None}
        lacking_bytes = 0
        if not trained <= known.trained:
            known.trained |= trained
            try:
                lacking_bytes, beside_bytes = next_step_bytes(self._model, optimizer)
            except OptionError as error:
                self.why_not, beside_bytes = str(error), 0
            known.beside_bytes = max(known.beside_bytes, beside_bytes)
        if self.why_not and len(known.measured) == 2:
            return min(known.measured)
        return lacking_bytes + known.beside_bytes

    def learn(self, took_bytes: int) -> None:
        """Note what a step took, or the part of one behind a call of its closure."""
        optimizer = _alive(self._stepping)
        if optimizer is not None:
            self._known_of(optimizer).measured.append(took_bytes)

    def _known_of(self, optimizer: Optimizer) -> _Needs:
        return self._known.setdefault(optimizer, _Needs())


def _alive(optimizer: ref[Optimizer] | None) -> Optimizer | None:
    return None if optimizer is None else optimizer()


def _bytes_of_lbfgs(optimizer: LBFGS) -> int:
    (group,) = optimizer.param_groups  # It allows no other.
    parameters_bytes = sum(parameter.nbytes for parameter in group["params"])
    searches_line = group["line_search_fn"] is not None
    return lbfgs_step_bytes(parameters_bytes, searches_line=searches_line)
