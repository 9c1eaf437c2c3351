"""Reject, before any step runs, what `fit` cannot fit, and say what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature

from torch.nn import Module

from membudget._torch_modules import is_compiled
from membudget.attach import has_region
from membudget.errors import OptionError
from membudget.sharding import replicas_of, sharding_of
from membudget.step import Step


def check_fittable(step: Step) -> None:
    """Reject a step that waits for other processes, has regions or lacks arguments.

    Raises:
        OptionError: If it is such a step.
    """
    check_model(step.model)
    _check_batch(step)


def check_model(model: Module) -> None:
    """Reject a model that waits for other processes, or has regions.

    Raises:
        OptionError: If it is such a model.
    """
    _check_processes(model)
    _check_devices(model)
    _check_regions(model)


def check_apart(models: Sequence[Module]) -> None:
    """Reject several models of which one is part of another.

    Raises:
        OptionError: If one is.
    """
    for outer in models:
        inside = {id(m) for m in outer.modules() if m is not outer}
        for model in models:
            if id(model) in inside:
                raise OptionError(
                    f"one of the models, {type(model).__name__}, is part of another, "
                    f"{type(outer).__name__}, and each has a plan of its own: give "
                    "those that the loop calls, without their parts"
                )


def _check_processes(model: Module) -> None:
    """Reject a model whose steps wait for those of other processes."""
    sharding = sharding_of(model)
    if sharding is not None:
        raise OptionError(
            f"{type(model).__name__} is sharded: {sharding}. Each rank would plan from "
            "its own times, and ranks whose steps differ wait for each other forever. "
            "Give every rank the same rule, as in apply(model, blocks=Block); "
            "profile(model, batch) tells a rank's bytes"
        )
    replicas = replicas_of(model)
    if replicas > 1:
        raise OptionError(
            f"DistributedDataParallel averages gradients over {replicas} processes in "
            "each step. Each rank would plan from its own times, and ranks that try "
            "different numbers of plans wait for each other forever. Fit what is "
            "wrapped, whose steps wait for nobody: fit(model.module, ...); or do so on "
            "one rank, save the plan by plan.to_json(path), and apply(model.module, "
            "path) on all"
        )


def _check_devices(model: Module) -> None:
    """Reject a model that trains on several devices, whose bytes are not one budget."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise OptionError(
            f"the parameters of {type(model).__name__} are on {' and '.join(devices)}, "
            "and a budget is of one device. Give each device's part regions by a rule, "
            "as in apply(model, blocks=Block), whose gradients are those of the plain "
            "step; peak(step).devices tells what each device takes"
        )


def _check_regions(model: Module) -> None:
    """Reject a model with regions: plans are made from the plain step."""
    carrying = [name for name, module in model.named_modules() if has_region(module)]
    if carrying:
        raise OptionError(
            f"{type(model).__name__} carries {len(carrying)} regions already, the "
            f"first on {carrying[0] or 'itself'!r}, and plans are made from the plain "
            "step: remove() them first"
        )


def _check_batch(step: Step) -> None:
    """Reject an empty batch, unless the model is called with nothing."""
    model, batch = step.model, step.batch
    if isinstance(batch, Mapping | tuple) and not batch:
        try:
            signature(model.forward).bind()
        except TypeError as error:
            raise OptionError(
                f"the batch is an empty {type(batch).__name__}, so "
                f"{type(model).__name__} would be called with nothing ({error}): give "
                "what it is called with"
            ) from error


def check_not_compiled(model: Module) -> None:
    """Reject a model with compiled blocks, whose operators cannot be observed.

    Raises:
        OptionError: If there are any.
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            raise OptionError(
                f"{name or 'the model'!r} is compiled: the operators inside are not "
                "seen, so no plan can be made for them. Open the budget on the model "
                "without torch.compile"
            )
