"""Define `profile`, which records one training step on real or fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module

from membudget._torch import is_fake, is_profiling
from membudget.draws import AS_DRAWN
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.profile.cache import Cache
from membudget.profile.chosen_draws import notes_on_draws, recorded_with_most
from membudget.profile.cost import (
    level,
    notes_on,
    roofline,
    roofline_of_optimizer,
    share_out,
)
from membudget.profile.devices import DEVICES, Device, device_of
from membudget.profile.fake import explaining_fakes, fake_tensors, without_meta
from membudget.profile.key import key_of
from membudget.profile.mesh import Parallelize, check_for_mesh, sharded_copy
from membudget.profile.noted_draws import NotedDraws
from membudget.profile.optimizer_step import OptimizerLike, record_optimizer
from membudget.profile.recorded_steps import (
    blocks_of,
    record,
    record_metered,
    recorder_of,
)
from membudget.profile.result import Profile, assemble
from membudget.profile.timing import timed_steps
from membudget.profile.workspace import try_kernels
from membudget.progress import stage
from membudget.sharding import check_replaceable, prepare_units
from membudget.state.bits import emptied_storages
from membudget.step import (
    ABSENT,
    LossFunction,
    Step,
    state_kept,
    step_of,
)


def profile(
    model: Module | Callable[[], Any],
    batch: Any = ABSENT,
    loss_fn: LossFunction | None = None,
    *,
    modules: Module | None = None,
    optimizer: OptimizerLike = None,
    fake: bool | None = None,
    device: str | Device | None = None,
    cache: str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: Parallelize | None = None,
) -> Profile:
    """Profile one training step: saved tensors, cost of each operator, peak memory.

    A step starts with all gradients set to `None` and runs the forward pass, the loss,
    the backward pass and, if given, the optimizer. On real tensors, the step runs once
    to warm up, once to be recorded, and 3 to 15 times to be timed (until half a second
    has passed; 3 times in a process group, where all ranks must run as many steps).
    Where random numbers decide what runs, as where layers are dropped, the step that is
    recorded allocates most (docs/limits.md); to find it takes some more.
    After profiling, parameters, buffers, gradients, the modules' Python state and the
    random number generators are restored.

    On fake tensors, the step runs once and takes only the time of its Python code.
    Operators on integer tensors still run on real memory. In a fake step, code that
    needs the value of an activation (`loss.item()`, a branch, a loop over experts)
    raises an error that names the user's line. Fake operators dispatch as on the
    model's device; a `meta` model is treated as on the CPU.

    Args:
        model: The module to train, whose parameters may be fake or on `meta`; or a step
            function, which takes no arguments, runs forward and backward, and requires
            `modules` instead of `batch`.
        batch: Arguments of the model: a tuple is passed as positional arguments, a
            mapping as keyword arguments, anything else as the only argument.
        loss_fn: Function of output and batch that returns the loss. By default, the
            loss is the output if that is a scalar, else `output.loss` or
            `output["loss"]`, else the sum of all floating-point tensors in the output.
        modules: The module that is trained, if `model` is a step function.
        optimizer: Optimizer whose state and temporaries are counted: an instance over
            the model's parameters, which is not modified, or a class such as
            `torch.optim.AdamW`.
        fake: Whether to run on fake tensors; by default, only if a parameter is fake or
            on `meta`.
        device: Device whose roofline gives the operator times: a name in
            `membudget.profile.devices.DEVICES`, `"cpu"` or a `Device`. By default, real
            steps are timed, and fake steps use the roofline of this machine's CPU.
        cache: Folder in which the profile is kept. No step runs if it has the profile
            of one with the same code, shapes and settings (docs/limits.md).
        mesh: Number of processes along each dimension, such as `{"dp_shard": 8, "tp":
            2}`. The fake step is then that of rank 0 of such a cluster, which has the
            largest shards: a copy of the model is sharded, and no other process is
            needed. The batch is that of one rank, the optimizer a class.
        parallelize: Function of a model and a `DeviceMesh` that shards the copy in
            place, as the training script does. By default, `dp_shard` applies
            `fully_shard` to each block and to the model, and `tp` what `model.tp_plan`
            says.

    Raises:
        OptionError: If `model` is not a module or is lazy, the loss is not a scalar or
            requires no gradient, the device is unknown, a profiler is running, or a
            fake step needs values of tensors or runs under FSDP or DDP, or the mesh has
            dimensions of which nothing is known.

    Not counted: memory outside torch's allocator, and the allocator's rounding;
    generator states (5 KiB each) that regions of the model capture; on fake tensors,
    workspaces of non-CPU kernels and of CPU kernels that are too large to measure; on a
    mesh, the seconds of collectives.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
        >>> found = profile(model, torch.zeros(2, 8), fake=True)
        >>> found.graph.static.parameters, found.graph.flops
        (144, 256)
    """
    step = step_of(model, batch, loss_fn, modules)
    kept = None if cache is None else Cache.at(cache)
    if mesh is None:
        return profile_step(step, optimizer, fake, device, kept)
    check_for_mesh(step, optimizer, fake)
    with sharded_copy(step.model, mesh, parallelize) as sharded:
        step.model = sharded
        return profile_step(step, optimizer, True, device, kept)


def profile_step(
    step: Step,
    optimizer: OptimizerLike = None,
    fake: bool | None = None,
    device: str | Device | None = None,
    cache: Cache | None = None,
) -> Profile:
    """Profile one step; see `profile` for the arguments, and what is raised."""
    target = None if device is None else device_of(device)
    if fake is None:
        fake = not _has_memory(step)
    make = partial(_new_profile, step, optimizer, fake, target)
    if cache is None:
        found = make()
    else:
        found = cache.profile(partial(key_of, step, optimizer, fake, target), make)
    step.draws = found.draws.rstrip(AS_DRAWN)
    return found


def _has_memory(step: Step) -> bool:
    return not any(is_fake(t) or t.is_meta for t in step.model.parameters())


def _new_profile(
    step: Step, optimizer: OptimizerLike, fake: bool, target: Device | None
) -> Profile:
    if fake:
        check_replaceable(step.model)
        with stage("recording the step, without memory"):
            return _fake_profile(step, optimizer, target)
    if not _has_memory(step):
        raise OptionError(
            "the model's parameters are fake or on `meta`, so no real step can run: "
            "pass fake=True, or materialise the model"
        )
    if is_profiling():
        raise OptionError(
            "a profiler is running, whose events and those of membudget.profile cannot "
            "be told apart; leave it first"
        )
    with stage("recording the step"):
        return _real_profile(step, optimizer, target)


def _real_profile(
    step: Step, optimizer: OptimizerLike, target: Device | None
) -> Profile:
    with state_kept(step, has_values=True) as start:
        step.draws = ""
        step.run()  # Warm up: allocator, lazy state of modules, kernel selection.
        make = partial(recorder_of, step, emptied_storages())
        recorder = recorded_with_most(step, start, make, record_metered, step.run)
        static_bytes = record_optimizer(recorder, step, optimizer)
        graph = assemble(recorder, static_bytes)
        timed = [] if target else list(timed_steps(step, blocks_of(step)))
    noted = recorder.noted
    if target is not None:
        return _profile(step, roofline(graph, target), "real", target.name, (), noted)
    timed_graph = level(share_out(roofline_of_optimizer(graph), recorder.events, timed))
    notes = notes_on(recorder.events, timed)
    if optimizer is not None:
        notes += (
            "the optimizer's step was not run: its seconds are this processor's "
            "roofline",
        )
    return _profile(step, timed_graph, "real", "measured", notes, noted)


def _fake_profile(
    step: Step, optimizer: OptimizerLike, target: Device | None
) -> Profile:
    notes: list[str] = []
    with (
        state_kept(step, has_values=False) as start,
        fake_tensors(step.tensors()),
        without_meta(step.model, step.batch) as step.batch,
    ):
        with explaining_fakes():
            prepare_units(step.model)
        make = partial(recorder_of, step, emptied_storages(), is_fake=True)
        recorder = recorded_with_most(step, start, make, record, lambda: None)
        if is_profiling():
            notes.append(
                "a profiler was running, so no kernel was tried; workspaces count as 0"
            )
        elif all(t.device.type == "cpu" for t in step.tensors()):
            untried = try_kernels(recorder)
            if untried:
                notes.append(
                    f"{untried} operators were too large to be tried, or failed on "
                    "zeros; their workspaces count as 0"
                )
        static_bytes = record_optimizer(recorder, step, optimizer)
        graph = assemble(recorder, static_bytes)
        step.prepare()
    target = target or device_of("cpu")
    if target in DEVICES.values() and step.device.type == "cpu":
        notes.append(
            "operators dispatch as on the CPU: attention on the device may save and "
            "need other bytes"
        )
    graph = roofline(graph, target)
    return _profile(step, graph, "fake", target.name, tuple(notes), recorder.noted)


def _profile(
    step: Step,
    graph: StepGraph,
    tensors: str,
    cost: str,
    notes: tuple[str, ...],
    noted: NotedDraws,
) -> Profile:
    return Profile(
        graph=graph,
        model=type(step.model).__name__,
        tensors=tensors,
        cost=cost,
        loss_from=step.loss_from,
        notes=notes + notes_on_draws(noted.letters),
        draws=noted.letters,
        chance=noted.deciding_calls(),
    )
