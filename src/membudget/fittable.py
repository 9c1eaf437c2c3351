"""Reject, before any step runs, what `fit` cannot fit, and say what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature

from torch.jit import ScriptModule
from torch.nn import DataParallel, Module

from membudget._torch_fsdp import is_replaceable
from membudget._torch_modules import is_compiled
from membudget.attach import CarriedBudget, carried_by, has_region
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.sharding import (
    flattened_of,
    is_fully_sharded,
    replicas_of,
    sharding_of,
    units_of,
)
from membudget.step import Step


def check_fittable(step: Step) -> None:
    """Reject a step that no plan is made for, has regions or lacks arguments.

    Raises:
        OptionError: If it is such a step.
    """
    _check_wrapper(step.model)
    _check_class(step.model)
    _check_copies(step.model)
    _check_devices(step.model)
    _check_regions(step.model)
    _check_batch(step)


def check_trains(graph: StepGraph) -> None:
    """Reject a recorded step that ran no backward pass.

    Raises:
        OptionError: If it is such a step.
    """
    if graph.operators and graph.backward_start == graph.optimizer_start:
        raise OptionError(
            "the step ran no backward pass, so there is nothing to recompute: give one "
            "that calls backward(), as in `lambda: model(x).sum().backward()`"
        )


def check_model(model: Module) -> None:
    """Reject a model that can carry no regions, or has some already.

    Raises:
        OptionError: If it is such a model.
    """
    _check_class(model)
    _check_processes(model)
    _check_copies(model)
    _check_devices(model)
    _check_regions(model)


def _check_class(model: Module) -> None:
    if isinstance(model, ScriptModule):
        raise OptionError(
            "the model is a TorchScript module, whose class cannot be changed, so no "
            "region can be put on it or its parts: give the module from which it was "
            "scripted or traced"
        )


def check_apart(models: Sequence[Module]) -> None:
    """Reject no model at all, one given twice, and one that is part of another.

    Raises:
        OptionError: If it is such a list.
    """
    if not models:
        raise OptionError("there is no model to plan for: give at least one")
    if len({id(model) for model in models}) < len(models):
        raise OptionError("one of the models is given twice: give each once")
    for outer in models:
        inside = {id(m) for m in outer.modules() if m is not outer}
        for model in models:
            if id(model) in inside:
                raise OptionError(
                    f"one of the models, {type(model).__name__}, is part of another, "
                    f"{type(outer).__name__}, and each has a plan of its own: give "
                    "those that the loop calls, without their parts"
                )


def check_on_ranks(model: Module, fake: bool, has_host: bool) -> None:
    """Reject what `fit` does for one process alone, where several train a model.

    Raises:
        OptionError: If a fake profile or the host's memory is asked for.
    """
    if has_host:
        raise OptionError(
            f"several processes train {type(model).__name__}, and a plan for all of "
            "them moves nothing to their hosts yet: leave host out"
        )
    if fake:
        raise OptionError(
            f"several processes train {type(model).__name__}, so fit runs real steps "
            "on each of them: omit fake=True. To plan without the cluster, use "
            "profile(model, batch, mesh=...) on the unsharded model in one process"
        )


def _check_wrapper(model: Module) -> None:
    """Reject a model whose parameters FullyShardedDataParallel has flattened."""
    wrapped = flattened_of(model)
    if wrapped:
        raise OptionError(
            f"FullyShardedDataParallel flattens the parameters of {wrapped} modules, "
            "so a plan would name other modules and parameters than the model has: "
            "shard by fully_shard; or give every rank the same rule, as in "
            "apply(model, blocks=Block)"
        )


def _check_processes(model: Module) -> None:
    """Reject a model whose regions may wait for those of other processes."""
    if is_fully_sharded(model):
        _check_units(model)
        return
    sharding, replicas = sharding_of(model), replicas_of(model)
    if sharding is None and replicas > 1:
        sharding = f"DistributedDataParallel averages gradients over {replicas} ranks"
    if sharding is not None:
        raise OptionError(
            f"several processes train {type(model).__name__}: {sharding}. With a plan "
            "per rank, their collectives would no longer match and the ranks would "
            "deadlock. Make one plan for all: call fit(model, batch, budget) on every "
            "rank, with the largest batch of the loop"
        )


def _check_units(model: Module) -> None:
    """Reject a model whose step cannot be recorded beside the shards of this rank."""
    if "" not in units_of(model):
        raise OptionError(
            f"fully_shard shards parts of {type(model).__name__}, and not what the "
            "loop calls: call fully_shard(model), too, after its blocks"
        )
    if not is_replaceable(model):
        raise OptionError(
            f"{type(model).__name__} is sharded along several dimensions, or its "
            "shards are on the host or are not plain tensors, so its calls cannot be "
            "recorded on fake tensors. Make one plan for all ranks: call fit(model, "
            "batch, budget) on every rank, with the largest batch of the loop"
        )


def _check_copies(model: Module) -> None:
    """Reject a model that copies itself for each call, which no recording follows."""
    for name, module in model.named_modules():
        if isinstance(module, DataParallel):
            raise OptionError(
                f"{name or 'the model'!r} is a DataParallel, which copies its module "
                "for each call and calls the copies in threads. Give the module "
                "inside, as in model.module, on one device; or train in several "
                "processes with DistributedDataParallel"
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
    carried = {
        name: carried_by(module)
        for name, module in model.named_modules()
        if has_region(module)
    }
    for name, one in carried.items():
        if isinstance(one, CarriedBudget):
            where = f"{name!r} of " if name else ""
            raise OptionError(
                f"a budget is open on {where}{type(model).__name__}, and plans are "
                "made from the plain step: stop() it first, or leave its context"
            )
    if carried:
        number = f"{len(carried)} region{'s' * (len(carried) > 1)}"
        raise OptionError(
            f"{type(model).__name__} carries {number} already, the first on "
            f"{next(iter(carried)) or 'itself'!r}, and plans are made from the plain "
            "step: remove() what put them there first"
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
