"""Capture and restore the state of a step: all of it, or only some buffers.

`State` lets every run of a step start from the same state. Containers are restored by
identity: afterwards, modules, lists and dicts contain the same objects as before.
Tensors are restored in place, so that all references see the old content. Gradients are
removed while steps run, and the same gradient tensors are attached again at the end.

`take_snapshots` and `enter_snapshots` let a recompute start from the buffer contents
that the forward saw, and undo any updates that the recompute makes.
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
from membudget.state.autocast import clear_casts
from membudget.state.bits import has_bits
from membudget.state.identity import (
    TensorCopy,
    host_copy,
    is_leaf,
    still_has,
    version_of,
    write_back,
)
from membudget.state.rng import Stream, frozen, global_streams
from membudget.state.walk import Holder, items_of, put_back, walk

_SMALL_BYTES = 64 * 1024

Snapshots = list[tuple[Tensor, Tensor]]


@dataclass
class _TensorState:
    """The captured state of one tensor.

    Attributes:
        content: Host copy of the tensor's content.
        alias: Detached alias of the original storage, to undo `tensor.data = ...`.
        grad: The tensor's gradient and a host copy of the gradient, if there is one.
    """

    tensor: Tensor
    content: TensorCopy
    alias: Tensor
    requires_grad: bool
    grad: tuple[Tensor, TensorCopy] | None


class State:
    """A snapshot of everything that a training step can change."""

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        contents: bool = True,
        part_of: State | None = None,
    ) -> None:
        """Capture the state without changing it.

        Args:
            roots: Pairs of a name, for reports and errors, and an object to capture.
            contents: Whether to copy the tensors' contents. Pass `False` if the step
                runs on fake tensors or the tensors are on `meta`.
            part_of: A state captured just before, whose copies of tensors are shared.

        Raises:
            OptionError: If a parameter of a lazy module has no shape yet.
        """
        found = walk(roots)
        copied = part_of._tensors.values() if part_of else ()
        known = {id(state.tensor): state for state in copied}
        self._tensors: dict[str, _TensorState] = {
            name: known.get(id(tensor)) or _captured(name, tensor)
            for name, (_, tensor) in found.tensors.items()
            if contents
        }
        self._gradients = [
            (tensor, tensor.grad)
            for _, tensor in found.tensors.values()
            if not contents and is_leaf(tensor)
        ]
        self._leaves = {
            id(state.tensor)
            for state in self._tensors.values()
            if state.requires_grad and is_leaf(state.tensor)
        }
        self._holders: list[tuple[Holder, Any]] = [
            (holder, items_of(holder)) for holder in found.holders
        ]
        self._streams: dict[str, tuple[Stream, Any]] = {
            name: (stream, stream.read())
            for name, stream in (global_streams() | found.streams).items()
        }

    def content(self, name: str) -> TensorCopy | None:
        """Return the captured content of the tensor called `name`, or `None`."""
        state = self._tensors.get(name)
        return None if state is None else state.content

    def had_leaf(self, tensor: Tensor) -> bool:
        """Return whether a tensor was captured as a leaf that requires a gradient."""
        return id(tensor) in self._leaves

    def stream_states(self) -> dict[str, Any]:
        """Return the captured state of each random generator, keyed by name."""
        return {name: frozen(state) for name, (_, state) in self._streams.items()}

    def restore(self) -> None:
        """Restore the captured state, except gradients, which become `None`.

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
        clear_casts()

    def gradients(self) -> list[Tensor]:
        """Return the gradients whose contents were not copied."""
        return [gradient for _, gradient in self._gradients if gradient is not None]

    def restore_gradients(self) -> None:
        """Attach the original gradients again, with the content that was copied."""
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
    grad = tensor.grad if is_leaf(tensor) else None
    return _TensorState(
        tensor,
        host_copy(tensor),
        tensor.detach(),
        tensor.requires_grad,
        None if grad is None else (grad, host_copy(grad)),
    )


def _restore_tensor(name: str, state: _TensorState) -> None:
    tensor = state.tensor
    # The step has assigned `tensor.data`: undo that before writing the content.
    if has_bits(tensor) and _layout(tensor) != _layout(state.alias):
        tensor.data = state.alias
    _write_if_changed(repr(name), tensor, state.content)
    if is_leaf(tensor):
        tensor.grad = None
        if tensor.requires_grad != state.requires_grad:
            tensor.requires_grad_(state.requires_grad)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write_if_changed(name: str, tensor: Tensor, content: TensorCopy) -> None:
    if still_has(tensor, content):
        return
    write_back(tensor, content)
    if not still_has(tensor, content):
        raise MembudgetError(
            f"the audited step changed {name} ({content.about}), and that cannot be "
            f"put back"
        )


@torch.no_grad()
def take_snapshots(buffers: list[Tensor]) -> Snapshots:
    """Copy each distinct buffer that does not require a gradient."""
    unique = {id(buffer): buffer for buffer in buffers}
    with _torch.without_dispatch_modes():
        return [
            (buffer, buffer.detach().clone())
            for buffer in unique.values()
            if not buffer.requires_grad
        ]


def is_small(buffer: Tensor) -> bool:
    """Return whether a buffer is cheap to copy: up to 64 KiB, or sparse."""
    return buffer.layout is not torch.strided or buffer.nbytes <= _SMALL_BYTES


def enter_snapshots(scope: Scope, snapshots: Snapshots) -> None:
    """Restore buffers to their snapshots until `scope` ends.

    When `scope` ends, the buffers' previous contents are restored; version counters do
    not change.
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
