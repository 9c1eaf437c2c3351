"""One training step: call the model on a batch, compute a loss, run the backward pass.

The step does what a user's loop does, and can run many times. The output is released
before the backward pass; gradients are `None` before the step, as after `zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch_accelerator import main_device
from membudget.allocation import is_out_of_memory, let_go
from membudget.batch import call_model, explain_call, first_batch, is_pair
from membudget.draws import drawing
from membudget.errors import MembudgetError, OptionError
from membudget.rehearsal import Rehearsal
from membudget.sharding import not_a_module
from membudget.state.autocast import clear_casts, outside_autocast
from membudget.state.identity import is_leaf
from membudget.state.optimizers import optimizers_kept
from membudget.state.snapshot import State
from membudget.state.variables import variables_kept
from membudget.state.walk import walk

LossFunction = Callable[[Any, Any], Tensor]


def find_loss(output: Any) -> tuple[Tensor, str]:
    """Return a loss for an output, without a loss function.

    Returns:
        The loss, and where it comes from, in words.

    Raises:
        OptionError: If the output has no floating tensor.
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
            f"the model returned a {type(output).__name__} without a floating-point "
            "tensor, so there is no loss to compute; pass loss_fn(output, batch)"
        )
    sums = [tensor.float().sum().to(tensors[0].device) for tensor in tensors]
    plural = "" if len(sums) == 1 else "s"
    return (
        torch.stack(sums).sum(),
        f"the sum of the output's {len(sums)} floating-point tensor{plural} (no "
        "loss_fn given)",
    )


class Step:
    """Forward, loss and backward of a model on a batch.

    Attributes:
        model: The model.
        batch: The batch; `batch.py` tells how model and loss are called with it.
        loss_fn: Computes the loss. With `None`, the loss is what `training_step` of the
            model returns (Lightning), or what `find_loss` finds in the output.
        loss_from: Where the loss came from in the last run, in words.
        optimizer: What stands in for the optimizer where the step is metered.
        limit_bytes: What the step may reserve there, if that is limited.
        draws: Letters for the random numbers by which the model chooses what to run;
            see `draws`.
        on_draw: Called for each of them; see `drawing`.
    """

    def __init__(self, model: Module, batch: Any, loss_fn: LossFunction | None):
        """Define the step; nothing runs, but a `DataLoader` makes its first batch."""
        self.model = model
        self.batch = first_batch(batch)
        self._is_pair = is_pair(model, self.batch, loss_fn)
        self.start: State | None = None
        self.optimizer = Rehearsal()
        self.limit_bytes: int | None = None
        self.draws = ""
        self.on_draw: Callable[[], None] | None = None
        self.loss_from = f"loss_fn(output, {'targets' if self._is_pair else 'batch'})"
        self.loss_fn = loss_fn

    def run(self, before_backward: Callable[[], None] | None = None) -> Any:
        """Run the step and return the loss; between the passes, call `before_backward`.

        Raises:
            OptionError: As `forward` does.
        """
        if not self.draws and self.on_draw is None:
            return self.run_as_drawn(before_backward)
        with drawing(self.draws, self.on_draw or (lambda: None)):
            return self.run_as_drawn(before_backward)

    def run_as_drawn(self, before_backward: Callable[[], None] | None) -> Any:
        """Run the step, whatever random numbers it draws."""
        clear_casts()  # Each step casts the parameters anew.
        loss = self.forward()
        with outside_autocast():
            if before_backward is not None:
                before_backward()
            loss.backward()
        return loss

    def forward(self, on_output: Callable[[Any], None] | None = None) -> Tensor:
        """Run only the forward and return the loss.

        `on_output` gets the output before the loss function can write into it.

        Raises:
            OptionError: If the loss is not one number, or requires no gradient.
        """
        try:
            loss = self._loss(on_output or (lambda output: None))
        except MembudgetError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                explain_call(error, self.model, self.batch, self.loss_fn)
            raise
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

    def _loss(self, on_output: Callable[[Any], None]) -> Any:
        training_step = getattr(self.model, "training_step", None)
        if self.loss_fn is None and callable(training_step):
            loss, where = find_loss(training_step(self.batch, 0))
            self.loss_from = where.replace("the model's output", "training_step")
            return loss
        inputs, targets = self.batch if self._is_pair else (self.batch, self.batch)
        output = call_model(self.model, inputs)
        on_output(output)
        if self.loss_fn is not None:
            return self.loss_fn(output, targets)
        loss, self.loss_from = find_loss(output)
        return loss

    def prepare(self) -> None:
        """Set gradients to `None`; restore `start`, if there is one."""
        if self.start is not None:
            self.start.restore()
        for tensor in self.leaves():
            tensor.grad = None

    def leaves(self) -> Iterator[Tensor]:
        """Yield the parameters, and the batch's leaves that require a gradient."""
        yield from self.model.parameters()
        for tensor in self.batch_tensors().values():
            if is_leaf(tensor) and tensor.requires_grad:
                yield tensor

    def roots(self) -> dict[str, Any]:
        """Return the objects that the step may change, keyed by name."""
        roots = {"": self.model, "batch": self.batch, "loss_fn": self.loss_fn}
        return {name: root for name, root in roots.items() if root is not None}

    def decided_by(self) -> dict[str, Any]:
        """Return the objects that decide what the step runs, keyed by name."""
        return self.roots()

    def batch_tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the batch, keyed by expressions such as `batch[0]`."""
        found = walk([("batch", self.batch)]).tensors
        return {name: tensor for name, (_, tensor) in found.items()}

    @property
    def device(self) -> torch.device:
        """The accelerator's device that has most of the model or batch, or the CPU."""
        return main_device(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the model and of the batch."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.batch_tensors().values()


def device_of_model(model: Module) -> torch.device:
    """Return the device on which a model's operators run.

    A model on `meta` is recorded as on the CPU.
    """
    return main_device((*model.parameters(), *model.buffers()))


class CallableStep(Step):
    """A step that the user wrote: forward and backward in one function."""

    def __init__(self, function: Callable[[], Any], model: Module):
        """Define the step of a function and the model that it trains."""
        super().__init__(model, None, None)
        self._function = function
        self.loss_from = "the step itself"

    def run_as_drawn(self, before_backward: Callable[[], None] | None) -> Any:
        """Call the function; `before_backward` is not called."""
        return self._function()

    def decided_by(self) -> dict[str, Any]:
        """Return the objects that decide what the step runs, keyed by name."""
        return {**self.roots(), "step": self._function}


@contextmanager
def state_kept(step: Step, has_values: bool) -> Iterator[State]:
    """Restore the step's state on exit; inside, runs begin with one state of the batch.

    So is that of optimizers that step in it, and of variables that its code names.
    With `has_values`, `step.prepare()` restores the batch and the random number
    generators as they are now, so that each run of the step draws the same numbers. It
    leaves the model as the last run did: what the first run made, such as tables of
    positions, later steps find.

    Yields:
        The state of model, loss function and batch, without gradients.
    """
    whole = State(step.roots().items(), contents=has_values)
    batch = State([("batch", step.batch)], contents=has_values, part_of=whole)
    try:
        whole.restore()
        step.start = batch if has_values else None
        code = variables_kept(step.decided_by().values(), is_fake=not has_values)
        grad = torch.enable_grad()
        with torch.inference_mode(False), grad, code, optimizers_kept(whole):
            yield whole
    except BaseException as error:
        let_go(error)
        raise
    finally:
        step.start = None
        whole.restore()
        whole.restore_gradients()


ABSENT: Any = object()
"""The batch of a step that the user wrote."""


def step_of(
    model: Any, batch: Any, loss_fn: LossFunction | None, modules: Module | None
) -> Step:
    """Return the step of a model on a batch, or the user's own step.

    Raises:
        OptionError: If the arguments are neither `(model, batch)` nor `(step,
            modules=model)`, the model is no initialised module, or a loader is empty.
    """
    if modules is None:
        if batch is ABSENT:
            raise OptionError(
                "give the batch, as in (model, batch), or a step of your own, as in "
                "(step, modules=model)"
            )
        check_arguments(model)
        return Step(model, batch, loss_fn)
    if not callable(model) or batch is not ABSENT or loss_fn is not None:
        raise OptionError(
            "modules= is for a step function that runs forward and backward, as in "
            "(step, modules=model)"
        )
    check_arguments(modules)
    return CallableStep(model, modules)


def check_arguments(model: Any) -> None:
    """Reject anything that is not an initialised module.

    Raises:
        OptionError: If `model` is not a module, or is lazy and has no shapes yet.
    """
    if not isinstance(model, Module):
        raise not_a_module(model)
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise OptionError(
                f"{name!r} has no shape yet, because its module is lazy: run the model "
                "once first"
            )
