"""The names that a region can reach: noted in its forward, restored or compared later.

A forward may set attributes of its modules, and `torch.func.functional_call` swaps the
parameters of a module during one call: a recompute binds the attributes and parameters
that the forward began with. All other names (variables, items of lists and dicts, child
modules) stay as they are at the recompute; `Bindings` finds those to which other code
has bound another tensor or module since the forward.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential

from membudget.engine.arguments import HeldArguments
from membudget.engine.comparison import metadata
from membudget.engine.native import RERUN
from membudget.engine.reach import Reached, reach
from membudget.engine.slots import attributes_of, closed_over
from membudget.scope import Scope
from membudget.state.identity import address_of

_ABSENT = object()
# Tuples: `isinstance` takes twice as long with `list | deque`.
_LISTS = (list, deque)
_MODULE_LISTS = (ModuleList, Sequential)

Place = tuple[Any, ...]
Sequences = list[tuple[Any, list[int]]]


def rebind(namespace: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make the dict `namespace` equal to `wanted`, in place."""
    if RERUN and RERUN[0].are_same_names(namespace, wanted):
        return
    for key in namespace.keys() - wanted.keys():
        del namespace[key]
    for key, value in wanted.items():
        if namespace.get(key, _ABSENT) is not value:
            namespace[key] = value


def namespaces_of(reached: Reached) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the dicts of names that a recompute restores, each with a copy.

    They are the buffers of every module, and all attributes of each module of a class
    that the user defined, or with hooks before its forward, which bind its weight
    (pruning, `weight_norm`). Activations stored on a module are detached in the copy,
    which would otherwise keep their graph alive, and with it the regions of the
    previous step.
    """
    pairs = []
    for module in reached.modules:
        buffers = module.__dict__["_buffers"]
        if buffers:
            pairs.append((buffers, buffers.copy()))
    stateful = (module.__dict__ for module in reached.stateful_modules)
    return [*pairs, *((names, _without_history(names)) for names in stateful)]


def parameters_of(reached: Reached) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each module's dict of parameters, with a copy that holds no graph."""
    pairs = []
    for module in reached.modules:
        held = module.__dict__["_parameters"]
        if held:  # `functional_call` swaps in what was computed from parameters.
            pairs.append((held, _without_history(held)))
    return pairs


def _without_history(held: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dict, in which tensors that were computed are leaves."""
    copied = held.copy()
    for key, value in held.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            copied[key] = value.detach().requires_grad_()
    return copied


def enter_parameters(
    scope: Scope, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Bind the parameters that a forward began with, until `scope` ends.

    A name that is bound to a tensor of another shape, dtype or class now stays bound to
    it, as where FSDP has gathered or sharded the parameter since.
    """
    for held, before in pairs:
        for key, tensor in before.items():
            now = held.get(key)
            if now is not tensor and _are_alike(now, tensor):
                scope.callback(held.__setitem__, key, now)
                held[key] = tensor


def _are_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and is_ordinary(one)
        and is_ordinary(other)
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass such as a DTensor, which FSDP shards."""
    return type(tensor) in (Tensor, Parameter)


class Bindings:
    """What the names that a region can reach are bound to, during its forward.

    Each walk (`reach`) lists the tensors and modules of the same names in the same
    order, so that names are compared by their places in the lists. A walk takes long,
    so that none is taken where each name that the last one followed is bound to the
    same object still.
    """

    __slots__ = (
        *("_begun", "_ended", "_bound", "_modules", "_reached", "_sequences"),
        "_tensors",
    )

    def __init__(self, reached: Reached, tensors: list[Tensor]):
        """Note the names before the forward; `tensors` holds no activation's graph."""
        self._tensors = tensors
        self._modules = reached.modules
        self._begun = reached.containers
        self._sequences = _sequences_of(reached)
        self._ended: tuple[list[Place], list[Module]] | None = None
        # Nothing may be held here that holds a graph.
        is_sure = not (reached.is_cut or reached.runs_torchscript)
        is_sure = is_sure and _are_same(tensors, reached.tensors)
        self._reached = reached if is_sure else None
        self._bound = _bound_now(reached) if is_sure else []

    def grown(self) -> list[tuple[Any, int, int]]:
        """Return the containers that the forward lengthened, with both lengths."""
        return [
            (held, len(items), len(held))
            for held, items in self._begun
            if len(held) > len(items)
        ]

    def note_end(self, function: Any, others: list[Any]) -> bool:
        """Note the names after the forward; return whether it bound any itself."""
        now = reach(function, others)
        self._ended = list(map(place_of, now.tensors)), now.modules
        self._sequences = _sequences_of(now)
        return self._ended != (list(map(place_of, self._tensors)), self._modules)

    def _is_as_begun(self) -> bool:
        """Return whether every name surely is as it was when the forward began."""
        if self._reached is None or self._ended is not None:
            return False
        return _are_same(_bound_now(self._reached), self._bound)

    def rebound(self, function: Any, arguments: HeldArguments) -> list[Tensor]:
        """Return the tensors to which other code has bound a name since the forward.

        Names that a recompute restores have been restored before the call.
        """
        if self._is_as_begun():
            return []
        now = reach(function, arguments.others)
        found = _shifted(self._sequences)
        if not _are_same(now.tensors, self._tensors):
            places = list(map(place_of, now.tensors))
            begun = list(map(place_of, self._tensors))
            ended = self._ended[0] if self._ended else begun
            given = [held.given() for held in arguments.tensors]
            known = {place_of(tensor) for tensor in given if tensor is not None}
            found += [now.tensors[i] for i in _other(places, begun, ended, known)]
        if not _are_same(now.modules, self._modules):
            last = self._ended[1] if self._ended else self._modules
            for i in _other(now.modules, self._modules, last):
                found += reach(now.modules[i]).tensors
        if not found:
            return []
        # FSDP exchanges a DTensor for the gathered parameter.
        is_sharded = not all(map(is_ordinary, self._tensors))
        return [
            tensor
            for tensor in found
            if address_of(tensor) and not (is_sharded and isinstance(tensor, Parameter))
        ]


def _bound_now(reached: Reached) -> list[Any]:
    """Return what each name that a walk has followed is bound to now, in its order."""
    if RERUN:
        return list(RERUN[0].bound_now(reached))
    found: list[Any] = []
    for module in reached.modules:
        held = module.__dict__
        for key in ("_parameters", "_buffers", "_modules"):
            found += held[key].values()
    for value in reached.objects:
        found += attributes_of(value).values()
    for attributes, keys in reached.attributes:
        found.append(len(attributes))  # The walk looks for further ones if it changes.
        found += map(attributes.get, keys)
    for container, _ in reached.containers:
        found += container.values() if isinstance(container, dict) else container
    for function in reached.functions:
        found += (function.__code__, function.__defaults__, function.__kwdefaults__)
        found += closed_over(function).values()
    found += [namespace.get(key) for namespace, key, _ in reached.slots]
    return found


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor's elements lie; two views of a storage may differ."""
    address = address_of(tensor)
    return (address, tensor.storage_offset() if address else 0, *metadata(tensor))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    if RERUN:
        return bool(RERUN[0].are_same(some, others))
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _other(
    now: list[Any], begun: list[Any], ended: list[Any], known: Collection[Any] = ()
) -> list[int]:
    """Return the indices of what was bound neither when the forward began nor ended.

    Both count, as a recompute restores some of the names that the forward bound. Where
    names were added or removed, only what no name was bound to is known to be another.
    """
    if now == ended:
        return []
    if len(now) == len(begun) == len(ended):
        triples = zip(now, begun, ended, strict=True)
        return [i for i, (a, b, c) in enumerate(triples) if a not in (b, c)]
    everything = {*begun, *ended, *known}
    return [i for i, one in enumerate(now) if one not in everything]


def _sequences_of(reached: Reached) -> Sequences:
    """Return what is read by index and may change its length, with its items' ids."""
    lists = [
        (module, list(map(id, module)))
        for module in reached.modules
        if isinstance(module, _MODULE_LISTS)
    ]
    return lists + [
        (held, items) for held, items in reached.containers if isinstance(held, _LISTS)
    ]


def _shifted(sequences: Sequences) -> list[Tensor]:
    """Return the tensors of sequences that may be found at another index than before.

    What a sequence has lost may have been read by its index from the end.
    """
    found = []
    for held, before in sequences:
        if len(held) == len(before):
            continue
        for item, was in itertools.zip_longest(held, before):
            if len(held) < len(before) or id(item) != was:
                found += reach(item).tensors
    return found
