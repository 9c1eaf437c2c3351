"""Capture the state of a step, and restore it: all of it, or some buffers.

`State` lets every run of a step start from the same state. Python objects are restored
by identity: the attributes of a module, a list or a dict hold the same objects again.
Tensors are restored by content, in place, so that whoever else holds them sees the old
content too. Gradients are set aside while steps run, and given back in the end: the
same tensors.

`take_snapshots` and `enter_snapshots` let a recompute start from the buffers that the
forward saw, and undo what it writes into them.
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
from membudget.state.bits import has_bits
from membudget.state.identity import (
    TensorCopy,
    host_copy,
    is_same,
    version_of,
    write_back,
)
from membudget.state.rng import Stream, frozen, global_streams
from membudget.state.walk import Holder, items_of, put_back, walk

_SMALL_BYTES = 64 * 1024

Snapshots = list[tuple[Tensor, Tensor]]


@dataclass
class _TensorState:
    """One tensor of the captured state.

    Attributes:
        tensor: The tensor itself.
        content: A copy of its content.
        alias: Has its storage and shape, for a step that assigns `tensor.data`.
        requires_grad: Whether it required a gradient.
        grad: Its gradient, set aside, and a copy of the gradient's content.
    """

    tensor: Tensor
    content: TensorCopy
    alias: Tensor
    requires_grad: bool
    grad: tuple[Tensor, TensorCopy] | None


class State:
    """Everything that a step can change, as it was when this was created."""

    def __init__(self, roots: Iterable[tuple[str, Any]], contents: bool = True) -> None:
        """Capture the state; nothing is changed.

        Args:
            roots: The objects to walk, each with the name for reports and errors.
            contents: Whether to copy the tensors' contents. A step on fake tensors
                cannot write them, and `meta` tensors have none.

        Raises:
            OptionError: If a parameter has no shape yet (of a lazy module).
        """
        found = walk(roots)
        self._tensors = {
            name: _captured(name, tensor)
            for name, (_, tensor) in found.tensors.items()
            if contents
        }
        self._gradients = [
            (tensor, tensor.grad)
            for _, tensor in found.tensors.values()
            if not contents and tensor.is_leaf
        ]
        self._leaves = {
            id(state.tensor)
            for state in self._tensors.values()
            if state.requires_grad and state.tensor.is_leaf
        }
        self._holders: list[tuple[Holder, Any]] = [
            (holder, items_of(holder)) for holder in found.holders
        ]
        self._streams: dict[str, tuple[Stream, Any]] = {
            name: (stream, stream.read())
            for name, stream in (global_streams() | found.streams).items()
        }

    def content(self, name: str) -> TensorCopy | None:
        """Return the captured content of a tensor; `None` if none had that name."""
        state = self._tensors.get(name)
        return None if state is None else state.content

    def had_leaf(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was captured as a leaf that requires a gradient."""
        return id(tensor) in self._leaves

    def stream_states(self) -> dict[str, Any]:
        """Return the captured state of each random stream, by name."""
        return {name: frozen(state) for name, (_, state) in self._streams.items()}

    def restore(self) -> None:
        """Restore everything except gradients, which become `None`.

        Raises:
            MembudgetError: If the content of a tensor cannot be restored.
        """
        for holder, content in self._holders:
            put_back(holder, content)
        for name, state in self._tensors.items():
            _restore_tensor(name, state)
        for tensor, _ in self._gradients:
            tensor.grad = None
        for stream, captured in self._streams.values():
            stream.write(captured)
        # Otherwise the next run would find weights that autocast cast in this one.
        torch.clear_autocast_cache()

    def restore_gradients(self) -> None:
        """Give back the gradients that were set aside."""
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        for name, state in self._tensors.items():
            if state.grad is not None:
                grad, content = state.grad
                _write_if_changed(f"the gradient of {name!r}", grad, content)
                state.tensor.grad = grad


def _captured(name: str, tensor: Tensor) -> _TensorState:
    if torch.nn.parameter.is_lazy(tensor):
        raise OptionError(
            f"{name!r} has no shape yet, because its module is lazy; an audit needs a "
            f"model that can be put back. Run the model once, then audit it."
        )
    grad = tensor.grad if tensor.is_leaf else None
    return _TensorState(
        tensor,
        host_copy(tensor),
        tensor.detach(),
        tensor.requires_grad,
        None if grad is None else (grad, host_copy(grad)),
    )


def _restore_tensor(name: str, state: _TensorState) -> None:
    tensor = state.tensor
    if has_bits(tensor) and _layout(tensor) != _layout(state.alias):
        tensor.data = state.alias
    _write_if_changed(repr(name), tensor, state.content)
    if tensor.is_leaf:
        tensor.grad = None
        if tensor.requires_grad != state.requires_grad:
            tensor.requires_grad_(state.requires_grad)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write_if_changed(name: str, tensor: Tensor, content: TensorCopy) -> None:
    if is_same(host_copy(tensor), content):
        return
    write_back(tensor, content)
    if not is_same(host_copy(tensor), content):
        raise MembudgetError(
            f"the audited step changed {name} ({content.about}), and that cannot be "
            f"put back"
        )


@torch.no_grad()
def take_snapshots(buffers: list[Tensor]) -> Snapshots:
    """Copy each buffer once; buffers that require a gradient are left out."""
    unique = {id(buffer): buffer for buffer in buffers}
    with _torch.without_dispatch_modes():
        return [
            (buffer, buffer.detach().clone())
            for buffer in unique.values()
            if not buffer.requires_grad
        ]


def is_small(buffer: Tensor) -> bool:
    """Tell whether a copy is cheap: at most 64 KiB, or of unknown size (sparse)."""
    return buffer.layout is not torch.strided or buffer.nbytes <= _SMALL_BYTES


def enter_snapshots(scope: Scope, snapshots: Snapshots) -> None:
    """Write the copies into their buffers until `scope` ends.

    The end of `scope` restores the contents from before; version counters stay as they
    were throughout.
    """
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
        # A tensor that the recompute saves must have the version that it has after
        # `undo`; a view of a wrapper subclass cannot be recognised by its address.
        _torch.set_versions(buffers, versions)
