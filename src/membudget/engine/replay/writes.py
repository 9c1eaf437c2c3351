"""Record operators that write, are random, make constants, or take tensor lists.

In-place writes are recorded as functional operations: each write gives the storage a
new tape value. To repeat an in-place write, a replay writes to a copy of the old
tensor, or to the old tensor itself if nothing else needs it. A tensor that stays in
memory already contains the written data, which a replay does not recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from membudget._torch import is_fake
from membudget.engine.replay.forward_record import ForwardRecord
from membudget.engine.replay.stand_ins import Outline, Scratch
from membudget.engine.replay.tape import Operation
from membudget.ops import OperatorFacts, flat_outputs, tensors_in
from membudget.state.copies import is_plain
from membudget.state.identity import address_of


def run_in_place(
    recording: ForwardRecord,
    func: Any,
    facts: OperatorFacts,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Run and record an operator that overwrites and returns its first argument."""
    tracker = recording.tracker
    target = args[0]
    recorded = list(args)
    recording.record_tensors(facts.tensors[1:], recorded)
    entry = tracker.entry(target)
    memory, value = entry.memory, entry.value
    if memory.root is None:
        tracker.before_write([target], is_needed=False)
        output = func(*args, **kwargs)
        tracker.after_write(memory, None)
        return output
    if tracker.writes is not None:
        tracker.writes(entry.address)
    recorded[0] = value
    operation = recording.operation(func, recorded, kwargs)
    # Output 0 is the returned tensor, output 1 the written memory.
    operation.targets = [(value.root or value, 1)]
    output = recording.run(operation, facts, args, kwargs)
    root = operation.output(1)
    tracker.after_write(memory, root)
    # Not a view: the tensor spans its memory, so it can take the new root at once.
    if value.root is None:
        entry.value, entry.epoch = root, memory.epoch
    if answer := recording.keeps(operation, facts, args, target, 1):
        recording.hold(target, tracker.entry(target), answer)
    return output


def run_special(
    recording: ForwardRecord,
    func: Any,
    facts: OperatorFacts,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Run and record an operator that writes to arguments, is random or takes lists."""
    if facts.is_constant and is_plain(args[0]) and not is_fake(args[0]):
        return _run_constant(recording, func, facts, args, kwargs)
    written = list(written_by(facts, args, kwargs))
    scratch = _statistics(facts, args)
    roles = _OperandRoles(facts.is_view, written, scratch)
    operation = recording.operation(
        func,
        [_recorded(recording, a, roles) for a in args],
        {name: _recorded(recording, a, roles) for name, a in kwargs.items()},
    )
    if not (written or scratch):
        output = recording.run(operation, facts, args, kwargs)
        arguments = [*args, *kwargs.values()]
        addresses = {address_of(t) for t in tensors_in(arguments)}
        recording.note_outputs(operation, facts, arguments, output, addresses)
        return output
    return _run_writing(recording, operation, facts, args, kwargs, (written, scratch))


def _run_constant(
    recording: ForwardRecord,
    func: Any,
    facts: OperatorFacts,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Run and record an operator that makes a constant in its argument's shape."""
    output = func(*args, **kwargs)
    options = {**kwargs, "device": output.device}
    operation = recording.operation(func, [Outline(args[0]), *args[1:]], options)
    recording.note_outputs(operation, facts, args, output, ())
    return output


def _run_writing(
    recording: ForwardRecord,
    operation: Operation,
    facts: OperatorFacts,
    args: Any,
    kwargs: dict[str, Any],
    changed: tuple[list[Tensor], list[Tensor]],
) -> Any:
    written, scratch = changed
    tracker = recording.tracker
    # Does a replay produce anything besides the content of held memory?
    entries = [tracker.entry(t) for t in written]
    is_needed = facts.returns_fresh or any(
        entry.memory.root is not None for entry in entries
    )
    memories = tracker.before_write(written, is_needed)
    tracker.before_write(scratch, False)
    roots = [(e.memory, e.value.root or e.value) for e in entries]
    output = recording.run(operation, facts, args, kwargs)
    arguments = [*args, *kwargs.values()]
    addresses = {address_of(t) for t in tensors_in(arguments)}
    recording.note_outputs(operation, facts, arguments, output, addresses)
    first = len(flat_outputs(output))
    operation.targets = targets = []
    for number, memory in enumerate(memories):
        was = next(root for owner, root in roots if owner is memory)
        if memory.root is None:
            tracker.after_write(memory, None)
            targets.append((was, -1))
        else:
            # Written memory counts as further outputs, after the returned ones.
            index = first + number
            tracker.after_write(memory, operation.output(index))
            targets.append((was, index))
    for tensor in scratch:
        tracker.after_write(tracker.entry(tensor).memory, None)
    for tensor in written:
        entry = tracker.entry(tensor)
        made = entry.memory.root
        if made is not None and (
            answer := recording.keeps(operation, facts, args, tensor, made.index)
        ):
            recording.hold(tensor, entry, answer)
    return output


def _recorded(recording: ForwardRecord, argument: Any, roles: _OperandRoles) -> Any:
    """Replace the tensors in an operator argument by tape values."""
    if isinstance(argument, Tensor):
        if id(argument) in roles.scratch:
            return Scratch(argument)
        if roles.is_view or id(argument) in roles.written:
            return recording.tracker.entry(argument).value
        return recording.tracker.read(argument)
    if isinstance(argument, list | tuple) and any(
        isinstance(item, Tensor) for item in argument
    ):
        return [_recorded(recording, item, roles) for item in argument]
    return argument


class _OperandRoles:
    """The arguments that an operator views, writes to, or uses as scratch memory."""

    __slots__ = ("is_view", "scratch", "written")

    def __init__(self, is_view: bool, written: list[Tensor], scratch: list[Tensor]):
        self.is_view = is_view  # A view reads nothing.
        self.written = frozenset(map(id, written))
        self.scratch = frozenset(map(id, scratch))


def written_by(
    facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    yield from tensors_in(args[i] for i in facts.written if i < len(args))
    yield from tensors_in(kwargs.get(name) for name in facts.written_names)


def _statistics(facts: OperatorFacts, args: Any) -> list[Tensor]:
    """Return the running statistics that a normalisation layer updates in training."""
    if facts.statistics is None or not facts.statistics(args):
        return []
    return [t for t in args[3:5] if isinstance(t, Tensor)]
