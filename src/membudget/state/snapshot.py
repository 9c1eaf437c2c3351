"""The state that a step starts from, held so that every run starts from the same.

Python objects are put back by identity: a holder (the attributes of a module, a list, a
dict) holds the same things again. Tensors are put back by content, in place, so that
whoever else holds them sees the old content too. Gradients are laid aside while runs
are compared, and given back in the end: the very same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from membudget import _torch
from membudget.errors import MembudgetError, OptionError
from membudget.scope import Scope
from membudget.state.copies import HeldTensor, hold, is_same, write
from membudget.state.identity import version_of
from membudget.state.rng import Stream, frozen, global_streams
from membudget.state.walk import Holder, copy_of, put_back, walk


@dataclass
class _HeldState:
    """One tensor of the start state.

    Attributes:
        tensor: The tensor itself.
        content: A copy of its content.
        alias: Its storage and shape, for a step that exchanges them (`p.data = ...`).
        requires_grad: Whether it required a gradient.
        grad: Its gradient, laid aside, with a copy of that one's content.
    """

    tensor: Tensor
    content: HeldTensor
    alias: Tensor
    requires_grad: bool
    grad: tuple[Tensor, HeldTensor] | None


class State:
    """Everything that a step can change, as it was when this was made.

    Args:
        roots: The objects whose state it is, with the name under which each is
            reported; two may have the same name.

    Raises:
        OptionError: If a parameter is not yet there (a lazy module's).
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], contents: bool = True) -> None:
        """Hold the state; nothing is changed.

        Args:
            roots: The objects.
            contents: Whether to hold what is in the tensors. A step on fake tensors
                cannot write it, and it may not be there.
        """
        found = walk(roots)
        self._tensors = {
            name: _held_state(name, tensor)
            for name, (_, tensor) in found.tensors.items()
            if contents
        }
        self._gradients = [
            (tensor, tensor.grad)
            for _, tensor in found.tensors.values()
            if not contents and tensor.is_leaf
        ]
        self._leaves = {
            id(held.tensor)
            for held in self._tensors.values()
            if held.requires_grad and held.tensor.is_leaf
        }
        self._holders: list[tuple[Holder, Any]] = [
            (holder, copy_of(holder)) for holder in found.holders
        ]
        self._streams: dict[str, tuple[Stream, Any]] = {
            name: (stream, stream.read())
            for name, stream in (global_streams() | found.streams).items()
        }

    def content(self, name: str) -> HeldTensor | None:
        """Return the content of a tensor, if there was one of that name."""
        held = self._tensors.get(name)
        return None if held is None else held.content

    def had_leaf(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was there, and gets a gradient if a step uses it."""
        return id(tensor) in self._leaves

    def stream_states(self) -> dict[str, Any]:
        """Return the state of each random stream, by name."""
        return {name: frozen(state) for name, (_, state) in self._streams.items()}

    def restore(self) -> None:
        """Put everything back, except gradients, which are laid aside.

        Raises:
            MembudgetError: If the content of a tensor cannot be put back.
        """
        for holder, content in self._holders:
            put_back(holder, content)
        for name, held in self._tensors.items():
            _restore_tensor(name, held)
        for tensor, _ in self._gradients:
            tensor.grad = None
        for stream, state in self._streams.values():
            stream.write(state)
        # Casts of weights that autocast remembers would be found by the next run.
        torch.clear_autocast_cache()

    def restore_gradients(self) -> None:
        """Give the gradients back that were laid aside."""
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        for name, held in self._tensors.items():
            if held.grad is not None:
                grad, content = held.grad
                _write_if_changed(f"the gradient of {name!r}", grad, content)
                held.tensor.grad = grad


def _held_state(name: str, tensor: Tensor) -> _HeldState:
    if torch.nn.parameter.is_lazy(tensor):
        raise OptionError(
            f"{name!r} has no shape yet, because its module is lazy; an audit needs a "
            f"model that can be put back. Run the model once, then audit it."
        )
    grad = tensor.grad if tensor.is_leaf else None
    return _HeldState(
        tensor,
        hold(tensor),
        tensor.detach(),
        tensor.requires_grad,
        None if grad is None else (grad, hold(grad)),
    )


def _restore_tensor(name: str, held: _HeldState) -> None:
    tensor = held.tensor
    if _is_plain(tensor) and _layout(tensor) != _layout(held.alias):
        tensor.data = held.alias
    _write_if_changed(repr(name), tensor, held.content)
    if tensor.is_leaf:
        tensor.grad = None
        if tensor.requires_grad != held.requires_grad:
            tensor.requires_grad_(held.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor has one storage, which a step may exchange for another."""
    kinds = (Tensor, torch.nn.Parameter)
    return (
        type(tensor) in kinds
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write_if_changed(name: str, tensor: Tensor, content: HeldTensor) -> None:
    if is_same(hold(tensor), content):
        return
    write(tensor, content)
    if not is_same(hold(tensor), content):
        raise MembudgetError(
            f"the audited step changed {name} ({content.about}), and that cannot be "
            f"put back"
        )


_SMALL_BYTES = 64 * 1024

Snapshots = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def take_snapshots(buffers: list[Tensor]) -> Snapshots:
    """Copy each buffer once."""
    unique = {id(buffer): buffer for buffer in buffers}
    with _torch.without_dispatch_modes():
        return [
            (buffer, buffer.detach().clone())
            for buffer in unique.values()
            if not buffer.requires_grad
        ]


def is_small(buffer: Tensor) -> bool:
    """Tell whether a copy costs little; nobody can tell of a sparse tensor."""
    return buffer.layout is not torch.strided or buffer.nbytes <= _SMALL_BYTES


def enter_snapshots(scope: Scope, snapshots: Snapshots) -> None:
    """Put the copies into their buffers until `scope` ends; leave no version moved."""
    buffers = [buffer for buffer, _ in snapshots]
    versions = [version_of(buffer) for buffer in buffers]
    with torch.no_grad(), _torch.without_dispatch_modes():
        current = [buffer.detach().clone() for buffer in buffers]

        def undo() -> None:
            with torch.no_grad(), _torch.without_dispatch_modes():
                for buffer, content in zip(buffers, current, strict=True):
                    buffer.copy_(content)
            _torch.set_versions(buffers, versions)

        scope.callback(undo)
        for buffer, copy in snapshots:
            buffer.copy_(copy)
        # What the recompute saves has the version that it will have when this is
        # undone: a view of a wrapper cannot be told by its address.
        _torch.set_versions(buffers, versions)
