"""Record a step: what runs, and when its parts begin."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Module

from membudget.errors import SelectionError
from membudget.profile.events import TimerEvents
from membudget.profile.fake import explaining_fakes
from membudget.profile.step_recorder import StepRecorder
from membudget.profile.timing import timed_steps
from membudget.profile.workspace import allocations, note_workspaces
from membudget.selection import default_names
from membudget.sharding import unwrapped_model
from membudget.state.identity import is_leaf
from membudget.step import CallableStep, Step


def timed_record(
    step: Step, is_timed: bool
) -> tuple[StepRecorder, TimerEvents, list[TimerEvents]]:
    """Time a step some times, and record it once."""
    blocks = _blocks(unwrapped_model(step.model))
    timed = list(timed_steps(step, blocks)) if is_timed else []
    step.prepare()
    recorder = recorder_of(step)
    events = TimerEvents(lambda: len(recorder.operators))
    with allocations(step.device) as meter:
        recorder.around = meter.around
        record(recorder, step, events, blocks)
    note_workspaces(recorder, meter.table)
    return recorder, events, timed


def record(
    recorder: StepRecorder,
    step: Step,
    events: TimerEvents | None = None,
    blocks: Mapping[str, Module] | None = None,
) -> None:
    """Record one step, and leave the gradients on the leaves for the optimizer.

    Nothing is timed without `events`: the seconds come from a roofline.
    """
    events = events or TimerEvents(lambda: 0)
    recorder.lifetimes.know_freed()
    model = unwrapped_model(step.model)
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


def recorder_of(step: Step, is_fake: bool = False) -> StepRecorder:
    """Return a recorder for one run of a step."""
    modules = dict(unwrapped_model(step.model).named_modules())
    recorder = StepRecorder(modules, is_fake, isinstance(step, CallableStep))
    recorder.lifetimes.device = step.device
    return recorder


def _blocks(model: Module) -> dict[str, Module]:
    try:
        return {name: model.get_submodule(name) for name in default_names(model)}
    except SelectionError:
        return {}
