"""Record the step of an optimizer, over fake parameters.

The user's optimizer is not modified. A second optimizer with the same class and options
is built over fake parameters and takes two steps with fake gradients: the first creates
the state, the second is recorded. `memory.formulas` computes optimizer-state sizes.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from membudget._torch import new_fake_mode
from membudget._torch_accelerator import counts_on, foreach_devices
from membudget.errors import OptionError
from membudget.memory.peak import storage_bytes
from membudget.ops import tensors_in_tree
from membudget.planner.timeline import timeline
from membudget.profile.fake import AnyNumber, twin
from membudget.profile.result import assemble
from membudget.profile.step_recorder import StepRecorder
from membudget.step import Step

OptimizerLike = Optimizer | type[Optimizer] | None
AnyOptimizer = TypeVar("AnyOptimizer", bound=OptimizerLike)

# `capturable` kernels serve CUDA graphs, and fail on other devices.
_OF_THE_DEVICE = {"capturable"}


def record_optimizer(
    recorder: StepRecorder, step: Step, optimizer: OptimizerLike
) -> int:
    """Record the step of an optimizer, and stop tracking live ranges.

    Returns:
        Bytes of the optimizer's state; 0 without an optimizer.

    Raises:
        OptionError: If the optimizer has none of the model's parameters, or cannot be
            built over fake parameters and take a step.
    """
    if optimizer is None:
        recorder.lifetimes.stop()
        return 0
    optimizer = unwrapped(optimizer)
    _check(optimizer, step)
    trained = [p for p in step.model.parameters() if p.grad is not None]
    mode = new_fake_mode()
    mode.allow_non_fake_inputs = True
    with mode:
        twins = {id(p): twin(p) for p in step.model.parameters()}
        for parameter in trained:
            recorder.lifetimes.know_as(twins[id(parameter)], parameter)
        try:
            with AnyNumber():  # The learning rate may be a tensor.
                double = _double(optimizer, step, twins)
                _choose_kernels(double, step)
            for parameter in trained:
                _set_gradient(recorder, twins[id(parameter)], parameter)
            with AnyNumber():  # Adafactor calls `step.item()`.
                double.step()
            # The first step has created the state: it is live before the second.
            for state in tensors_in_tree(dict(double.state)):
                recorder.lifetimes.know(state, "optimizer", "")
            recorder.begin("optimizer")
            with recorder, AnyNumber():
                double.step()
        except (TypeError, RuntimeError, ValueError) as error:
            name = getattr(optimizer, "__name__", type(optimizer).__name__)
            raise OptionError(
                f"{name} cannot take a step over fake parameters "
                f"({error}); profile without it"
            ) from error
    recorder.lifetimes.stop()
    device = step.device  # Which looks through all tensors.
    return storage_bytes(
        state
        for state in tensors_in_tree(dict(double.state))
        if counts_on(device, state.device)
    )


def unwrapped(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Return the optimizer that steps in one that wraps it, as accelerate's does."""
    inner: Any = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer = inner  # type: ignore[assignment]
        inner = getattr(inner, "optimizer", None)
    return optimizer


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def next_step_bytes(model: Module, optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of state that an optimizer lacks, and its step's peak beside.

    The step is of the parameters that have gradients.

    Raises:
        OptionError: As `record_optimizer` does.
    """
    recorder, state = _recorded(model, optimizer)
    device = recorder.lifetimes.device
    of_trained = [s for p, s in optimizer.state.items() if _has_gradient(p)]
    there = storage_bytes(
        s for s in tensors_in_tree(of_trained) if counts_on(device, s.device)
    )
    return max(0, state - there), timeline(assemble(recorder, state)).peak_bytes


def state_bytes(model: Module, optimizer: OptimizerLike) -> int:
    """Return the bytes of state that an optimizer keeps for a model.

    The state is that of the parameters that have gradients.

    Raises:
        OptionError: As `record_optimizer` does.
    """
    return _recorded(model, optimizer)[1]


def _recorded(model: Module, optimizer: OptimizerLike) -> tuple[StepRecorder, int]:
    """Return the recording of an optimizer's step, and the bytes of its state."""
    step = Step(model, None, None)
    recorder = StepRecorder({}, is_fake=True)
    recorder.lifetimes.device = step.device
    for parameter in model.parameters():
        recorder.lifetimes.know(parameter, "parameter", "")
        if parameter.grad is not None:
            recorder.lifetimes.know(parameter.grad, "outside", "")
    return recorder, record_optimizer(recorder, step, optimizer)


def _has_gradient(key: Any) -> bool:
    return isinstance(key, Tensor) and key.grad is not None


def _choose_kernels(double: Optimizer, step: Step) -> None:
    """Update all parameters at once where the user's optimizer does, by its device.

    By itself, torch updates fake parameters one by one, with fewer temporaries.
    """
    for group in double.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            # A learning rate in a tensor is read anew only by capturable kernels.
            is_plain = group.get("capturable") or not isinstance(group["lr"], Tensor)
            group["foreach"] = is_plain and step.device.type in foreach_devices()


def _check(optimizer: Any, step: Step) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            "optimizer must be a torch.optim.Optimizer, or the class of one; got "
            f"{optimizer!r:.60}"
        )
    if held_by(optimizer).isdisjoint(map(id, step.model.parameters())):
        raise OptionError(
            f"the {type(optimizer).__name__} has none of the model's parameters"
        )


def _set_gradient(recorder: StepRecorder, fake: Tensor, parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    made = torch.empty_like(fake)
    if gradient.layout is torch.sparse_coo:
        values = torch.empty_like(gradient._values(), device="cpu")
        made = torch.sparse_coo_tensor(
            gradient._indices(), values, gradient.shape, check_invariants=False
        )
    fake.grad = made
    recorder.lifetimes.know_as(made, gradient)


def _double(
    optimizer: Optimizer | type[Optimizer], step: Step, twins: dict[int, Tensor]
) -> Optimizer:
    """Return an optimizer like the user's, but over the fake parameters."""
    if isinstance(optimizer, type):
        return optimizer(list(twins.values()))  # type: ignore[call-arg]
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        known = [twins[id(p)] for p in group["params"] if id(p) in twins]
        options = {k: v for k, v in group.items() if k != "params"}
        if known:
            groups.append({**options, "params": known})
    # Some classes add defaults that their constructor does not accept.
    accepted = signature(type(optimizer)).parameters.keys() - _OF_THE_DEVICE
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    double: Optimizer = type(optimizer)(groups, **defaults)
    return double
