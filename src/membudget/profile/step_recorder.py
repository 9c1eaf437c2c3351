"""Record a training step as it runs, on real or fake tensors.

An observer intercepts each operator call with the tensors that the kernel receives, and
`Lifetimes` records when the tensors die. Saved-tensor hooks give autograd an alias of
each saved tensor, so the recorder can tell when all *other* references to the storage
are gone: at that op index, a region that drops the saved tensor frees the storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from membudget._torch import (
    current_autograd_node,
    may_read_bytes,
    node_sequence_number,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    tree_map_only,
    written_arguments,
)
from membudget.callsite import place_of
from membudget.graph import ModuleCall, Phase
from membudget.observer import Observer
from membudget.ops import OperatorFacts, facts_of, flat_arguments, flat_outputs
from membudget.profile.cost import computes_alone, flops_of
from membudget.profile.events import TimerEvents
from membudget.profile.lifetimes import Lifetimes, RecordedOperator, RecordedSaved
from membudget.profile.module_calls import noting_calls
from membudget.profile.noted_draws import NotedDraws
from membudget.profile.recorded_call import RecordedCall, TensorSpec


class _SavedAlias:
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "index", "tensor")

    def __init__(self, tensor: Tensor, index: int):
        self.tensor = tensor
        self.index = index


class StepRecorder(Observer):
    """Observer that records the operators and tensors of a training step.

    Attributes:
        operators: Operators that ran, in execution order.
        lifetimes: Live ranges of tensors and storages.
        saved: Tensors that autograd saved in the forward pass.
        calls: Module calls in the forward pass.
        distinct: Distinct operator calls, recorded on fake tensors only.
        phase: Current phase of the step.
        around: Returns the context in which the operator with an op index runs.
        events: When blocks begin and end, by op index.
        noted: Random numbers by which the forward may decide what it runs.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        is_fake: bool,
        finds_backward: bool = False,
        emptied: dict[int, Any] | None = None,
    ):
        """Create a recorder for one step.

        Args:
            modules: The modules whose calls are noted, by path.
            is_fake: Whether the tensors are fake: fake steps record distinct calls.
            finds_backward: Whether the first operator that autograd runs begins the
                backward phase, for a step that does not call `begin("backward")`.
            emptied: Storages that were empty before the step, and may be filled in it.
        """
        self.operators: list[RecordedOperator] = []
        self.lifetimes = Lifetimes(emptied)
        self.saved: list[RecordedSaved] = []
        self.phase: Phase = "forward"
        self.around: Callable[[int], AbstractContextManager[Any]] = nullcontext
        self.events = TimerEvents(self.operators.__len__)
        self._modules = modules
        self._names = {id(module): path for path, module in modules.items()}
        self._is_fake = is_fake
        self._finds_backward = finds_backward
        self.calls: list[ModuleCall] = []
        self.distinct: dict[Any, RecordedCall] = {}
        clock_ns = time.process_time_ns if computes_alone() else time.perf_counter_ns
        self._clock_ns = _no_time if is_fake else clock_ns
        self.noted = NotedDraws()
        self._is_suspended = False
        self._last_node = 0
        self._newest_node = 0
        self._places: dict[int, tuple[str, str]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass, loss and backward pass that run in the context."""
        push_saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self, noting_calls(self._modules, self._enter, self._leave):
                self._last_node = self._newest_node = node_sequence_number()
                yield
        except BaseException:
            self.lifetimes.stop()  # Its callbacks would keep recorded tensors alive.
            raise
        finally:
            pop_saved_tensors_hooks()

    def _enter(self, path: str, inputs: list[Tensor]) -> int | None:
        """Note that a module's forward begins; return the number of the call."""
        if self.phase != "forward" or not may_read_bytes():
            return None  # No region works inside a transform of `torch.func`.
        moment = len(self.operators)
        values = tuple(map(self.lifetimes.value, inputs))
        self.calls.append(ModuleCall(path, moment, moment, values))
        self.noted.open_calls.append(len(self.calls) - 1)
        return len(self.calls) - 1

    def _leave(self, number: int) -> None:
        """Note that the forward of a call has ended."""
        self.calls[number] = replace(self.calls[number], end=len(self.operators))
        self.noted.open_calls.remove(number)

    def note_draw(self) -> None:
        """Note that a random number is drawn (`drawing`)."""
        if self.phase == "forward":
            self.noted.note(len(self.operators))

    def _is_inside(self) -> bool:
        """Return whether a backward pass that begins now does not end the forward.

        A part of the model may run one in its own forward, to take a gradient.
        """
        inside = (self.calls[number].path for number in self.noted.open_calls)
        return self.phase != "forward" or any(inside)

    def begin(self, phase: Phase) -> None:
        """Start the next phase of the step."""
        self.phase = phase
        self.lifetimes.is_forward = phase == "forward"

    # Operators.

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and record the call."""
        facts = facts_of(operator)
        # A region does not number these either, and plans name operators by number.
        if self._is_suspended or (
            facts is not None and (facts.is_query or not facts.is_numbered)
        ):
            if not self._is_suspended:
                self.noted.note_operator(operator, len(self.operators), [])
            return operator(*args, **kwargs)
        self.lifetimes.note_resized()
        index = len(self.operators)
        node = current_autograd_node()
        number = None if node is None else node._sequence_nr()
        self._newest_node = node_sequence_number()
        if self._finds_backward and node is not None and not self._is_inside():
            self.begin("backward")
        recorded = RecordedOperator(operator, self.phase, self._place(number), number)
        self.operators.append(recorded)
        inputs = [t for t in flat_arguments(args, kwargs) if isinstance(t, Tensor)]
        # `lift_fresh` makes a tensor from Python data, so its input is new.
        is_import = getattr(operator, "_opname", "") == "lift_fresh"
        if not (is_import and self.lifetimes.is_new(inputs[0])):
            recorded.inputs = [self.lifetimes.value(tensor) for tensor in inputs]
        self.lifetimes.moment = index + 1
        if self._is_fake:
            self._note_call(index, operator, args, kwargs)
        with self.around(index):
            start = self._clock_ns()
            output = operator(*args, **kwargs)
            recorded.nanoseconds = self._clock_ns() - start
        outputs = flat_outputs(output)
        self.noted.note_operator(operator, index, outputs)
        recorded.flops = flops_of(operator, args, kwargs, output)
        written = [] if facts is None else _written(operator, facts, args, kwargs)
        is_view = facts is not None and facts.is_view
        self._note_outputs(recorded, index, is_view, written, outputs)
        return output

    def _note_call(self, index: int, func: Any, args: Any, kwargs: Any) -> None:
        leaves = [
            TensorSpec.of(x) if isinstance(x, Tensor) else repr(x)
            for x in flat_arguments(args, kwargs)
        ]
        key = (str(func), *leaves)
        call = self.distinct.get(key)
        if call is None:
            args, kwargs = tree_map_only(Tensor, TensorSpec.of, (args, kwargs))
            call = self.distinct[key] = RecordedCall(func, args, kwargs, [])
        call.indices.append(index)

    def _note_outputs(
        self,
        recorded: RecordedOperator,
        index: int,
        is_view: bool,
        written: list[Tensor],
        outputs: list[Any],
    ) -> None:
        lifetimes = self.lifetimes
        tensors = [tensor for tensor in outputs if isinstance(tensor, Tensor)]
        if recorded.inputs and is_view:
            storage = lifetimes.values[recorded.inputs[0]].storage
            for tensor in tensors:
                lifetimes.lies_in(tensor, storage)
        for position, tensor in enumerate(outputs):
            # A known tensor among the outputs is an input, passed through or written.
            if isinstance(tensor, Tensor) and not lifetimes.is_known(tensor):
                recorded.outputs.append(lifetimes.new_value(tensor, index, position))
        for position, tensor in enumerate(written, len(outputs)):
            recorded.outputs.append(lifetimes.new_value(tensor, index, position))

    def _place(self, node: int | None) -> tuple[str, str]:
        """Return an operator's module and line; in backward, its forward operator's."""
        if node is not None and node in self._places:
            return self._places[node]
        if self.phase != "forward":
            return ("", "")
        place = place_of(self._names)
        newest = node_sequence_number()
        for number in range(self._last_node, newest):
            self._places[number] = place
        self._last_node = newest
        return place

    # Saved tensors.

    def _pack(self, tensor: Tensor) -> _SavedAlias:
        is_noted = self.phase == "forward" and not self._is_suspended
        number = len(self.saved) if is_noted else -1
        with self._suspended():
            is_leaf = tensor.is_leaf and tensor.requires_grad
            # A node that saved its own output with its history would hold itself.
            kept = _SavedAlias(tensor if is_leaf else tensor.detach(), number)
        if not is_noted:
            return kept
        value = self.lifetimes.saved_value(tensor)
        if not is_leaf:
            self.lifetimes.know_alias(kept.tensor, value)
        saved = RecordedSaved(value, self._saving_operator(), place_of(self._names))
        self.saved.append(saved)

        def freed() -> None:
            saved.freed = self.lifetimes.moment

        self.lifetimes.watch(kept, freed)
        return kept

    def _saving_operator(self) -> int:
        """Return the op index of the operator that is saving a tensor.

        Autograd creates an operator's node, saves the inputs, runs the operator, and
        saves the outputs. A node newer than the last recorded operator therefore
        belongs to the next operator, which is saving its inputs.
        """
        is_to_come = node_sequence_number() > self._newest_node
        return len(self.operators) - (not is_to_come)

    def _unpack(self, kept: _SavedAlias) -> Tensor:
        if kept.index >= 0:
            saved = self.saved[kept.index]
            saved.asked.append(self.lifetimes.moment)
            self.lifetimes.note_unpacked(saved.value)
        return kept.tensor

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before


def _no_time() -> int:
    """Return the time of a step that is fake, whose seconds are computed."""
    return 0


def _written(
    func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operator writes, including running statistics."""
    written = list(written_arguments(func, args, kwargs))
    if facts.statistics is not None and facts.statistics(args):
        written += [t for t in args[3:5] if isinstance(t, Tensor)]
    return written
