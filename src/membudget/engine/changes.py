"""What was changed since the forward, found before a recompute uses it.

Walking what a function can reach finds more than the function reads. So a change counts
only when an operator of the recompute takes the changed storage as an operand. `Watch`
checks the operands; it is entered only if something did change, so an unchanged step
pays nothing.

A tensor that the region *itself* changes (embedding's `max_norm` renormalises its
weight) is a separate case: the recompute starts from the content that the forward left.
That is exact if the first operator to touch the tensor is the one that writes it, and
this and every later write leaves it unchanged; otherwise the recompute is refused.

`Contents` finds writes behind the version counters: through `.data`, through NumPy, or
by a kernel such as batch_norm's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    is_view_operator,
    set_versions,
    tree_iter,
    without_modes,
    written_arguments,
)
from membudget.engine.reach import reach
from membudget.errors import ChangedSinceForwardError
from membudget.observer import Observer
from membudget.state.bits import content_of, has_changed
from membudget.state.identity import address_of, version_of


class Contents:
    """The fingerprints of some tensors at one moment."""

    __slots__ = ("_noted",)

    def __init__(self, tensors: Iterable[Tensor]):
        """Take the fingerprints."""
        with without_modes():
            self._noted = [
                (tensor, version_of(tensor), address_of(tensor), content_of(tensor))
                for tensor in tensors
            ]

    def silently_written(self) -> list[Tensor]:
        """Return tensors whose content has changed, but not version or storage."""
        with without_modes():
            return [
                tensor
                for tensor, version, address, content in self._noted
                if version_of(tensor) == version
                and address_of(tensor) == address
                and has_changed(tensor, content)
            ]


Names = dict[int, str]


class Watch(Observer):
    """Raises when an operator reads a storage that was changed."""

    def __init__(self, changed: Names, rewritten: Names):
        """Watch storages.

        Args:
            changed: Storages that other code changed since the forward: names by
                address.
            rewritten: Storages that the region itself changed, likewise.
        """
        self.changed = changed
        self.rewritten = dict(rewritten)
        self.settled: Names = {}  # Of these, what a write has left unchanged.
        self.versions: list[tuple[Tensor, int]] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check the operands, then run the operator."""
        if is_view_operator(operator):
            return operator(*args, **kwargs)
        operands = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        addresses = {address_of(t) for t in operands}
        hit = addresses & self.changed.keys()
        if hit:
            raise changed_error([self.changed[address] for address in sorted(hit)])
        if addresses.isdisjoint(self.rewritten | self.settled):
            return operator(*args, **kwargs)
        return self._rewrite(operator, args, kwargs, addresses)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Restore the versions of tensors that were rewritten with the same content."""
        super().__exit__(kind, error, trace)
        for tensor, version in reversed(self.versions):
            set_versions([tensor], [version])

    def _rewrite(self, func: Any, args: Any, kwargs: Any, addresses: set[int]) -> Any:
        written = {address_of(t): t for t in written_arguments(func, args, kwargs)}
        for address in addresses & self.rewritten.keys():
            if address not in written:
                raise rewritten_error(self.rewritten[address])
        names = self.rewritten | self.settled
        written = {a: t for a, t in written.items() if a in names}
        before = {a: t.detach().clone() for a, t in written.items()}
        self.versions += [(t, t._version) for t in written.values()]
        result = func(*args, **kwargs)
        for address, tensor in written.items():
            if not torch.equal(before[address], tensor.detach()):
                tensor.detach().copy_(before[address])
                raise rewritten_error(names[address])
            self.settled[address] = names[address]
            self.rewritten.pop(address, None)
        return result


def changed_error(names: list[str]) -> ChangedSinceForwardError:
    """Return the error for tensors that other code changed after the forward."""
    return ChangedSinceForwardError(
        f"{' and '.join(names)} was changed after the forward of a region that reads "
        "it, and before its recompute, so its gradients would be wrong. (Plain "
        "autograd: one of the variables needed for gradient computation has been "
        "modified by an inplace operation.) Change it after the backward, or pass the "
        "region a copy (`tensor.clone()`).",
        names,
    )


def rewritten_error(name: str) -> ChangedSinceForwardError:
    """Return the error for a tensor that the region itself changes."""
    return ChangedSinceForwardError(
        f"{name} is changed in place by the region itself, so a recompute cannot start "
        "from the content that the forward started from. Pass the region a copy "
        "(`tensor.clone()`), avoid the in-place operator (`inplace=False`), or "
        "make the tensor a buffer of a module that the region calls: buffers are "
        "restored before a recompute.",
        [name],
        by_region=True,
    )


def silently_written_error(
    names: list[str], by_recompute: bool = False
) -> ChangedSinceForwardError:
    """Return the error for tensors that the region writes behind the version counters.

    Args:
        names: The names of the tensors.
        by_recompute: Whether a recompute has written them already.
    """
    again = "has written" if by_recompute else "would write"
    return ChangedSinceForwardError(
        "A region writes memory behind the version counters (`.data`, NumPy, a kernel "
        f"such as batch_norm's): {', '.join(names)}. A recompute starts from the "
        f"content that the forward left, and {again} it again. Move the "
        "write out of the region, or make the tensor a buffer of a module that the "
        "region calls: buffers are restored before a recompute.",
        names,
        by_region=True,
    )


def names_of(function: Any, others: list[Any]) -> dict[int, str]:
    """Return the names of what `function` reaches, by identity and by storage."""
    reached = reach(function, others, names=True)
    known = dict(reached.names or {})
    for tensor in reached.tensors:
        known.setdefault(address_of(tensor), known[id(tensor)])
    return known


def name_of(tensor: Tensor, names: dict[int, str]) -> str:
    """Return how an error message names a tensor that the region reached."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    name = names.get(id(tensor)) or names.get(address_of(tensor))
    return f"{kind} {name!r}" if name else f"a {kind} of shape {tuple(tensor.shape)}"
