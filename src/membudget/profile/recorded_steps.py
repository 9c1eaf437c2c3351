"""Record a step: what runs, and when its parts begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.jit import ScriptModule
from torch.nn import Module

from membudget.errors import SelectionError
from membudget.profile.fake import explaining_fakes
from membudget.profile.step_recorder import StepRecorder
from membudget.profile.timing import is_grouped
from membudget.profile.unseen import note_unseen
from membudget.profile.workspace import allocations, note_workspaces
from membudget.selection import default_names
from membudget.sharding import unwrapped_model
from membudget.state.identity import is_leaf
from membudget.step import CallableStep, Step


def record_metered(recorder: StepRecorder, step: Step) -> None:
    """Record one real step, with what its kernels allocate while they run."""
    with allocations(step.device) as meter:
        recorder.around = meter.around
        record(recorder, step, blocks_of(step))
    note_workspaces(recorder, meter.table)
    if not is_grouped():  # All ranks have one graph, whose storages have numbers.
        note_unseen(recorder, meter.before)


def record(
    recorder: StepRecorder, step: Step, blocks: Mapping[str, Module] | None = None
) -> None:
    """Record one step, and leave the gradients on the leaves for the optimizer.

    The recorder's `events` tell when the `blocks` began and ended.
    """
    events, model = recorder.events, unwrapped_model(step.model)
    for name, parameter in model.named_parameters():
        recorder.lifetimes.know(parameter, "parameter", name)
    for name, buffer in model.named_buffers():
        recorder.lifetimes.know(buffer, "buffer", name)
    for name, tensor in step.batch_tensors().items():
        recorder.lifetimes.know(tensor, "input", name)

    def begin_backward() -> None:
        recorder.begin("backward")
        events.note("loss")

    recorder.noted.are_told = bool(step.draws)
    step.on_draw = recorder.note_draw
    try:
        with explaining_fakes(), events.on(dict(blocks or {})), recorder.recording():
            events.note("start")
            step.run(begin_backward)
            events.note("end")
    finally:
        step.on_draw = None
    leaves = [*model.named_parameters(), *step.batch_tensors().items()]
    for name, tensor in leaves:
        if is_leaf(tensor) and tensor.grad is not None:
            recorder.lifetimes.name_gradient(tensor.grad, name)


def recorder_of(
    step: Step, emptied: dict[int, Any], is_fake: bool = False
) -> StepRecorder:
    """Return a recorder for one run of a step that may fill `emptied` storages."""
    modules = {
        name: module
        for name, module in unwrapped_model(step.model).named_modules()
        if not isinstance(module, ScriptModule)  # It can carry no region.
    }
    recorder = StepRecorder(modules, is_fake, isinstance(step, CallableStep), emptied)
    recorder.lifetimes.device = step.device
    return recorder


def blocks_of(step: Step) -> dict[str, Module]:
    """Return the modules whose begin and end divide the time of a step, by path."""
    model = unwrapped_model(step.model)
    try:
        return {name: model.get_submodule(name) for name in default_names(model)}
    except SelectionError:
        return {}
