"""What running an operator again needs of its values: sources, bases and generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from membudget._torch import without_dispatch_modes
from membudget.engine import isolation
from membudget.engine.replay.values import Operation, Value
from membudget.state.bits import has_changed
from membudget.state.identity import address_of


class SourceChangedError(Exception):
    """A source was written since the region ended."""

    def __init__(self, tensor: Tensor):
        """Note which."""
        super().__init__("a source was changed")
        self.tensor = tensor


class SourceFreedError(Exception):
    """The memory of a parameter is freed: FSDP has resharded it."""


def check_source(value: Value, tensor: Tensor) -> None:
    """Check that an operator is about to read what it read (Rule 5).

    Autograd itself takes what is there, as it does in the plain step: a parameter whose
    `.data` was exchanged.

    Raises:
        SourceChangedError: If it would read something else.
    """
    if value.address is not None and address_of(tensor) != value.address:
        raise SourceChangedError(tensor)
    if value.content is not None:
        (take, noted), value.content = value.content, None
        with without_dispatch_modes():
            if has_changed(tensor, noted, take):
                raise SourceChangedError(tensor)


def unpacked(value: Value, unpack: Callable[[Any], Tensor]) -> Tensor:
    """Return a source that the hooks around the region have.

    Raises:
        SourceChangedError: If it was written since.
    """
    assert value.packed is not None
    tensor, is_changed = value.packed.unpacked(unpack)
    if is_changed:
        raise SourceChangedError(tensor)
    return tensor


def is_freed(tensor: Tensor) -> bool:
    """Tell whether a parameter has lost its memory, as under FSDP."""
    return (
        type(tensor) is not Tensor
        and isinstance(tensor, Parameter)
        and tensor.untyped_storage().nbytes() == 0
        and tensor.numel() > 0
    )


def derived(value: Value, bases: dict[Value, Tensor]) -> Tensor:
    """Run the view operators that lead from a base to `value`."""
    base = bases.get(value)
    if base is not None:
        return base
    operation = value.operation
    assert operation is not None
    args = [derived(a, bases) if type(a) is Value else a for a in operation.args]
    output = operation.operator(*args, **operation.kwargs)
    tensor = output if isinstance(output, Tensor) else output[value.index]
    assert isinstance(tensor, Tensor)
    return tensor


def call_random(operation: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random operator from where its generator stood; that moves nothing."""
    assert operation.drawn is not None
    source, noted = operation.drawn
    with isolation.OPERATOR_LOCK:
        now = source.note()
        source.bring_back(noted)
        try:
            return operation.operator(*args, **kwargs)
        finally:
            source.bring_back(now)


def is_read_by(wanted: list[Value], owner: Value) -> bool:
    """Tell whether making some values again may run what reads the memory of another.

    What a stage carries over is there, and needs nothing.
    """
    pending = list(wanted)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        operation = value.operation
        is_there = value.tensor is not None and (value.root or value).is_carried
        if operation is None or is_there or id(operation) in seen:
            continue
        seen.add(id(operation))
        for read in operation.inputs():
            if not operation.is_view and (read.root or read) is owner:
                return True
            pending.append(read)
    return False
