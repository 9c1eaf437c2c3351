"""Run an operator so that it can be run again, and run it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter, tree_map_only, without_dispatch_modes
from membudget.engine import isolation
from membudget.engine.replay.sources import (
    SourceChangedError,
    SourceFreedError,
    check_source,
    copy_of,
    is_freed_parameter,
    unpacked,
)
from membudget.engine.replay.tape import Operation, Scratch, Value
from membudget.ops import flat_outputs
from membudget.scope import Scope
from membudget.state.bits import fingerprint
from membudget.state.identity import version_of
from membudget.state.rng import bring_back, global_sources, note

FAULTY: set[Any] = set()
"""Operators that wrote an argument that they do not declare."""

_TRUSTED: set[Any] = set()


def call_noting_draws(
    operator: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Run an operator; tell, too, whether it moved a random stream."""
    before = note(global_sources())
    output = operator(*args, **kwargs)
    after = note(global_sources())
    moved = any(a[1] is not b[1] for a, b in zip(before, after, strict=True))
    return output, moved


def replay_foreign(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replay an operator, and leave what it must not touch as it was."""
    with Scope() as scope:
        bring_back(note(global_sources()), scope)
        if operator in _TRUSTED:
            return operator(*args, **kwargs)
        return _call_on_copies(operator, args, kwargs)


@torch.no_grad()
def _call_on_copies(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if operator._schema.is_mutable:
        return operator(*args, **kwargs)  # What it declares is a copy already.
    copies = tree_map_only(Tensor, _copy, (args, kwargs))
    output = operator(*copies[0], **copies[1])
    if operator not in FAULTY:
        with without_dispatch_modes():
            same = [_bits((args, kwargs)) == _bits(copies)]
        (_TRUSTED if all(same) else FAULTY).add(operator)
    return output


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _bits(arguments: Any) -> list[Any]:
    return [fingerprint(t) for t in tree_iter(arguments) if isinstance(t, Tensor)]


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


class Executor:
    """Runs recorded operations again, with the values that they read.

    Attributes:
        unpack: The saved-tensor hook around the region that restores packed sources.
    """

    __slots__ = ("_memoised", "_plan", "_stage", "unpack")

    def __init__(self) -> None:
        """Begin before the first plan."""
        self.unpack: Any = None
        self._plan = 0
        self._stage = -1  # The stage that the plan serves; -1 for all.
        self._memoised: dict[Value, None] = {}

    def _run(self, operation: Operation) -> None:
        bases = self._bases(operation) if operation.targets else _NO_BASES
        args = [self._argument(a, bases) for a in operation.args]
        kwargs = operation.kwargs
        if kwargs:
            kwargs = {n: self._argument(a, bases) for n, a in kwargs.items()}
        if operation.is_foreign:
            output = replay_foreign(operation.operator, args, kwargs)
        elif operation.drawn is None:
            output = operation.operator(*args, **kwargs)
        else:
            output = call_random(operation, args, kwargs)
        self._note(operation, output, bases)
        del args, kwargs, output, bases
        for value in operation.inputs():
            if not operation.is_view:
                (value.root or value).reads -= 1
            self._used(value)

    def _note(
        self, operation: Operation, output: Any, bases: dict[Value, Tensor]
    ) -> None:
        made = (output,) if type(output) is Tensor else flat_outputs(output)
        written: dict[int, Value] = {}
        if bases:
            written = {index: root for root, index in operation.targets}
        for index, reference in operation.outputs:
            value = reference()
            # One of several outputs may be held, and stays what it is.
            if value is None or value.operation is not operation:
                continue
            if value.plan == self._plan and value.uses > 0:
                root = written.get(index)
                value.tensor = made[index] if root is None else bases[root]
                self._memoised[value] = None

    def _bases(self, operation: Operation) -> dict[Value, Tensor]:
        """Return the memory that a writing operator may write, for each target."""
        bases = {}
        for root, _ in operation.targets:
            if root.operation is None:
                bases[root] = copy_of(self._source(root))
            elif root.uses <= 1 and root.view_uses <= 0 and not root.is_lent:
                assert root.tensor is not None
                bases[root] = root.tensor  # Nobody else will ask for it.
            else:
                assert root.tensor is not None
                bases[root] = copy_of(root.tensor)
        return bases

    def _argument(self, argument: Any, bases: dict[Value, Tensor]) -> Any:
        kind = type(argument)
        if kind is Value:
            if bases and (argument.root or argument) in bases:
                return derived(argument, bases)
            if argument.operation is None:
                return self._source(argument)
            return argument.tensor
        if kind is list:
            return [self._argument(item, bases) for item in argument]
        if kind is Scratch:
            return torch.zeros(argument.shape, **argument.options)
        return argument

    def _source(self, value: Value) -> Tensor:
        """Return the content of a source that an operator is about to read."""
        check_source(value, tensor := self._content(value))
        return tensor

    def _content(self, value: Value) -> Tensor:
        tensor = value.tensor
        if tensor is None:
            tensor = value.tensor = unpacked(value, self.unpack)
            self._memoised[value] = None
        elif value.version is not None and version_of(tensor) != value.version:
            raise SourceChangedError(tensor)
        if is_freed_parameter(tensor):
            raise SourceFreedError
        return tensor

    def _used(self, value: Value) -> None:
        value.uses -= 1
        if value.root is not None:
            value.root.view_uses -= 1
        if value.uses > 0 or value.is_held() or self._is_unpacked_for_all(value):
            return
        value.tensor = None
        # It leads to what it was made of, which must go with its last handle.
        self._memoised.pop(value, None)

    def _is_unpacked_for_all(self, value: Value) -> bool:
        """Tell whether a source stays for all stages.

        Hooks around the region may give it back but once in a backward.
        """
        return self._stage >= 0 and value.packed is not None


_NO_BASES: dict[Any, Tensor] = {}
