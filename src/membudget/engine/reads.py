"""What a region read besides its arguments, and how a recompute finds it again.

Three kinds of things, three ways:

* *Buffers* (and plain tensor attributes of modules) are state that a forward may
  advance: BatchNorm's statistics, a router's bias, an amax history. They are copied
  before the forward. A recompute starts from the copy, and what it writes is undone,
  with the version counters, so that the step advances them once.
* *Training flags*, and the attributes that a forward binds on modules of the user's own
  classes (a counter, a lazily made mask), are bound to what they were, for the time of
  the recompute. What a list or dict among them holds is not.
* *Everything else* is compared by version and storage with what the forward left. A
  change is an error once the recompute reads it (see `watch`).

BatchNorm's kernel writes its running statistics without telling the version counter.
So its buffers, and all small ones, are always put back; another large one (a causal
mask) only when its version says that the forward wrote it, and its copy is dropped at
once otherwise.

In a call that is verified, fingerprints from before and after the forward tell what it
wrote behind the version counters. The copies of the large buffers of such a function
stay from then on; a parameter or a tensor in a dict cannot be put back, so that its
recompute is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from membudget.engine.arguments import HeldArguments
from membudget.engine.calls import Calls
from membudget.engine.contents import Contents
from membudget.engine.reach import Reached, reach
from membudget.engine.watch import Watch, rewritten_error, silently_written_error
from membudget.scope import Scope
from membudget.state.bits import Fingerprint, content_of
from membudget.state.identity import address_of, version_of
from membudget.state.snapshot import enter_snapshots, is_small, take_snapshots


class Externals(NamedTuple):
    """Storages from outside of a region that are not what they were in its forward.

    Attributes:
        changed: Names of what somebody changed, by address.
        put_back: Where the buffers lie that hold what the forward found, for as long
            as the recompute runs.
    """

    changed: dict[int, str]
    put_back: frozenset[int]


class Reads:
    """What one forward could read besides its arguments."""

    __slots__ = (
        "_addresses",
        "_containers",
        "_contents",
        "_gradients",
        "_grown",
        "_modules",
        "_namespaces",
        "_rewritten",
        "_silent",
        "_snapshots",
        "_tensors",
        "_training",
        "_versions",
        "_written",
    )

    def __init__(self, reached: Reached):
        """Note everything before the function runs."""
        # Detached, so that an activation kept on a module does not keep its graph.
        self._tensors = [
            t if t.grad_fn is None else t.detach() for t in reached.tensors
        ]
        self._versions = [version_of(t) for t in self._tensors]
        self._addresses = [address_of(t) for t in self._tensors]
        self._modules = reached.modules
        self._training = [module.training for module in reached.modules]
        self._namespaces = _namespaces(reached)
        self._silent = reached.silent
        self._containers = reached.containers
        self._grown: list[tuple[Any, int, int]] = []
        self._rewritten: dict[int, Fingerprint | None] = {}
        self._contents: Contents | None = None
        self._gradients: list[tuple[Tensor, Tensor | None, int]] = []
        self._written: list[Tensor] = []
        self._snapshots = take_snapshots(reached.buffers) if reached.buffers else []

    def begin_check(self) -> None:
        """Take the fingerprint of everything, before the function runs."""
        self._contents = Contents(self._tensors)
        self._gradients = [
            (tensor, gradient, -1 if gradient is None else version_of(gradient))
            for tensor in self._tensors
            if tensor.requires_grad
            for gradient in (tensor.grad,)
        ]

    def not_put_back(self) -> list[Tensor]:
        """Return what a recompute reads as it finds it."""
        state = self._put_back()
        return [tensor for tensor in self._tensors if id(tensor) not in state]

    def _put_back(self) -> set[int]:
        """Return, by `id`, the buffers that a recompute finds as the forward did."""
        return {id(buffer) for buffer, _ in self._snapshots}

    def finish(self, calls: Calls | None = None) -> None:
        """Notice, after the function ran, what it changed itself."""
        contents, self._contents = self._contents, None
        written = set(map(id, contents.silently_written())) if contents else None
        if contents is not None and calls is not None:
            calls.owner.adds_gradients |= self._has_added_gradients()
        versions = [version_of(t) for t in self._tensors]
        if versions != self._versions:
            self._note_rewritten(versions)
        self._grown = [
            (held, before, len(held))
            for held, before in self._containers
            if len(held) > before
        ]
        if self._snapshots:
            if calls is not None and (written or calls.writes_silently):
                self._silent |= self._note_buffers(written or set(), calls)
            moved = {id(self._tensors[i]) for i in self._rewritten}
            self._snapshots = [
                (buffer, copy)
                for buffer, copy in self._snapshots
                if is_small(buffer) or id(buffer) in moved or id(buffer) in self._silent
            ]
        if written:
            self._written = [t for t in self.not_put_back() if id(t) in written]

    def _has_added_gradients(self) -> bool:
        noted, self._gradients = self._gradients, []
        return any(
            tensor.grad is not before
            or (before is not None and version_of(before) != version)
            for tensor, before, version in noted
        )

    def _note_buffers(self, written: set[int], calls: Calls) -> set[int]:
        """Return, by `id`, the buffers whose copies stay though no version says so."""
        copied = self._put_back()
        calls.writes_silently |= bool(written & copied)
        return copied if calls.writes_silently else set()

    def _note_rewritten(self, versions: list[int]) -> None:
        state = self._put_back()
        self._rewritten = {
            i: None if id(tensor) in state else content_of(tensor)
            for i, tensor in enumerate(self._tensors)
            if versions[i] != self._versions[i]
        }
        self._versions = versions

    def grown(self) -> list[tuple[Any, int, int]]:
        """Return the containers that grew in the forward, with both lengths."""
        return self._grown

    def enter(
        self,
        scope: Scope,
        function: Any,
        arguments: HeldArguments,
        hide_gradients: bool,
    ) -> Externals | None:
        """Bring everything back for a recompute; see `Surroundings.enter_state`."""
        if self._written:
            names = names_of(function, arguments.others)
            raise silently_written_error([name_of(t, names) for t in self._written])
        self._enter_attributes(scope)
        watch = self._watch(function, arguments)
        if self._snapshots:
            enter_snapshots(scope, self._snapshots)
        if hide_gradients:
            _hide_gradients(scope, self._tensors)
        if watch is not None:
            scope.enter_context(watch)
        elif not self._snapshots:
            return None
        put_back = frozenset(address_of(buffer) for buffer, _ in self._snapshots)
        return Externals({} if watch is None else watch.changed, put_back)

    def _enter_attributes(self, scope: Scope) -> None:
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training != training:
                scope.callback(setattr, module, "training", module.training)
                module.training = training
        for namespace, before in self._namespaces:
            now = namespace.copy()
            # Whatever the recompute binds is unbound again, also where nothing was to
            # be brought back.
            scope.callback(_rebind, namespace, now)
            _rebind(namespace, before)

    def _watch(self, function: Any, arguments: HeldArguments) -> Watch | None:
        """Return the mode that looks out for what was changed, if anything was."""
        moved = arguments.changed()
        changed = self._changed()
        if not (changed or self._rewritten or moved):
            return None
        state = self._put_back()
        names = names_of(function, arguments.others)
        watched = {address_of(t): name_of(t, names) for t in changed}
        for held in moved:
            if held.changed_by_region:
                raise rewritten_error(held.name)
            watched[address_of(held.alias)] = held.name
        rewritten = {
            address_of(self._tensors[i]): name_of(self._tensors[i], names)
            for i in self._rewritten
            if id(self._tensors[i]) not in state
        }
        for address in watched.keys() & rewritten.keys():
            del rewritten[address]
        return Watch(watched, rewritten) if watched or rewritten else None

    def _changed(self) -> list[Tensor]:
        """Return what somebody changed after the forward ended."""
        changed = [
            i
            for i, (tensor, version, address) in enumerate(
                zip(self._tensors, self._versions, self._addresses, strict=True)
            )
            if version_of(tensor) != version or address_of(tensor) != address
        ]
        if not changed:
            return []
        # What the forward wrote, a later forward may have written again: a buffer is
        # brought back from its copy, and another tensor must have the same content.
        return [
            self._tensors[i]
            for i in changed
            if i not in self._rewritten
            or self._rewritten[i] not in (None, content_of(self._tensors[i]))
        ]


_ABSENT = object()


def _rebind(namespace: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bind in `namespace` what is bound in `wanted`, and nothing else."""
    for key in namespace.keys() - wanted.keys():
        del namespace[key]
    for key, value in wanted.items():
        if namespace.get(key, _ABSENT) is not value:
            namespace[key] = value


def _namespaces(reached: Reached) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return where a forward may bind names, with a copy of what is bound.

    An activation that is kept on a module is left out of the copy: it would keep its
    graph, and with it the regions of the step before.
    """
    pairs = []
    for module in reached.modules:
        buffers = module.__dict__["_buffers"]
        if buffers:
            pairs.append((buffers, buffers.copy()))
    for module in reached.stateful_modules:
        bound = module.__dict__.copy()
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                bound[key] = value.detach()
        pairs.append((module.__dict__, bound))
    return pairs


def names_of(function: Any, others: list[Any]) -> dict[int, str]:
    """Return the names of what `function` reaches, by identity and by storage."""
    reached = reach(function, others, names=True)
    known = dict(reached.names or {})
    for tensor in reached.tensors:
        known.setdefault(address_of(tensor), known[id(tensor)])
    return known


def name_of(tensor: Tensor, names: dict[int, str]) -> str:
    """Return what an error calls a tensor that the region reached."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    name = names.get(id(tensor)) or names.get(address_of(tensor))
    return f"{kind} {name!r}" if name else f"a {kind} of shape {tuple(tensor.shape)}"


def _hide_gradients(scope: Scope, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            scope.callback(setattr, tensor, "grad", tensor.grad)
            tensor.grad = None
