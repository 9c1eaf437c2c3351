"""What the model carries while a budget is open: it plans and measures its calls.

    loop calls the model ──> situation ──> plan ──> regions on modules
                                           ^
    loss, backward, optimizer ──> measured ┘

A call without gradients is foreseen, and not planned; nothing is done about one that a
recording of ours makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from membudget._torch import may_read_bytes
from membudget._torch_accelerator import HOST
from membudget.allocation import is_out_of_memory
from membudget.attach import CarriedBudget, carried_by, put, remove_region
from membudget.errors import BudgetWarning
from membudget.loop import notes
from membudget.loop.awaited import Awaited, Forward
from membudget.loop.call_recorder import CallRecorder, UnrecordableError
from membudget.loop.casts import CachedCasts
from membudget.loop.evaluation import Evaluations
from membudget.loop.history import History
from membudget.loop.host_room import HostRoom
from membudget.loop.meter import BatchMeter
from membudget.loop.micro_batch import differentiable
from membudget.loop.plans import Plans
from membudget.loop.regions import AGAIN, SMALLEST, RegionSets, explain
from membudget.loop.room import Room
from membudget.loop.situation import (
    Situation,
    has_fakes,
    may_be_trained,
    situation_of,
    sizes_text,
)
from membudget.loop.step_needs import StepNeeds
from membudget.loop.twice import Call, Twice


class Root(CarriedBudget):
    """Attached to a model for as long as a budget is open.

    Attributes:
        model: The model.
        steps: The optimizers of the model's parameters, and what they need.
        plans: Its plans, by situation.
        awaited: Its forwards whose backward pass has yet to begin.
        casts: The casts of its parameters that autocast caches.
        meter: Measures its micro-batches.
        sets: The regions of the model.
        host: What its plans may use of the host.
        has_run: Whether a forward was planned.
        is_retried: Whether `step` runs the micro-batch again if memory runs out.
    """

    def __init__(
        self,
        model: Module,
        room: Room,
        optimizer: Optimizer | None,
        verify: float,
        host: HostRoom | None = None,
    ):
        """Store what to plan for; `attach` puts it on the model."""
        self.model = model
        self.steps = StepNeeds(model, optimizer)
        self.host = host
        self.sets = RegionSets(model, verify, host)
        self.has_run = self.is_retried = False
        self._room = room
        self.casts = CachedCasts(model)
        on = None if host is None else host.device
        self._recorder = CallRecorder(model, optimizer, self.sets, self.casts, on)
        self.plans = Plans(self._recorder.record, host, room.counted.device)
        self.meter = BatchMeter(room.counted)
        self.awaited = Awaited()
        self._evaluations = Evaluations(model, self._recorder, room)
        self._twice = Twice(model, self._recorder, room)
        self._measured: tuple[Situation, History] | None = None
        self._why_not, self._is_told = "", True
        self._is_quiet = self._was_out_of_reach = False
        self._failures: int | None = None  # Of allocations, when a forward ended.
        self._shortages = 0

    def attach(self, owner: object) -> None:
        """Put this on the model, which keeps the owner alive, and begin to count."""
        self._owner: object = owner
        self._room.counted.start()
        put(self.model, self, "")

    def detach(self) -> None:
        """Take this and all regions off the model, and stop measuring."""
        self._owner = None
        try:
            self.end_measurement()
        finally:  # What it warns of may be an error.
            self.meter.peers = ()  # They refer to each other.
            self._room.counted.stop()
            self.sets.clear()
            if carried_by(self.model) is self:
                remove_region(self.model)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the model's forward, under a plan if a backward pass may follow."""
        is_ours = self._is_quiet or self._recorder.is_recording
        if is_ours or has_fakes(self.model, args, kwargs):
            return self._inner(function, args, kwargs)
        self._is_quiet = True  # Calls of the model inside of itself are part of this.
        self.meter.end_others()
        try:
            if may_be_trained(self.model, args, kwargs):
                return self._planned_run(function, args, kwargs)
            self._foresee(args, kwargs)
            return self._inner(function, args, kwargs)
        finally:
            self._is_quiet = False

    def _planned_run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward, begun = self._before(args, kwargs)
        try:
            output = self._inner(function, args, kwargs)
        except BaseException as error:
            self.meter.drop()
            if not self._is_told:  # What cannot run cannot be recorded, either.
                self._why_not, self._is_told = "", True
            if is_out_of_memory(error):
                remedy = AGAIN if self.plans.tighten() else SMALLEST
                if not self.is_retried:
                    explain(error, [self.sets], remedy)
            raise
        if not self._is_told:
            self._is_told = True
            notes.warn_of_no_plan(self.model, self._why_not)
        self.meter.mark("outputs")
        self._failures = self._room.counted.failures()
        self.awaited.add(forward, differentiable(output), begun)
        return output

    def _inner(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.sets.inner is None:
            return function(*args, **kwargs)
        return self.sets.inner.run(function, args, kwargs)

    def _foresee(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call without a plan that needs more than is left."""
        if not may_read_bytes():
            self.sets.clear()
            if not self._was_out_of_reach:
                warnings.warn(notes.OUT_OF_REACH, BudgetWarning, stacklevel=2)
            self._was_out_of_reach = True
        elif not self.awaited.now():  # Else it is measured, as the loss is.
            self.end_measurement()
            self._evaluations.check(args, kwargs)

    # Before the forward.

    def _before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Forward, Callable[[], None]]:
        self.has_run = True
        self._look_for_shortage()
        self.end_measurement()
        awaited = self.awaited.now()
        self.casts.clear(bool(awaited), self.awaited.most)
        has_casts = self.casts.are_there
        called = situation_of(self.model, args, kwargs, len(awaited), has_casts)
        situation = self.plans.numbers.stand_in(called, self._room.counted.is_exact)
        history = self.plans.histories.get(situation)
        if history is None:
            history = self.plans.begin(situation, sizes_text(args, kwargs))
        try:
            with self._recorder.about(args, kwargs):
                forward = self._planned(situation, history, awaited)
        except UnrecordableError as error:
            self._why_not, self._is_told = str(error), False
            forward = Forward()
        if self._why_not:
            self.sets.recompute_all()
            left = self._room.without_plan()
            history.limit_bytes = left.step_bytes if left else 0
            history.absent_bytes = 0
        # On an accelerator, measuring resets what the user may want to read.
        is_free = self._room.counted.device == HOST
        # What an earlier run measured may be otherwise in this one.
        is_new = history.uses == 1 or history.decisions not in history.measured
        is_new |= self.plans.numbers.has_stood_in and history.uses.bit_count() == 1
        if is_free or is_new or self._not_foreseen():
            self.meter.begin(partial(self.plans.room, situation))
            self._measured = situation, history
        call = Call(self.model, args, kwargs) if history.uses == 1 else None
        return forward, partial(self._begun, forward, call, history)

    def _planned(
        self, situation: Situation, history: History, awaited: Sequence[Forward]
    ) -> Forward:
        """Put the plan of a situation on the model; return what it holds."""
        if self._why_not:
            history.uses += 1
            return Forward()
        plans = self.plans
        plans.prepare(situation, history)
        history.summed_bytes = self.awaited.gradient_bytes(self.model, len(awaited))
        most = self.awaited.most
        left = self._room.left(plans, situation, awaited, most, self.steps.optimizer)
        predicted = plans.choose(situation, history, left)
        point = plans.reference(situation)
        if not history.take(predicted, left.limit_bytes):
            predicted = self._room.exceeded(point, history, predicted)
            history.is_warned_of = True  # Once is enough.
        self._twice.check(history, point.recording.output_bytes)
        self.sets.switch(point, predicted.schedule, history.limit_bytes)
        if self.host is not None:
            self.host.begin(predicted.host, is_alone=not awaited)
        return Forward(predicted.held_bytes, point.plain.held_bytes)

    # After the forward.

    def _begun(self, forward: Forward, call: Call | None, history: History) -> None:
        """Note that the backward pass of a forward begins."""
        self.meter.mark("backward")
        self._twice.begun(forward, call, history)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer of the model's parameters is about to step.

        Raises:
            BudgetError: If its step is over budget.
        """
        self._look_for_shortage()
        self.steps.begin(optimizer, is_measured=self.meter.mark("step"))
        if not self.steps.is_given(optimizer) or self._recorder.not_foreseen:
            self._room.check_step(optimizer, self.steps)

    def _not_foreseen(self) -> str:
        """Return why the optimizer's step cannot be recorded; empty if it can."""
        return self._recorder.not_foreseen or self.steps.why_not

    def _look_for_shortage(self) -> None:
        """Tighten the plan if an allocation failed since the last forward ended.

        The error passes from autograd's threads to the loop, which may catch it.
        """
        before, self._failures = self._failures, None
        if before is not None and self._room.counted.failures() > before:
            self._shortages += 1
            self.drop_measurement()
            self.plans.tighten()

    def drop_measurement(self) -> None:
        """Stop measuring, and learn nothing from a micro-batch that failed."""
        self.meter.drop()
        self._measured = self._failures = None

    def end_measurement(self) -> None:
        """Stop measuring, and learn from what was measured."""
        measured, self._measured = self._measured, None
        found = self.meter.end()
        if measured is None or found is None:
            return
        if found.step_bytes is not None:
            self.steps.learn(found.step_bytes)
        situation, history = measured
        self.plans.learn(situation, history, found)
        if history.over_bytes(found.peak_bytes) > 0 and not history.is_warned_of:
            is_other = self.plans.numbers.has_stood_in
            history.is_warned_of = not is_other
            text = notes.exceeded(history, found.peak_bytes, is_other)
            warnings.warn(text, BudgetWarning, stacklevel=2)

    # For people.

    def notes(self) -> Iterator[str]:
        """Yield what a user should know, in sentences."""
        if self._why_not:
            yield f"no plan: the model cannot be recorded ({self._why_not})"
        if self._room.refused:
            yield notes.were_refused(self._room.refused)
        if self._shortages:
            yield notes.found_no_memory(self._shortages)
        if self._was_out_of_reach:
            yield notes.OUT_OF_REACH
        if differing := notes.not_followed(self.sets.differences()):
            yield differing
        if self._room.counted.why_not:
            yield f"not measured: {self._room.counted.why_not}"
        if why_not := self._evaluations.why_not:
            yield f"calls without gradients are not bounded: {why_not}"
        if why_not := self._not_foreseen():
            yield f"the optimizer's step is measured: {why_not}"
