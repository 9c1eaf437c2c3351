"""Record the operators of a region as a graph of values.

The recorder is a dispatch mode below autograd and autocast: it sees each operator with
the tensors that the backend sees, runs it, and notes what came of what. Which value a
tensor has is the tracker's to know.

Sources, whose content is held, are: what comes from outside; what the policy keeps;
what comes from an operator that cannot run again; what is read although no operator was
seen to write it (`torch.empty` that NumPy filled); what appears from nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from membudget._torch import DispatchMode
from membudget.engine import isolation
from membudget.engine.identity import address_of
from membudget.engine.policy import Candidate, Policy
from membudget.engine.randomness import source_of
from membudget.engine.replay.operators import (
    OperatorFacts,
    facts_of,
    flat_outputs,
    tensors_in,
)
from membudget.engine.replay.tracker import EMPTY, Tracker, is_empty
from membudget.engine.replay.values import Entry, Handle, Memory, Operation, Scratch

Pins = set[tuple[int, int]]


class Recorder(DispatchMode):
    """The mode that records one forward of a region.

    Attributes:
        tracker: What is known of the tensors.
        is_suspended: Whether operators pass unseen: those of the engine itself.
        number: How many operators have run.
        opaque_depth: Inside of how many `opaque()` the code is.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's wrapper around the method would cost 1 µs an operator.
        return False

    def __init__(self, policy: Policy, pins: Pins, module_path: Callable[[], str]):
        """Prepare a recording.

        Args:
            policy: What to keep.
            pins: Outputs to keep whatever the policy says, by operator and index.
            module_path: Returns the path of the module that is running.
        """
        super().__init__()
        self.tracker = Tracker()
        self.is_suspended = False
        self.number = 0
        self.opaque_depth = 0
        self._policy = policy
        self._pins = pins
        self._module_path = module_path
        self._decisions: dict[Any, bool | None] = {}
        self._late: list[tuple[Handle, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and note it."""
        if self.is_suspended:
            return func(*args, **(kwargs or {}))
        if self._late:
            return self._run_and_settle(func, types, args, kwargs)
        self.number += 1
        facts = facts_of(func)
        if facts is None or facts.is_opaque or self.opaque_depth:
            return self._run_opaque(func, facts, args, kwargs or {})
        if facts.is_plain_view:
            return self._run_view(func, facts, args, kwargs or {})
        if facts.is_in_place:
            return self._run_in_place(func, facts, args, kwargs or {})
        if not facts.is_simple:
            return self._run_special(func, facts, args, kwargs or {})
        recorded = list(args)
        addresses = self._record_tensors(facts.tensors, recorded)
        output = func(*args, **kwargs) if kwargs else func(*args)
        operation = self.tracker.operation(func, recorded, kwargs or {})
        operation.call = self.number
        if type(output) is Tensor:
            address = address_of(output)
            if address not in addresses:
                self._note_fresh(operation, facts, args, output, 0, address)
                return output
        self._note_outputs(operation, facts, args, output, addresses)
        return output

    def handle(self, tensor: Tensor) -> Handle:
        """Return what stands for a tensor that autograd saves."""
        handle = Handle()
        entry = self.tracker.entry(tensor)
        if is_empty(entry.value):
            # The operator that saves it will fill it (RReLU its noise), or somebody
            # has done so unseen.
            self._late.append((handle, tensor))
        else:
            handle.value = self.tracker.mark_read(tensor, entry)
        return handle

    def settle(self) -> None:
        """Find the values of tensors that were saved before they were filled."""
        late, self._late = self._late, []
        for handle, tensor in late:
            handle.value = self.tracker.read(tensor)

    def _run_and_settle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        late, self._late = self._late, []
        output = self.__torch_dispatch__(func, types, args, kwargs)
        self._late += late
        self.settle()
        return output

    def _record_tensors(
        self, positions: tuple[int, ...], recorded: list[Any]
    ) -> list[int]:
        """Put values in the place of tensors; return where the tensors lie."""
        tracker = self.tracker
        addresses = []
        for position in positions:
            if position >= len(recorded):
                break
            tensor = recorded[position]
            if not isinstance(tensor, Tensor):
                continue  # `None`, or a number in the place of a tensor.
            entry = tracker.table.get(id(tensor))
            address = address_of(tensor)
            if (
                entry is None
                or entry.epoch != entry.memory.epoch
                or entry.address != address
            ):
                entry = tracker.meet(tensor, entry)
            recorded[position] = tracker.mark_read(tensor, entry)
            addresses.append(address)
        return addresses

    # What an operator made.

    def _note_outputs(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Any,
        addresses: Collection[int],
    ) -> None:
        """Note outputs, which may be several, or none, or views."""
        table = self.tracker.table
        for index, item in enumerate(flat_outputs(output)):
            if not isinstance(item, Tensor) or id(item) in table:
                continue
            address = address_of(item)
            if address and address in addresses:
                base = next(t for t in tensors_in(args) if address_of(t) == address)
                self._note_view(operation, base, item, index, address)
            else:
                self._note_fresh(operation, facts, args, item, index, address)

    def _note_view(
        self,
        operation: Operation,
        base: Tensor,
        output: Tensor,
        index: int,
        address: int,
    ) -> None:
        entry = self.tracker.entry(base)
        value = operation.output(index, entry.value.root or entry.value)
        self.tracker.enter(output, value, entry.memory, address)

    def _note_fresh(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Tensor,
        index: int,
        address: int,
    ) -> None:
        value = operation.output(index)
        entry = self.tracker.enter(output, value, Memory(value), address)
        if self._keeps(operation, facts, args, output, index):
            self.tracker.hold_value(output, entry)

    # What code inside the region says.

    def name(self, tensor: Tensor, label: str) -> None:
        """Keep a tensor if the policy keeps its name."""
        if self._policy.keeps_name(label):
            with self.suspended():
                entry = self.tracker.entry(tensor)
                if entry.value.operation is not None:
                    self.tracker.hold_value(tensor, entry)

    def begin_opaque(self, written: Sequence[Tensor]) -> None:
        """Hold what the operators make from now on."""
        self.opaque_depth += 1
        with self.suspended():
            self.tracker.before_write(written, False)

    def end_opaque(self, written: Sequence[Tensor]) -> None:
        """Record again; hold what was written."""
        self.opaque_depth -= 1
        with self.suspended():
            for tensor in written:
                self.hold_written(tensor)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let operators pass unseen."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    def _keeps(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Tensor,
        index: int,
    ) -> bool:
        if self._pins and (self.number, index) in self._pins:
            return True
        operator = operation.operator
        try:
            decided = self._decisions[operator]
        except KeyError:
            decided = facts.is_routing or self._policy.by_operator(operator)
            self._decisions[operator] = decided
        if decided is not None:
            return decided
        candidate = Candidate(
            operator, args, operation.kwargs, output, self.number, self._module_path
        )
        return self._policy.keeps(candidate)

    # What is not a plain function of tensors.

    def _run_special(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if facts.is_empty:
            return self._run_empty(func, args, kwargs)
        written = list(_written(facts, args, kwargs))
        scratch = _statistics(facts, args)
        marks = _Marks(facts.is_view, written, scratch)
        operation = self.tracker.operation(
            func,
            [self._recorded(a, marks) for a in args],
            {name: self._recorded(a, marks) for name, a in kwargs.items()},
        )
        operation.call = self.number
        if not (written or scratch):
            output = self._run(operation, facts, args, kwargs)
            arguments = [*args, *kwargs.values()]
            addresses = {address_of(t) for t in tensors_in(arguments)}
            self._note_outputs(operation, facts, arguments, output, addresses)
            return output
        return self._run_writing(operation, facts, args, kwargs, (written, scratch))

    def _run_view(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a view operator: its outputs lie in the memory of its argument."""
        tracker = self.tracker
        entry = tracker.entry(args[0])
        output = func(*args, **kwargs)
        value, address = entry.value, entry.address
        operation = tracker.operation(func, [value, *args[1:]], kwargs)
        operation.call = self.number
        if type(output) is Tensor and address_of(output) == address and address:
            if id(output) not in tracker.table:
                made = operation.output(0, value.root or value)
                tracker.enter(output, made, entry.memory, address)
            return output
        self._note_outputs(operation, facts, args, output, (address,))
        return output

    def _run_in_place(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that writes its first argument, and returns it."""
        tracker = self.tracker
        target = args[0]
        recorded = list(args)
        self._record_tensors(facts.tensors[1:], recorded)
        entry = tracker.entry(target)
        memory, value = entry.memory, entry.value
        if memory.root is None:
            tracker.before_write([target], is_needed=False)
            output = func(*args, **kwargs)
            tracker.after_write(memory, None)
            return output
        recorded[0] = value
        operation = tracker.operation(func, recorded, kwargs)
        operation.call = self.number
        operation.targets.append((value.root or value, 1))
        output = self._run(operation, facts, args, kwargs)
        root = operation.output(1)
        tracker.after_write(memory, root)
        if value.root is None:
            entry.value, entry.epoch = root, memory.epoch
            if self._keeps(operation, facts, args, target, 1):
                tracker.hold_value(target, entry)
        return output

    def _run(
        self, operation: Operation, facts: OperatorFacts, args: Any, kwargs: Any
    ) -> Any:
        func = operation.operator
        if not facts.is_random:
            return func(*args, **kwargs)
        with isolation.OPERATOR_LOCK:
            source = source_of(isolation.generator_of(args, kwargs))
            if source is not None:
                operation.drawn = (source, source.note())
            return func(*args, **kwargs)

    def _run_writing(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        kwargs: dict[str, Any],
        changed: tuple[list[Tensor], list[Tensor]],
    ) -> Any:
        written, scratch = changed
        tracker = self.tracker
        # Whether a replay yields something besides what is written into held memory.
        entries = [tracker.entry(t) for t in written]
        is_needed = facts.returns_fresh or any(
            entry.memory.root is not None for entry in entries
        )
        memories = tracker.before_write(written, is_needed)
        tracker.before_write(scratch, False)
        roots = [(e.memory, e.value.root or e.value) for e in entries]
        output = self._run(operation, facts, args, kwargs)
        arguments = [*args, *kwargs.values()]
        addresses = {address_of(t) for t in tensors_in(arguments)}
        self._note_outputs(operation, facts, arguments, output, addresses)
        first = len(flat_outputs(output))
        for number, memory in enumerate(memories):
            was = next(root for owner, root in roots if owner is memory)
            if memory.root is None:
                tracker.after_write(memory, None)
                operation.targets.append((was, -1))
            else:
                index = first + number
                tracker.after_write(memory, operation.output(index))
                operation.targets.append((was, index))
        for tensor in scratch:
            value = tracker.entry(tensor).value
            (value.root or value).is_state = True
            tracker.after_write(tracker.entry(tensor).memory, None)
        self._keep_written(operation, facts, args, written)
        return output

    def _keep_written(
        self, operation: Operation, facts: OperatorFacts, args: Any, written: list[Any]
    ) -> None:
        for tensor in written:
            entry = self.tracker.entry(tensor)
            value = entry.value
            if value.operation is operation and self._keeps(
                operation, facts, args, tensor, value.index
            ):
                self.tracker.hold_value(tensor, entry)

    def _recorded(self, argument: Any, marks: _Marks) -> Any:
        """Return what stands for an argument in the recording."""
        if isinstance(argument, Tensor):
            if id(argument) in marks.scratch:
                return Scratch(argument)
            if marks.is_view or id(argument) in marks.written:
                return self.tracker.entry(argument).value
            return self.tracker.read(argument)
        if isinstance(argument, list | tuple) and any(
            isinstance(item, Tensor) for item in argument
        ):
            return [self._recorded(item, marks) for item in argument]
        return argument

    def _run_empty(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if type(output) is not Tensor or output.layout is not torch.strided:
            self._hold_outputs(output)
        elif id(output) not in self.tracker.table:
            options = {"dtype": output.dtype, "device": output.device}
            geometry = [output.shape, output.stride()]
            operation = self.tracker.operation(EMPTY, geometry, options)
            operation.call = self.number
            value = operation.output(0)
            self.tracker.enter(output, value, Memory(value), address_of(output))
        return output

    def _run_opaque(
        self, func: Any, facts: OperatorFacts | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run what cannot be run again: what it makes or writes is held."""
        written = [] if facts is None else list(_written(facts, args, kwargs))
        self.tracker.before_write(written, False)
        output = func(*args, **kwargs)
        for tensor in written:
            self.hold_written(tensor)
        self._hold_outputs(output)
        return output

    def _hold_outputs(self, output: Any) -> None:
        for item in flat_outputs(output):
            if isinstance(item, Tensor) and id(item) not in self.tracker.table:
                self.tracker.meet(item, None)

    def hold_written(self, tensor: Tensor) -> None:
        """Hold the memory of a tensor that was written unseen, or cannot be again."""
        entry: Entry = self.tracker.entry(tensor)
        self.tracker.after_write(entry.memory, None)


class _Marks:
    """What an operator does with its tensors, which are known by identity."""

    __slots__ = ("is_view", "scratch", "written")

    def __init__(self, is_view: bool, written: list[Tensor], scratch: list[Tensor]):
        self.is_view = is_view  # A view reads nothing.
        self.written = frozenset(map(id, written))
        self.scratch = frozenset(map(id, scratch))


def _written(
    facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    yield from tensors_in(args[i] for i in facts.written if i < len(args))
    yield from tensors_in(kwargs.get(name) for name in facts.written_names)


def _statistics(facts: OperatorFacts, args: Any) -> list[Tensor]:
    """Return the running statistics that a normalisation will write."""
    if facts.statistics is None or not facts.statistics(args):
        return []
    return [t for t in args[3:5] if isinstance(t, Tensor)]
