"""Recompute dropped tensors by re-running the recorded operations they depend on.

When autograd first unpacks a dropped tensor, the replayer makes a *plan*: it counts how
often live handles and recorded operations will use each value. Each request for a
tensor then runs only the operations that the tensor depends on, in forward order.
Recomputed values stay in memory until their last use in the plan, so each operation
runs at most once per backward pass. Unpacking a handle a second time starts a new plan,
so that a second backward pass recomputes the tensors again.

If the backward pass is divided into *stages*, each plan serves the handles of one
stage. Each stage starts with a new plan, which reuses values from earlier stages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget._torch import (
    BelowAutograd,
    WithoutAutocast,
    current_graph_task_id,
    set_grad_enabled,
)
from membudget._torch_accelerator import current_stream, enter_stream
from membudget.engine.replay.execute import is_freed_parameter
from membudget.engine.replay.lending import lend, lend_inputs
from membudget.engine.replay.shared_memory import is_read_by, sharing
from membudget.engine.replay.tape import Operation, ReplayHandle, TapeValue
from membudget.engine.replay.uses import UseCounter
from membudget.engine.stages import CallStages
from membudget.scope import Scope
from membudget.state.copies import copy_of
from membudget.state.identity import version_of


class Replayer(UseCounter):
    """Recomputes the saved tensors of one region on request.

    Attributes:
        plans_run: Number of plans that ran operations; the stages of one backward pass
            count once.
        stream: The stream on which the region began; `None` without an accelerator.
        trip: What the call has instead of a tape, if it has followed a route (Rule 11).
    """

    __slots__ = ("_enter", "_plan_ran", "_task", "plans_run", "stream", "trip")

    def __init__(
        self, enter: Callable[[Scope], None], stages: CallStages | None
    ) -> None:
        """Create a replayer; `enter` restores the modes and settings of the forward."""
        super().__init__(stages)
        self.plans_run = 0
        self._plan_ran = 0
        self._enter = enter
        self.stream = current_stream()
        self._task = -1  # The backward for which the plan was made.
        self.trip: Any = None

    def take_ready(self, handle: ReplayHandle, stays: bool) -> Tensor | None:
        """Return a handle's tensor if nothing has to be planned, run or refused."""
        value = handle.value
        tensor = value.tensor
        if tensor is None:
            return None
        if value.is_held():
            is_same = value.version == version_of(tensor)
            return tensor if is_same and not is_freed_parameter(tensor) else None
        is_of_stage = self._stage == -1 or (self._stage == handle.stage and not stays)
        if handle.served == self._plan or not is_of_stage:
            return None
        return self._serve(handle, tensor, stays)

    def take(self, handle: ReplayHandle, stays: bool) -> Tensor:
        """Return a handle's tensor; with `stays`, keep it for another backward pass."""
        value = handle.value
        if value.is_held():
            return self._content(value)
        stage = -1 if stays else handle.stage
        if handle.served == self._plan or self._stage not in (-1, stage):
            self._make_plan(stage)
        if value.tensor is None:
            # Each backward pass needs a new plan: handles may have died in between.
            if self._task != current_graph_task_id():
                self._make_plan(stage)
            self._materialise(value)
        assert value.tensor is not None
        return self._serve(handle, value.tensor, stays)

    def _serve(self, handle: ReplayHandle, tensor: Tensor, stays: bool) -> Tensor:
        value = handle.value
        if self.stream is not None:
            lend(value, self.stream)
        if stays:
            return tensor
        handle.served = self._plan
        self._used(value)
        return self._lent(value, tensor)

    def _lent(self, value: TapeValue, tensor: Tensor) -> Tensor:
        """Return a tensor, or a copy of it, that backward kernels may overwrite.

        Several saved tensors may share memory, as in plain autograd. Autograd gets a
        copy if the plan or another stage has yet to read recomputed memory. A view of a
        source is given as the source itself is: a write raises at the next read.
        """
        owner = value.root or value
        if owner.operation is None:
            return tensor
        if any(map(self._is_still_read, sharing(owner))):
            return copy_of(tensor)
        return tensor

    def _is_still_read(self, owner: TapeValue) -> bool:
        if owner.plan == self._plan and owner.reads > 0:
            return True
        return owner.is_carried and self._is_read_later(owner)

    def _is_read_later(self, owner: TapeValue) -> bool:
        """Return whether another stage may read the memory of a value."""
        others = [h.value for h in self.living() if h.stage != self._stage]
        return is_read_by(others, owner)

    def prepare(self) -> None:
        """Recompute the values of all live handles now."""
        self._make_plan(-1)
        for value in self._wanted():
            if value.tensor is None:
                self._materialise(value)

    def release(self) -> None:
        """Free recomputed values that autograd has not unpacked."""
        for value in self._memoised:
            if not value.is_held():
                value.tensor = None
        self._memoised.clear()
        self._entries.clear()
        self._plan_ran = 0
        self._task = -2  # Makes the next request start a plan.

    def _make_plan(self, stage: int) -> None:
        self._plan += 1
        self._stage = stage
        is_same = self._task == current_graph_task_id()
        self._task = current_graph_task_id()
        self._enter_turn()
        self._count_path()
        before, self._memoised = self._memoised, {}
        if stage >= 0:
            self._count_held(ref(v) for v in before if v.tensor is not None)
            for value in self._entries.intersection(before):
                self._carry(value)
        for value in before:
            if value.is_held() or value.tensor is None:
                continue
            is_needed = value.plan == self._plan and value.uses > 0
            if is_needed or (is_same and self._is_unpacked_for_all(value)):
                self._memoised[value] = None
            else:
                value.tensor = None

    # Running.

    def _materialise(self, value: TapeValue) -> None:
        if value.operation is None:
            self._source(value)
            return
        path = self._path_to(value)
        if path is None:
            # The plan has already freed something that this value needs.
            self._make_plan(self._stage)
            path = self._path_to(value)
            assert path is not None
        operations, packed = path
        for source in packed:
            self._source(source)  # Above autograd, because an outer region may rerun.
        self._count_run()
        if value.root is not None and value.root.tensor is not None:
            with BelowAutograd():  # Views compute nothing, so no setting matters.
                self._run_all(operations)
            return
        # A new thread would use all cores for matrix products until it has asked once.
        torch.get_num_threads()
        with Scope() as scope, BelowAutograd(), WithoutAutocast():
            self._enter(scope)
            for (dtype, stream), group in groupby(operations, key=_CONDITIONS):
                run = list(group)
                if dtype is not (before := torch.get_default_dtype()):
                    scope.callback(torch.set_default_dtype, before)
                    torch.set_default_dtype(dtype)
                if self.stream is None:
                    self._run_all(run)
                    continue
                with Scope() as on_stream:
                    if stream is not None:
                        enter_stream(stream, on_stream)
                    lend_inputs(run, self.stream)
                    self._run_all(run)

    def _run_all(self, operations: list[Operation]) -> None:
        """Run operations again, each in the grad mode of its forward."""
        before = is_enabled = torch.is_grad_enabled()
        try:
            for operation in operations:
                if operation.grad_enabled is not is_enabled:
                    is_enabled = operation.grad_enabled
                    set_grad_enabled(is_enabled)
                self._run(operation)
        finally:
            set_grad_enabled(before)

    def _count_run(self) -> None:
        """Count the plan among those that ran operations, if this is its first run."""
        # The stages of one backward pass count as one recompute.
        number = self._plan if self._stage < 0 else -self._task - FIRST_TASK
        if self._plan_ran != number:
            self._plan_ran = number
            self.plans_run += 1

    def _path_to(
        self, value: TapeValue
    ) -> tuple[list[Operation], list[TapeValue]] | None:
        """Return the operations to re-run, in order, and the packed inputs to unpack.

        The result is `None` if the plan has already freed a required value.
        """
        operations: dict[int, Operation] = {}
        packed = []
        wanted = [value]
        while wanted:
            value = wanted.pop()
            if value.plan != self._plan or value.uses <= 0:
                return None
            operation = value.operation
            if operation is None:
                packed.append(value)
            elif operation.number not in operations:
                operations[operation.number] = operation
                wanted += [v for v in operation.inputs() if v.tensor is None]
        return [operations[number] for number in sorted(operations)], packed


_CONDITIONS = attrgetter("default_dtype", "stream")

FIRST_TASK = 3  # Task numbers start at -2; these become negative.
