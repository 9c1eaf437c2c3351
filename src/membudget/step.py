"""One training step: call the model on a batch, compute a loss, run the backward pass.

A step is one iteration of a training loop, without the optimizer; it can be repeated.
The model's output is released before the backward pass; gradients are `None` before the
step, as after `zero_grad()`. `call_make` builds model and batch by calling a function
that the user supplies.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from membudget.errors import OptionError
from membudget.state.snapshot import State
from membudget.state.walk import walk

LossFunction = Callable[[Any, Any], Tensor]


def call_model(model: Module, batch: Any) -> Any:
    """Call a model on a batch.

    A tuple is passed as positional arguments, a mapping as keywords, and anything else
    (a tensor, a list, a dataclass, a named tuple) as the only argument.
    """
    if isinstance(batch, Mapping) and not dataclasses.is_dataclass(batch):
        return model(**batch)
    if type(batch) is tuple:
        return model(*batch)
    return model(batch)


def find_loss(output: Any) -> tuple[Tensor, str]:
    """Derive a loss from a model's output, for a step without a loss function.

    Returns:
        The loss, and a short description of where it comes from.

    Raises:
        OptionError: If the output contains no floating-point tensor.
    """
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return output, "the model's output"
    loss = output.get("loss") if isinstance(output, Mapping) else None
    where = "output['loss']"
    if loss is None:
        loss, where = getattr(output, "loss", None), "output.loss"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()), where
    found = walk([("output", output)], "output").tensors.values()
    tensors = [tensor for _, tensor in found if tensor.is_floating_point()]
    if not tensors:
        raise OptionError(
            f"the model returned no floating tensor to make a loss of, but "
            f"{type(output).__name__}; pass loss_fn(output, batch)"
        )
    sums = [tensor.float().sum().to(tensors[0].device) for tensor in tensors]
    plural = "" if len(sums) == 1 else "s"
    return (
        torch.stack(sums).sum(),
        f"the sum of the output's {len(sums)} floating tensor{plural}, "
        f"for want of a loss_fn",
    )


class Step:
    """Forward, loss and backward pass of a model on one batch.

    Attributes:
        model: The model.
        batch: What the model is called with; see `call_model`.
        loss_fn: Called with the output and the batch; `None` uses `find_loss`.
        loss_from: Short description of where the last run's loss came from.
    """

    def __init__(self, model: Module, batch: Any, loss_fn: LossFunction | None):
        """Define the step without running it."""
        self.model = model
        self.batch = batch
        self._batch_state: State | None = None
        self.loss_from = "loss_fn(output, batch)"
        self.loss_fn = loss_fn

    def run(self, before_backward: Callable[[], None] | None = None) -> Tensor:
        """Run the step, calling `before_backward` after the forward; return the loss.

        Raises:
            OptionError: If the loss is not a single number, or requires no gradient.
        """
        loss = self.forward()
        if before_backward is not None:
            before_backward()
        loss.backward()
        return loss

    def repeat_from_here(self) -> None:
        """Make `prepare` restore the current state of the batch and random streams."""
        self._batch_state = State([("batch", self.batch)])

    def forward(self, on_output: Callable[[Any], None] | None = None) -> Tensor:
        """Run only the forward and return the loss.

        `on_output` receives the model's output before the loss function can modify it.

        Raises:
            OptionError: If the loss is not a single number, or requires no gradient.
        """
        output = call_model(self.model, self.batch)
        if on_output is not None:
            on_output(output)
        if self.loss_fn is None:
            loss, self.loss_from = find_loss(output)
        else:
            loss = self.loss_fn(output, self.batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            found = list(loss.shape) if is_tensor else type(loss).__name__
            raise OptionError(
                f"loss_fn must return a tensor of one element; it returned {found}"
            )
        if not loss.requires_grad:
            raise OptionError(
                "the loss does not require a gradient, so there is no backward pass: "
                "every parameter is frozen, or the forward ran under no_grad"
            )
        return loss

    def prepare(self) -> None:
        """Restore the state that `repeat_from_here` saved; set gradients to `None`."""
        if self._batch_state is not None:
            self._batch_state.restore()
        for tensor in self.leaves():
            tensor.grad = None

    def leaves(self) -> Iterator[Tensor]:
        """Yield all parameters, and the batch's leaf tensors that require gradients."""
        yield from self.model.parameters()
        for tensor in self.batch_tensors().values():
            if tensor.is_leaf and tensor.requires_grad:
                yield tensor

    def batch_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch, keyed by names such as `batch['labels']`."""
        found = walk([("batch", self.batch)]).tensors
        return {name: tensor for name, (_, tensor) in found.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the model and of the batch."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.batch_tensors().values()


class CallableStep(Step):
    """A user-defined step: one function runs the forward and the backward."""

    def __init__(self, function: Callable[[], Any], model: Module):
        """Store the function that runs the step, and the model that it trains."""
        super().__init__(model, None, None)
        self._function = function
        self.loss_from = "the step itself"

    def run(self, before_backward: Callable[[], None] | None = None) -> Any:
        """Run the step by calling the user's function; ignore `before_backward`."""
        return self._function()


def check_arguments(model: Any) -> None:
    """Reject anything that is not an initialised module.

    Raises:
        OptionError: If `model` is not a module, or has lazy parameters without shapes.
    """
    if not isinstance(model, Module):
        raise OptionError(
            f"expected a torch.nn.Module and its batch; got {type(model).__name__}"
        )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise OptionError(
                f"{name!r} has no shape yet, because its module is lazy: run the model "
                "once first"
            )


def call_make(make: Callable[..., Any], sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Call `make` with sizes as keywords; return model, batch and loss function.

    Raises:
        OptionError: If `make` rejects the sizes or does not return a pair or triple.
    """
    name = getattr(make, "__name__", "make")
    try:
        inspect.signature(make).bind(**sizes)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in sizes.items())
        raise OptionError(f"{name}({given}) cannot be called: {error}") from error
    made = make(**sizes)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise OptionError(
            f"{name} must return (model, batch) or (model, batch, loss_fn); it "
            f"returned a {type(made).__name__}"
        )
    model, batch, *loss = made
    return model, batch, loss[0] if loss else None
