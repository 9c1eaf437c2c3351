"""One training step: the batch given to the model, a loss, a backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from membudget.audit.compare import Results
from membudget.audit.walk import walk
from membudget.errors import OptionError

LossFunction = Callable[[Any, Any], Tensor]


def call_model(model: Module, batch: Any) -> Any:
    """Call a model on a batch: a tuple as arguments, a mapping as keywords.

    Anything else is the one argument: a tensor, a list, a dataclass, a named tuple.
    """
    if isinstance(batch, Mapping) and not dataclasses.is_dataclass(batch):
        return model(**batch)
    if type(batch) is tuple:
        return model(*batch)
    return model(batch)


def find_loss(output: Any) -> tuple[Tensor, str]:
    """Return a loss for an output, where the user gave no loss function.

    Returns:
        The loss, and where it comes from, in words.

    Raises:
        OptionError: If the output holds no floating tensor.
    """
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return output, "the model's output"
    loss = output.get("loss") if isinstance(output, Mapping) else None
    where = "output['loss']"
    if loss is None:
        loss, where = getattr(output, "loss", None), "output.loss"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()), where
    tensors = [
        tensor
        for _, tensor in walk([("output", output)], "output").tensors.values()
        if tensor.is_floating_point()
    ]
    if not tensors:
        raise OptionError(
            f"the model returned no floating tensor to make a loss of, but "
            f"{type(output).__name__}; pass loss_fn(output, batch)"
        )
    total = torch.stack(
        [tensor.float().sum().to(tensors[0].device) for tensor in tensors]
    )
    plural = "" if len(tensors) == 1 else "s"
    return (
        total.sum(),
        f"the sum of the output's {len(tensors)} floating tensor{plural}, "
        f"for want of a loss_fn",
    )


class TrainingStep:
    """Forward, loss and backward of a model on a batch.

    Attributes:
        loss_from: Where the loss came from in the last run, in words.
    """

    def __init__(self, model: Module, batch: Any, loss_fn: LossFunction | None) -> None:
        """Hold what the step needs; nothing runs."""
        self._model = model
        self._batch = batch
        self._loss_fn = loss_fn
        self.loss_from = "loss_fn(output, batch)"

    def run(self) -> Results:
        """Run the step, and hold its output and its loss.

        Raises:
            OptionError: If the loss is not one number.
        """
        results = Results()
        output = call_model(self._model, self._batch)
        # Held before the loss function can write into it.
        results.hold("output", output)
        if self._loss_fn is None:
            loss, self.loss_from = find_loss(output)
        else:
            loss = self._loss_fn(output, self._batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = (
                list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise OptionError(
                f"loss_fn must return a tensor of one element; it returned {shape}"
            )
        results.hold("loss", loss)
        del output
        loss.backward()
        return results
