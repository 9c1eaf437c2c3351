"""One architecture under test: steps from one state, and what each leaves behind."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from membudget.batch import call_model
from membudget.step import Step, find_loss
from tests.field.case import Case, seed_everything
from tests.field.counting_allocator import peak_bytes

Outcome = dict[str, Any]

FIRST, SECOND, OTHER_SHAPE = "the first batch", "a second batch", "another shape"
EVALUATION = "evaluation"
RUNS = (FIRST, SECOND, OTHER_SHAPE, EVALUATION)
_BATCHES = {FIRST: (1, False), SECOND: (2, False), OTHER_SHAPE: (3, True)}


class Subject:
    """A model with its batches; every step starts from the same state.

    Attributes:
        name: The architecture.
        model: The model.
        steps: A training step on each batch.
    """

    def __init__(self, case: Case) -> None:
        """Make the model and the batches."""
        made = case.make()
        self.name, self.model = case.name, made.model
        self.steps: dict[str, Step] = {}
        for name, (seed, is_other) in _BATCHES.items():
            seed_everything(seed)
            self.steps[name] = Step(made.model, made.batch(is_other), made.loss_fn)
        self._modes = [(m, m.training) for m in made.model.modules()]
        self._tensors = [
            (module, kind, name, tensor, tensor.detach().clone())
            for module in made.model.modules()
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(module, kind).items()
            if tensor is not None
        ]

    def reset(self, batch: str = FIRST) -> None:
        """Make everything what it was, and seed the random streams by the batch."""
        self.model.zero_grad(set_to_none=True)
        for module, training in self._modes:
            module.training = training
        with torch.no_grad():
            for module, kind, name, tensor, value in self._tensors:
                getattr(module, kind)[name] = tensor
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        self.seed(batch)

    def seed(self, batch: str = FIRST) -> None:
        """Seed the random streams by the batch, as `reset` does."""
        seed_everything(100 + _BATCHES[batch][0])

    def outcome(self, run: str) -> Outcome:
        """Run a step, one of `RUNS`, and return all that it leaves behind."""
        if run == EVALUATION:
            return self._evaluation()
        self.reset(run)
        return self._outcome_of(self.steps[run].run)

    def _evaluation(self) -> Outcome:
        """Run a step of the model in evaluation, with gradients and without."""
        self.reset()
        self.model.eval()
        outcome = self._outcome_of(self.steps[FIRST].run)
        self.reset()
        self.model.eval()
        step = self.steps[FIRST]
        with torch.no_grad():
            output = call_model(step.model, step.batch)
            loss_fn = step.loss_fn or (lambda output, _: find_loss(output)[0])
            outcome["loss without gradients"] = loss_fn(output, step.batch)
        self.reset()
        return outcome

    @cached_property
    def plain(self) -> dict[str, Outcome]:
        """What each of `RUNS` leaves behind; read it first while the model is plain."""
        return {run: self.outcome(run) for run in RUNS}

    @cached_property
    def plain_peak_bytes(self) -> int:
        """The peak of the plain step; read it first while the model is plain."""
        self.outcome(FIRST)  # Whatever a first step allocates for good.
        return self.peak_bytes()

    def peak_bytes(self, draws: str = "", seed: int | None = None) -> int:
        """Return the most bytes of a step on the first batch, beyond those before."""
        self.reset()
        if seed is not None:
            seed_everything(seed)
        step = self.steps[FIRST]
        try:
            step.draws = draws
            return peak_bytes(step.run)
        finally:
            step.draws = ""
            self.reset()

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that a step leaves."""
        self.reset()
        self.steps[FIRST].run()
        storages = {
            parameter.grad.untyped_storage().data_ptr(): parameter.grad
            for parameter in self.model.parameters()
            if parameter.grad is not None
        }
        found = sum(grad.untyped_storage().nbytes() for grad in storages.values())
        self.reset()
        return found

    def structure(self) -> Any:
        """Return what code sees of a model: classes, names, keys of the state."""
        kinds = [(name, type(module)) for name, module in self.model.named_modules()]
        own = [sorted(vars(module)) for module in self.model.modules()]
        return kinds, own, list(self.model.state_dict())

    def _outcome_of(self, run: Callable[[], Tensor]) -> Outcome:
        outcome: Outcome = {"loss": run().detach()}
        for name, parameter in self.model.named_parameters():
            outcome[f"gradient {name}"] = parameter.grad
            outcome[f"parameter {name}"] = parameter.detach().clone()
        for name, buffer in self.model.named_buffers():
            outcome[f"buffer {name}"] = buffer.detach().clone()
        outcome["torch's random stream"] = torch.get_rng_state()
        outcome["Python's random stream"] = random.getstate()
        outcome["NumPy's random stream"] = pickle.dumps(
            numpy.random.get_state()  # noqa: NPY002
        )
        self.reset()
        return outcome


def differences(plain: Outcome, other: Outcome) -> list[str]:
    """Return the names of what is not bit for bit the same."""
    names = plain | other
    return [name for name in names if not _equal(plain.get(name), other.get(name))]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return False
    return bool(left == right)
