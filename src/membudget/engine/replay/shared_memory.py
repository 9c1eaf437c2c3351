"""Tell which recomputed values share memory, and which parts of it a write destroys.

A replay repeats an in-place write on the old tensor itself, if that destroys nothing
that is still needed. An operator that writes through a view destroys one part only, as
where a GRU cell turns its gates' sums into gates, one after the other. The old value
and the new one then share memory, for as long as views of the old one are needed:

    memory            operator                   needed later
    sums0  sums1      sums = matmul()
    gate0  sums1      sigmoid_(part 0 of sums)   part 0
    gate0  gate1      sigmoid_(part 1 of sums)   part 1, and part 0 of the older value
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from membudget.engine.replay.tape import Operation, TapeValue
from membudget.ops import facts_of
from membudget.state.copies import are_apart


def derived(value: TapeValue, bases: dict[TapeValue, Tensor]) -> Tensor:
    """Rebuild a view by applying its view operators to a tensor in `bases`."""
    base = bases.get(value)
    if base is not None:
        return base
    operation = value.operation
    assert operation is not None
    args = [derived(a, bases) if type(a) is TapeValue else a for a in operation.args]
    output = operation.operator(*args, **operation.kwargs)
    tensor = output if isinstance(output, Tensor) else output[value.index]
    assert isinstance(tensor, Tensor)
    return tensor


def is_read_by(wanted: list[TapeValue], owner: TapeValue) -> bool:
    """Return whether recomputing the values `wanted` may read the memory of `owner`.

    Values that an earlier stage of the backward pass has retained are not recomputed.
    """
    pending = list(wanted)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        operation = value.operation
        is_live = value.tensor is not None and (value.root or value).is_carried
        if operation is None or is_live or id(operation) in seen:
            continue
        seen.add(id(operation))
        for read in operation.inputs():
            if not operation.is_view and (read.root or read) is owner:
                return True
            pending.append(read)
    return False


def sharing(owner: TapeValue) -> Collection[TapeValue]:
    """Return the values whose tensors may be in one memory: `owner`, and others."""
    return (owner,) if owner.sharing is None else owner.sharing


def share(owner: TapeValue, other: TapeValue) -> None:
    """Note that the tensors of two values are in one memory from now on."""
    if other.sharing is None or other.sharing is not owner.sharing:
        group = WeakSet([*sharing(owner), *sharing(other)])
        for value in group:
            value.sharing = group


def views_of(owner: TapeValue) -> Iterator[TapeValue]:
    """Yield the views of a value that still exist, in the order of their operations."""
    for reference in owner.views or ():
        view = reference()
        if view is not None and view.root is owner:  # It has become no source.
            yield view


def leaves_views(operation: Operation, root: TapeValue) -> bool:
    """Return whether a write to parts of `root` leaves all live views as they are.

    Those are the views of `root`, and of the values that share its memory.
    """
    assert root.tensor is not None
    bases = {root: root.tensor}
    parts = [derived(part, bases) for part in _written_parts(operation, root)]
    views = [view.tensor for owner in sharing(root) for view in views_of(owner)]
    return _leave(parts, (view for view in views if view is not None))


def leaves_source(written: Sequence[Tensor], source: TapeValue) -> bool:
    """Return whether a write leaves what a replay may read of a source as it is."""
    assert source.tensor is not None
    if _leave(written, [source.tensor]):
        return True
    if source.is_used:
        return False
    used = [view for view in views_of(source) if view.is_used]
    bases = {source: source.tensor}
    return all(map(_is_only_viewed, used)) and _leave(
        written, (derived(view, bases) for view in used)
    )


def _is_only_viewed(value: TapeValue) -> bool:
    """Return whether view operators alone lead to a view from what it is a view of."""
    while value.root is not None and (operation := value.operation) is not None:
        if not operation.is_view or len(operation.inputs()) != 1:
            return False
        value = operation.inputs()[0]
    return True


def _leave(written: Sequence[Tensor], tensors: Iterable[Tensor]) -> bool:
    return all(are_apart(tensor, part) for tensor in tensors for part in written)


def _written_parts(operation: Operation, root: TapeValue) -> Iterator[TapeValue]:
    facts = facts_of(operation.operator)
    assert facts is not None
    positions = (operation.args[i] for i in facts.written if i < len(operation.args))
    names = (operation.kwargs.get(name) for name in facts.written_names)
    for value in _values_in([*positions, *names]):
        if (value.root or value) is root:
            yield value


def _values_in(arguments: Iterable[Any]) -> Iterator[TapeValue]:
    for argument in arguments:
        if type(argument) is TapeValue:
            yield argument
        elif type(argument) is list:
            yield from _values_in(argument)
