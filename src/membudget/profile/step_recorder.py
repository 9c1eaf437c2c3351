"""Record one training step as it runs, on real tensors or on fake ones.

An observer sees each operator with the tensors that the backend sees; `Lifetimes`
records when they die. Saved-tensor hooks give autograd an alias of each saved tensor,
so that it is known how long anything *else* holds the storage: that is when a region
that drops the saved tensor would free it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from membudget._torch import (
    current_autograd_node,
    node_sequence_number,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    tree_iter,
    tree_map_only,
    written_arguments,
)
from membudget.callsite import place_of
from membudget.graph import ModuleCall, Phase
from membudget.observer import Observer
from membudget.ops import OperatorFacts, facts_of, flat_outputs
from membudget.profile.cost import flops_of
from membudget.profile.fake import RecordedCall, TensorSpec
from membudget.profile.lifetimes import Lifetimes, RecordedOperator, RecordedSaved

MARK = "membudget operator "
"""Followed by the op index: the name of an operator's profiler event."""


class _SavedAlias:
    """Held by autograd in place of a saved tensor."""

    __slots__ = ("__weakref__", "index", "tensor")

    def __init__(self, tensor: Tensor, index: int):
        self.tensor = tensor
        self.index = index


class StepRecorder(Observer):
    """The observer that records a step.

    Attributes:
        operators: The operators that ran, in order.
        lifetimes: The live ranges of tensors and storages.
        saved: The tensors that autograd saved.
        calls: The module calls of the forward.
        distinct: On fake tensors, the distinct operator calls.
        phase: The phase that is running.
    """

    def __init__(
        self,
        module_names: Mapping[int, str],
        is_fake: bool,
        finds_backward: bool = False,
    ):
        """Start with nothing recorded.

        Args:
            module_names: The paths of modules, by their `id`.
            is_fake: Whether the tensors are fake. If so, distinct calls are recorded;
                otherwise each operator becomes a profiler event.
            finds_backward: Whether the backward phase begins with the first operator
                that autograd runs, because `begin("backward")` will not be called.
        """
        self.operators: list[RecordedOperator] = []
        self.lifetimes = Lifetimes()
        self.saved: list[RecordedSaved] = []
        self.phase: Phase = "forward"
        self._names = module_names
        self._is_fake = is_fake
        self._finds_backward = finds_backward
        self.calls: list[ModuleCall] = []
        self.distinct: dict[Any, RecordedCall] = {}
        self._is_suspended = False
        self._last_node = 0
        self._newest_node = 0
        self._places: dict[int, tuple[str, str]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward, the loss and the backward that run inside."""
        push_saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self, self._noting_calls():
                self._last_node = self._newest_node = node_sequence_number()
                yield
        except BaseException:
            self.lifetimes.stop()  # Its callbacks would keep recorded tensors alive.
            raise
        finally:
            pop_saved_tensors_hooks()

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        open_calls: list[tuple[str, int]] = []

        def enter(module: Module, args: Any) -> None:
            if self.phase == "forward" and id(module) in self._names:
                open_calls.append((self._names[id(module)], len(self.calls)))
                path, moment = self._names[id(module)], len(self.operators)
                self.calls.append(ModuleCall(path, moment, moment))

        def leave(module: Module, args: Any, output: Any) -> None:
            path = self._names.get(id(module))
            # A module that the model does not name may wrap one that it does.
            while path is not None and self.phase == "forward" and open_calls:
                left, index = open_calls.pop()
                call = self.calls[index]
                self.calls[index] = replace(call, end=len(self.operators))
                if left == path:
                    break

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, phase: Phase) -> None:
        """Start the next phase of the step."""
        self.phase = phase
        self.lifetimes.is_forward = phase == "forward"

    # Operators.

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and note it."""
        facts = facts_of(operator)
        # A region does not number these either, and plans name operators by number.
        if self._is_suspended or (
            facts is not None and (facts.is_query or not facts.is_numbered)
        ):
            return operator(*args, **kwargs)
        index = len(self.operators)
        node = current_autograd_node()
        number = None if node is None else node._sequence_nr()
        self._newest_node = node_sequence_number()
        if self._finds_backward and node is not None and self.phase == "forward":
            self.begin("backward")
        recorded = RecordedOperator(operator, self.phase, self._place(number), number)
        self.operators.append(recorded)
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        is_import = getattr(operator, "_opname", "") == "lift_fresh"
        # The operator hands over a tensor that no operator made.
        if not (is_import and self.lifetimes.is_new(inputs[0])):
            recorded.inputs = [self.lifetimes.value(tensor) for tensor in inputs]
        self.lifetimes.moment = index + 1
        if self._is_fake:
            self._note_call(index, operator, args, kwargs)
        event = _NOTHING if self._is_fake else record_function(f"{MARK}{index}")
        with event:
            start = time.perf_counter_ns()
            output = operator(*args, **kwargs)
            recorded.nanoseconds = time.perf_counter_ns() - start
        outputs = flat_outputs(output)
        recorded.flops = flops_of(operator, args, kwargs, output)
        written = [] if facts is None else _written(operator, facts, args, kwargs)
        is_view = facts is not None and facts.is_view
        self._note_outputs(recorded, index, is_view, written, outputs)
        return output

    def _note_call(self, index: int, func: Any, args: Any, kwargs: Any) -> None:
        args, kwargs = tree_map_only(Tensor, _spec_of, (args, kwargs))
        leaves = [
            x if isinstance(x, TensorSpec) else repr(x)
            for x in tree_iter((args, kwargs))
        ]
        key = (str(func), *leaves)
        call = self.distinct.get(key)
        if call is None:
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
        """Return module path and user line: of the stack, or of the node's forward."""
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
        """Return the op index that saves: the next one its inputs, else the last one.

        Autograd creates an operator's node, saves its inputs, runs it, saves its
        outputs. So a node newer than the last operator's belongs to the next operator.
        """
        is_to_come = node_sequence_number() > self._newest_node
        return len(self.operators) - (not is_to_come)

    def _unpack(self, kept: _SavedAlias) -> Tensor:
        if kept.index >= 0:
            self.saved[kept.index].asked.append(self.lifetimes.moment)
        return kept.tensor

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before


_NOTHING = nullcontext()


def _spec_of(tensor: Tensor) -> TensorSpec:
    strided = tensor.layout is torch.strided
    stride = tuple(tensor.stride()) if strided else ()
    return TensorSpec(tuple(tensor.shape), stride, tensor.dtype)


def _written(
    func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operator writes, including a norm's statistics."""
    written = list(written_arguments(func, args, kwargs))
    if facts.statistics is not None and facts.statistics(args):
        written += [t for t in args[3:5] if isinstance(t, Tensor)]
    return written
