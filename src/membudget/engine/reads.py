"""Restore, for a recompute, the state that a region can read besides its arguments.

Buffers, module attributes and other tensors are treated differently:

* *Buffers*, and plain tensor attributes of modules, may be updated by a forward:
  BatchNorm's statistics, a router's bias, an amax history. The forward begins with a
  copy of each, and a recompute starts from the copies that were kept. What a recompute
  writes to those buffers is undone afterwards, with its version bumps, so that each
  step updates a buffer only once.
* *Names* that modules bind to training flags, parameters and buffers, and any attribute
  of a module of a user-defined class (a counter, a lazily built mask), are bound during
  a recompute as they were before the forward. The items of a list or dict that is an
  attribute are not restored.
* *All other tensors* must have the storage that they had before the forward and the
  version that they had at its end; one that the forward wrote to may have a later
  version if it has the same content. A changed tensor is an error if the recompute
  reads it (see `comparison`). So is a tensor to which other code has bound a name since
  (`weights[0] = ...`; see `bindings`).

The copies of small buffers (up to 64 KiB) are kept, and so are those of statistics,
which the kernels of normalisation layers write without a version bump. The copy of any
other large buffer, such as a causal mask, is dropped at the end of the forward, unless
the version shows that the forward wrote to the buffer.

In a verified call, fingerprints taken before and after the forward reveal writes that
bypass the version counters. Once a call wrote in this way to a large buffer that is no
statistic, that call and all later ones with its signature keep the copies of all large
buffers. Tensors without a copy, such as parameters and tensors in dicts, cannot be
restored: the recompute raises if the forward wrote to one in this way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from membudget.engine.arguments import HeldArguments
from membudget.engine.bindings import (
    Bindings,
    enter_parameters,
    namespaces_of,
    parameters_of,
    rebind,
)
from membudget.engine.calls import Calls
from membudget.engine.comparison import Contents, Watch
from membudget.engine.messages import (
    name_of,
    names_of,
    rewritten_error,
    silently_written_error,
)
from membudget.engine.native import RERUN
from membudget.engine.reach import Reached
from membudget.scope import Scope
from membudget.state.bits import Fingerprint, content_of
from membudget.state.identity import (
    address_of,
    addresses_of,
    version_of,
    versions_of,
)
from membudget.state.snapshot import enter_snapshots, is_small, take_snapshots


class Externals(NamedTuple):
    """Storages that other code changed after a forward, or that a recompute restores.

    Attributes:
        changed: Names of storages that other code changed, keyed by address.
        restored: Addresses of the buffers restored while the recompute runs.
    """

    changed: dict[int, str]
    restored: frozenset[int]


class Reads:
    """State that one forward can read besides its arguments.

    Attributes:
        grown: Containers that grew in the forward, with their old and new lengths.
    """

    __slots__ = (
        *("_addresses", "_bindings", "_contents", "_gradients", "_modules"),
        *("_namespaces", "_parameters", "_rewritten", "_silent", "_snapshots"),
        *("_tensors", "_training", "_versions", "_written", "grown"),
    )

    def __init__(self, reached: Reached):
        """Record the state that a region can read, before the function runs."""
        if RERUN:
            RERUN[0].note_reads(self, reached)
        else:
            self._note(reached)
        self._bindings = Bindings(reached, self._tensors)
        self._silent = reached.silent
        self.grown: list[tuple[Any, int, int]] = []
        self._rewritten: dict[int, Fingerprint | None] = {}
        self._contents: Contents | None = None
        self._gradients: list[tuple[Tensor, Tensor | None, int]] = []
        self._written: list[Tensor] = []
        self._snapshots = take_snapshots(reached.buffers) if reached.buffers else []

    def _note(self, reached: Reached) -> None:
        # Detached, so that an activation stored on a module does not keep its graph
        # alive.
        self._tensors = [
            t if t.grad_fn is None else t.detach() for t in reached.tensors
        ]
        self._versions = versions_of(self._tensors)
        self._addresses = addresses_of(self._tensors)
        self._modules = reached.modules
        self._training = [module.training for module in reached.modules]
        self._namespaces = namespaces_of(reached)
        self._parameters = parameters_of(reached)

    def begin_check(self) -> None:
        """Fingerprint all reachable tensors, and note their gradients."""
        self._contents = Contents(self._tensors)
        self._gradients = [
            (tensor, gradient, -1 if gradient is None else version_of(gradient))
            for tensor in self._tensors
            if tensor.requires_grad
            for gradient in (tensor.grad,)
        ]

    def not_restored(self) -> list[Tensor]:
        """Return the reachable tensors that a recompute does not restore."""
        state = self._restored()
        found = {id(tensor): tensor for tensor in self._tensors}
        return [tensor for key, tensor in found.items() if key not in state]

    def _restored(self) -> set[int]:
        """Return the ids of the buffers that a recompute restores."""
        return {id(buffer) for buffer, _ in self._snapshots}

    def finish(self, function: Any, others: list[Any], calls: Calls | None) -> None:
        """Detect, at the end of the forward, which state the function changed.

        Copies of buffers that no recompute needs are dropped.
        """
        contents, self._contents = self._contents, None
        written = set(map(id, contents.silently_written())) if contents else None
        if contents is not None and calls is not None:
            calls.owner.adds_gradients |= self._has_added_gradients()
        if not (RERUN and RERUN[0].has_versions(self)):
            versions = versions_of(self._tensors)
            if versions != self._versions:
                self._note_rewritten(versions)
        self.grown = self._bindings.grown()
        if self.grown or contents or (calls and calls.owner.binds):
            binds = self._bindings.note_end(function, others)
            if calls is not None:
                calls.owner.binds |= binds
        if self._snapshots:
            if calls is not None and (written or calls.writes_silently):
                self._silent |= self._note_buffers(written or set(), calls)
            # Drop the copies of large buffers that the forward did not write.
            moved = {id(self._tensors[i]) for i in self._rewritten}
            self._snapshots = [
                (buffer, copy)
                for buffer, copy in self._snapshots
                if is_small(buffer) or id(buffer) in moved or id(buffer) in self._silent
            ]
        if written:
            self._written = [t for t in self.not_restored() if id(t) in written]

    def _has_added_gradients(self) -> bool:
        noted, self._gradients = self._gradients, []
        return any(
            tensor.grad is not before
            or (before is not None and version_of(before) != version)
            for tensor, before, version in noted
        )

    def _note_buffers(self, written: set[int], calls: Calls) -> set[int]:
        """Return ids of buffers to restore although their versions are unchanged."""
        # The copies of small buffers and statistics are kept in any case, so a write to
        # one of them is no reason to keep those of large buffers.
        large = {id(buffer) for buffer, _ in self._snapshots if not is_small(buffer)}
        large -= self._silent
        calls.writes_silently |= bool(written & large)
        return large if calls.writes_silently else set()

    def _note_rewritten(self, versions: list[int]) -> None:
        state = self._restored()
        self._rewritten = {
            i: None if id(tensor) in state else content_of(tensor)
            for i, tensor in enumerate(self._tensors)
            if versions[i] != self._versions[i]
        }
        self._versions = versions

    def enter(
        self,
        scope: Scope,
        function: Any,
        arguments: HeldArguments,
        hide_gradients: bool,
    ) -> Externals | None:
        """Restore all state for a recompute; see `Surroundings.enter_state`."""
        if self._written:
            names = names_of(function, arguments.others)
            raise silently_written_error([name_of(t, names) for t in self._written])
        self._enter_attributes(scope)
        # Before the buffers are restored, which bumps their versions.
        watch = self._watch(function, arguments)
        if self._snapshots:
            enter_snapshots(scope, self._snapshots)
        if hide_gradients:
            _hide_gradients(scope, self._tensors)
        if watch is not None:
            scope.enter_context(watch)
        elif not self._snapshots:
            return None
        restored = frozenset(address_of(buffer) for buffer, _ in self._snapshots)
        return Externals({} if watch is None else watch.changed, restored)

    def _enter_attributes(self, scope: Scope) -> None:
        if not (RERUN and RERUN[0].has_names(self)):
            for module, training in zip(self._modules, self._training, strict=True):
                if module.training != training:
                    scope.callback(setattr, module, "training", module.training)
                    module.training = training
            enter_parameters(scope, self._parameters)
        for namespace, before in self._namespaces:
            now = namespace.copy()
            # Names that the recompute binds are unbound afterwards, even if nothing had
            # to be restored.
            scope.callback(rebind, namespace, now)
            rebind(namespace, before)

    def _watch(self, function: Any, arguments: HeldArguments) -> Watch | None:
        """Return an observer that raises when the recompute reads a changed storage.

        Return `None` if neither the region nor other code has changed any.
        """
        moved = arguments.changed()
        changed = self._changed() + self._bindings.rebound(function, arguments)
        if not (changed or self._rewritten or moved):
            return None
        state = self._restored()
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
        # Other code has changed these since, which is reported instead.
        for address in watched.keys() & rewritten.keys():
            del rewritten[address]
        return Watch(watched, rewritten) if watched or rewritten else None

    def _changed(self) -> list[Tensor]:
        """Return the tensors that other code changed after the forward ended."""
        if RERUN and RERUN[0].has_versions(self):
            return []
        versions = versions_of(self._tensors)
        addresses = addresses_of(self._tensors)
        if versions == self._versions and addresses == self._addresses:
            return []
        noted = zip(self._versions, self._addresses, strict=True)
        now = zip(versions, addresses, strict=True)
        both = enumerate(zip(noted, now, strict=True))
        changed = [i for i, (before, after) in both if before != after]
        # A later forward may have written again what this one wrote: a buffer is
        # restored from its copy, any other tensor must have the same content.
        return [
            self._tensors[i]
            for i in changed
            if i not in self._rewritten
            or self._rewritten[i] not in (None, content_of(self._tensors[i]))
        ]


def _hide_gradients(scope: Scope, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            scope.callback(setattr, tensor, "grad", tensor.grad)
            tensor.grad = None
