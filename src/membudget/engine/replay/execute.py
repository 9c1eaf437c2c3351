"""Re-run recorded operators, and contain side effects that schemas do not declare.

A custom operator, registered through `torch.library`, may write to arguments against
its schema, or draw from NumPy's generator. The first replay of a custom operator
therefore runs on copies of its arguments. An operator whose schema omits a write to an
argument is *faulty*: it runs on copies for the rest of the step, and later recordings
keep its outputs. Every replay of a custom operator restores the global random
generators; outputs of an operator that draws from them are kept.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import tree_iter, tree_map_only, without_dispatch_modes
from membudget.engine import isolation
from membudget.engine.replay.shared_memory import (
    derived,
    leaves_views,
    share,
    views_of,
)
from membudget.engine.replay.stand_ins import Outline, Scratch
from membudget.engine.replay.tape import Operation, TapeValue
from membudget.ops import flat_outputs
from membudget.scope import Scope
from membudget.state.bits import fingerprint, has_changed, is_freed
from membudget.state.copies import copy_of
from membudget.state.identity import address_of, version_of
from membudget.state.rng import bring_back, global_sources, note

FAULTY: set[Any] = set()
"""Operators that wrote an argument without declaring it."""

_TRUSTED: set[Any] = set()


def call_noting_draws(
    operator: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Run an operator; return its output and whether it drew random numbers."""
    before = note(global_sources())
    output = operator(*args, **kwargs)
    after = note(global_sources())
    # A source returns the same state object until its generator draws. If the operator
    # imported `numpy.random`, NumPy's source is new, and has probably drawn.
    is_new = len(after) > len(before)
    moved = is_new or any(a[1] is not b[1] for a, b in zip(before, after, strict=True))
    return output, moved


def replay_foreign(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replay a custom operator, and contain side effects that it does not declare."""
    with Scope() as scope:
        bring_back(note(global_sources()), scope)
        if operator in _TRUSTED:
            return operator(*args, **kwargs)
        return _call_on_copies(operator, args, kwargs)


@torch.no_grad()
def _call_on_copies(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if operator._schema.is_mutable:
        # The arguments that it declares to write are copies already.
        return operator(*args, **kwargs)
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


def call_random(operation: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Re-run a random operator from its recorded RNG state; restore the RNG."""
    assert operation.drawn is not None
    source, noted = operation.drawn
    # No other thread may draw while the generator is rewound.
    with isolation.OPERATOR_LOCK:
        now = source.note()
        if now is not noted:  # They may still be equal.
            source.write(noted[1])
        try:
            return operation.operator(*args, **kwargs)
        finally:
            source.bring_back(now)


class SourceChangedError(Exception):
    """A tensor that a replay reads was modified after the region's forward."""

    def __init__(self, tensor: Tensor):
        """Create the error, which carries the modified tensor."""
        super().__init__("a source was changed")
        self.tensor = tensor


class SourceFreedError(Exception):
    """A parameter has no memory, because FSDP has resharded it."""


def is_freed_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter whose memory FSDP has freed."""
    # The `isinstance` of Parameter alone takes 0.7 µs.
    return (
        type(tensor) is not Tensor
        and isinstance(tensor, Parameter)
        and is_freed(tensor)
    )


class Executor:
    """Re-runs recorded operations."""

    __slots__ = ("_memoised", "_plan", "_stage")

    def __init__(self) -> None:
        """Create an executor that has no replay plan yet."""
        self._plan = 0
        self._stage = -1  # The stage that the plan serves; -1 for all.
        self._memoised: dict[TapeValue, None] = {}

    def _run(self, operation: Operation) -> None:
        if operation.is_view and self._is_made(operation):
            return  # Run early, for a write to what it is a view of.
        bases = self._bases(operation) if operation.targets else _NO_BASES
        recorded, kwargs = operation.arguments()
        args = [
            self._argument(a, bases) if type(a) in _STANDING_IN else a for a in recorded
        ]
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

    def _is_made(self, operation: Operation) -> bool:
        """Return whether the plan needs no more of an operation's outputs."""
        for reference in operation.outputs:
            value = reference()
            if value is None or value.tensor is not None or value.plan != self._plan:
                continue
            if value.uses > 0 and value.operation is operation:
                return False
        return True

    def _note(
        self, operation: Operation, output: Any, bases: dict[TapeValue, Tensor]
    ) -> None:
        made = (output,) if type(output) is Tensor else flat_outputs(output)
        written: dict[int, TapeValue] = {}
        if bases:
            written = {index: root for root, index in operation.targets}
        for reference in operation.outputs:
            value = reference()
            # An output that became a source keeps its content.
            if value is None or value.operation is not operation:
                continue
            if value.plan == self._plan and value.uses > 0:
                self._memoised[value] = None
                root = written.get(value.index)
                if root is None:
                    value.tensor = made[value.index]
                    continue
                value.tensor = bases[root]
                if root.sharing is not None and value.tensor is root.tensor:
                    share(root, value)

    def _bases(self, operation: Operation) -> dict[TapeValue, Tensor]:
        """Choose a tensor to write to, for each tape value to be overwritten."""
        bases = {}
        for root, _ in operation.targets:
            if root.operation is None:
                bases[root] = copy_of(self._source(root))
                continue
            assert root.tensor is not None
            may_overwrite = self._may_overwrite(operation, root)
            bases[root] = root.tensor if may_overwrite else copy_of(root.tensor)
        return bases

    def _may_overwrite(self, operation: Operation, root: TapeValue) -> bool:
        """Return whether a write to `root` destroys nothing that is still needed."""
        if root.sharing is None and root.uses <= 1 and root.view_uses <= 0:
            return True  # This is its last use.
        if not self._make_views(root) or root.uses > 1:
            return False
        if not leaves_views(operation, root):
            return False
        if root.sharing is None:
            root.sharing = WeakSet((root,))
        return True

    def _make_views(self, root: TapeValue) -> bool:
        """Make the views of `root` that are still needed; return whether all are made.

        From then on the plan needs no more of its memory than those.
        """
        for view in views_of(root):
            is_wanted = view.plan == self._plan and view.uses > 0
            if view.tensor is not None or not is_wanted:
                continue
            maker = view.operation
            assert maker is not None
            if not maker.is_view or any(v.tensor is None for v in maker.inputs()):
                return False
            self._run(maker)
        return True

    def _argument(self, argument: Any, bases: dict[TapeValue, Tensor]) -> Any:
        kind = type(argument)
        if kind is TapeValue:
            if bases and (argument.root or argument) in bases:
                return derived(argument, bases)
            if argument.operation is None:
                return self._source(argument)
            return argument.tensor
        if kind is list:
            return [self._argument(item, bases) for item in argument]
        if kind is Scratch or kind is Outline:
            return argument.made()
        return argument

    def _source(self, value: TapeValue) -> Tensor:
        """Return a tensor that a replay reads, after checking it for changes (Rule 5).

        Replacing a parameter's `.data` raises only in a replay: autograd itself reads
        the new storage, as it would without the region.
        """
        tensor = self._content(value)
        if value.address is not None and address_of(tensor) != value.address:
            raise SourceChangedError(tensor)
        if value.content is not None:
            (take, noted), value.content = value.content, None
            with without_dispatch_modes():
                if has_changed(tensor, noted, take):
                    raise SourceChangedError(tensor)
        return tensor

    def _content(self, value: TapeValue) -> Tensor:
        tensor = value.tensor
        if tensor is None:
            assert value.packed is not None
            tensor, is_changed = value.packed.unpacked()
            if is_changed:
                raise SourceChangedError(tensor)
            value.tensor = tensor
            self._memoised[value] = None
        elif value.version is not None and version_of(tensor) != value.version:
            raise SourceChangedError(tensor)
        if is_freed_parameter(tensor):
            raise SourceFreedError
        return tensor

    def _used(self, value: TapeValue) -> None:
        value.uses -= 1
        if value.root is not None:
            value.root.view_uses -= 1
        if value.uses > 0:
            return
        if value.operation is None and (
            value.packed is None or self._is_unpacked_for_all(value)
        ):
            return  # It is held.
        value.tensor = None
        # The value references its inputs, which must be freed with its last handle.
        self._memoised.pop(value, None)

    def _is_unpacked_for_all(self, value: TapeValue) -> bool:
        """Return whether an unpacked tensor is kept for all stages of a backward."""
        packed = value.packed
        return self._stage >= 0 and packed is not None and packed.is_unpacked_once


_NO_BASES: dict[Any, Tensor] = {}
_STANDING_IN = frozenset((TapeValue, list, Scratch, Outline))  # For arguments.
