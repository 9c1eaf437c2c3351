"""Record the operations of one forward, and decide which outputs to keep."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from membudget._torch_accelerator import current_stream, stream_of
from membudget.engine import isolation
from membudget.engine.arguments import has_own_offsets
from membudget.engine.candidate import Answer, Candidate, as_answer
from membudget.engine.policy import Policy
from membudget.engine.replay.aliasing import Tracker
from membudget.engine.replay.execute import call_noting_draws
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.living import LiveTensor
from membudget.engine.replay.routes import Routes
from membudget.engine.replay.tape import Operation, ReplayHandle
from membudget.engine.replay.verified import OperatorPath, OutputIndices
from membudget.engine.stages import CallStages
from membudget.offload import Offload
from membudget.operator_names import common_name
from membudget.ops import (
    WHOLE,
    OperatorFacts,
    decides,
    flat_outputs,
    leaves_device,
    tensors_in,
)
from membudget.state.identity import address_of
from membudget.state.rng import source_of


class ForwardRecord:
    """The operations of one forward, recorded while the forward runs.

    Attributes:
        number: Number of operators run so far.
        place: Number of the latest operator for the policy: `number`, or that of the
            operator's counterpart in a recorded call.
        names: Names of the operators of the recorded call; `None` without one.
        path: The operator sequence of a verified call that this call has followed so
            far; `None` if no verified sequence matches.
        recent: Tensors that autograd saved since the last operator of a verified
            sequence. It saves the inputs of an operator before the recorder sees that;
            if that deviates, its inputs are verified too.
        taken: The operators of this call so far, if they follow no verified sequence.
        left_path: Callback for a call that deviates from its sequence.
        kept: Number of outputs that the policy kept.
        stream: The stream on which the region began; `None` without an accelerator.
        streams: The other streams on which its operators ran.
        routes: The routes of this call's signature; `None` if it may follow none.
        survey: What draws up the route of this call; `None` if it gets none.
        trip: This call's progress on the route; `None` once it has left it.
    """

    __slots__ = (
        *("_decisions", "_module_path", "_stages", "_unrepeatable", "kept"),
        *("left_path", "names", "number", "numbers", "path", "place", "policy"),
        *("reads_arguments", "recent", "routes", "stream", "streams", "survey"),
        *("taken", "tracker", "trip"),
    )

    def __init__(
        self,
        policy: Policy,
        decisions: dict[Any, Answer | None],
        unrepeatable: OutputIndices,
        module_path: Callable[[], str],
        stages: CallStages | None,
    ):
        """Create an empty record; `decisions` caches policy decisions by operator."""
        self.tracker = Tracker()
        self.number = self.place = self.kept = 0
        self.names = None if policy.alignment is None else policy.alignment.names
        self.path: OperatorPath | None = None
        self.recent: list[tuple[ReplayHandle, Tensor]] = []
        self.taken: list[Any] | None = None
        self.left_path: Callable[[], None] | None = None
        self.policy = policy
        self.numbers = policy.numbers
        self.reads_arguments = policy.reads_arguments
        self._unrepeatable = unrepeatable
        self._module_path = module_path
        self._decisions = decisions
        self._stages = stages
        self.stream = current_stream()
        self.streams: list[Any] = []
        self.routes: Routes | None = None
        self.survey: Any = None
        self.trip: Any = None

    def advance(self, facts: OperatorFacts | None, operator: Any = None) -> None:
        """Count an operator, and check that the call follows its verified sequence.

        An operator without facts is higher-order.
        """
        number = self.number
        self.number = number + 1
        if (path := self.path) is not None:
            # Identity suffices: facts are cached by operator.
            if number >= len(path) or path[number] is not facts:
                self.taken = [*path[:number], facts]
                self.path = None
                if self.left_path is not None:
                    self.left_path()
            self.recent.clear()
        elif self.taken is not None:
            self.taken.append(facts)
        if self.names is None:
            self.place = number + 1
        else:
            self.align(common_name(str(operator)) if facts is None else facts.name)

    def align(self, name: str) -> None:
        """Number the latest operator for the policy, by its common name."""
        alignment, place = self.policy.alignment, self.place
        assert alignment is not None, "there are names"
        if place < len(alignment.names) and alignment.names[place] is name:
            self.place = place + 1
        else:
            self.place = alignment.number_of(
                name, place, self.number, self.tracker.clock
            )
            if self.place != place + 1 and self._stages is not None:
                self._stages.move(alignment.lost, self.number, self.place)

    def leave_route(self) -> None:
        """Write the tape, if the call has followed a route so far."""
        if self.trip is not None:
            EXTENSION[0].leave(self)

    def operation(
        self, func: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> Operation:
        """Record an operator call, with tape values as arguments instead of tensors."""
        tracker = self.tracker
        tracker.clock += 1
        operation = Operation(
            func, args, kwargs, tracker.clock, torch.is_grad_enabled()
        )
        operation.call = self.place
        if self.stream is not None and (now := current_stream()) != self.stream:
            operation.stream = now
            if now not in self.streams:
                self.streams.append(now)
        return operation

    def join(self, tensor: Tensor) -> None:
        """Let work that is launched now read what any stream of the region made."""
        if self.streams and (now := stream_of(tensor.device)) is not None:
            for stream in (self.stream, *self.streams):
                now.wait_stream(stream)
            tensor.record_stream(now)

    def record_tensors(
        self, positions: tuple[int, ...], recorded: list[Any]
    ) -> list[int]:
        """Replace tensors by their tape values; return the storage addresses."""
        tracker = self.tracker
        addresses = []
        for position in positions:
            if position >= len(recorded):
                break
            tensor = recorded[position]
            if not isinstance(tensor, Tensor):
                continue  # `None`, or a Python number.
            # `Tracker.entry`, inlined: this runs for every argument of every operator.
            entry = tracker.table.get(id(tensor))
            address = address_of(tensor)
            if (
                entry is None
                or entry.epoch != entry.memory.epoch
                or entry.address != address
            ):
                entry = tracker.meet(tensor, entry)
            is_used = (value := entry.value).is_used
            recorded[position] = value if is_used else tracker.mark_read(tensor, entry)
            addresses.append(address)
        return addresses

    def note_outputs(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Any,
        addresses: Collection[int],
    ) -> None:
        """Record an operator's outputs: fresh tensors, or views of its arguments."""
        table = self.tracker.table
        outputs = flat_outputs(output)
        operation.decides |= len(outputs) > 1 and decides(
            facts,
            (t.dtype for t in tensors_in(args)),
            (t.dtype for t in tensors_in(outputs)),
        )
        for index, item in enumerate(outputs):
            if not isinstance(item, Tensor) or id(item) in table:
                continue
            if item.is_nested and has_own_offsets(item, args):
                # Recomputed offsets would be another symbolic size.
                self.tracker.meet(item, None)
                continue
            address = address_of(item)
            if address and address in addresses:
                base = next(t for t in tensors_in(args) if address_of(t) == address)
                entry = self.tracker.entry(base)
                value = operation.output(index, entry.value.root or entry.value)
                self.tracker.enter(item, value, entry.memory, address)
            else:
                self.note_fresh(operation, facts, args, item, index, address)

    def note_fresh(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Tensor,
        index: int,
        address: int,
    ) -> None:
        """Record an output with newly allocated storage."""
        value = operation.output(index)
        entry = self.tracker.enter_fresh(output, value, address)
        if answer := self.keeps(operation, facts, args, output, index):
            self.hold(output, entry, answer)

    def hold(self, tensor: Tensor, entry: LiveTensor, answer: Answer) -> None:
        """Keep a tensor where a policy has answered."""
        self.tracker.hold_value(tensor, entry)
        if isinstance(answer, Offload):
            entry.value.offload(answer, self.stream)

    def keeps(
        self,
        operation: Operation,
        facts: OperatorFacts,
        args: Any,
        output: Tensor,
        index: int,
    ) -> Answer:
        """Return whether an output is kept instead of recomputed, and where."""
        if self._unrepeatable and (self.place, index) in self._unrepeatable:
            return True
        if operation.decides or self._decides(facts, args, output):
            return True
        operator = operation.operator
        decided = self.decided(facts, operator)
        if decided is None:  # The policy needs more than the operator.
            place = (self.place, index, self._module_path)
            candidate = Candidate(operator, args, operation.kwargs, output, *place)
            decided = self.policy.keeps(candidate)
        self.kept += bool(decided)
        return decided

    def asks(self, operator: Any, output: Tensor, index: int) -> Answer:
        """Ask a policy that reads no arguments whether to keep an output."""
        place = (self.place, index, self._module_path)
        return as_answer(self.policy.keeps(Candidate(operator, (), {}, output, *place)))

    def decided(self, facts: OperatorFacts, operator: Any) -> Answer | None:
        """Return the answer for an operator's outputs; `None` if it varies by call."""
        try:
            return self._decisions[facts]
        except KeyError:
            found = facts.is_routing or self.policy.by_operator(operator)
            self._decisions[facts] = None if found is None else as_answer(found)
            return self._decisions[facts]

    def _decides(self, facts: OperatorFacts, args: Any, output: Tensor) -> bool:
        if output.dtype in WHOLE:
            return decides(facts, (t.dtype for t in tensors_in(args)), [output.dtype])
        return facts.is_copy and leaves_device(tensors_in(args), output)

    def run(
        self, operation: Operation, facts: OperatorFacts, args: Any, kwargs: Any
    ) -> Any:
        """Run an operator; if it is random, first record the generator state."""
        func = operation.operator
        if facts.is_foreign:
            operation.is_foreign = True
            output, operation.decides = call_noting_draws(func, args, kwargs)
            return output
        if not facts.is_random:
            return func(*args, **kwargs)
        with isolation.OPERATOR_LOCK:
            source = source_of(isolation.generator_of(args, kwargs))
            if source is not None:
                operation.drawn = (source, source.note())
            return func(*args, **kwargs)

    def hold_written(self, tensor: Tensor) -> None:
        """Keep a tensor in memory after a write that a replay cannot repeat."""
        entry = self.tracker.entry(tensor)
        self.tracker.after_write(entry.memory, None)
