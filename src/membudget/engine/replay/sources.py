"""Sources: how a value's content is held, and checked before an operator reads it.

A parameter or any other leaf is held as it is, other tensors as detached aliases;
running statistics are copied. Under saved-tensor hooks around the region, those hooks
hold the source instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import (
    detach_with_version,
    is_fake,
    negative_view,
    without_dispatch_modes,
)
from membudget.engine.held import Packed
from membudget.engine.replay.tape import LiveStorage, LiveTensor, TapeValue
from membudget.state.bits import has_changed, is_freed
from membudget.state.identity import address_of, version_of


class SourceChangedError(Exception):
    """A source was written after the region's forward ended."""

    def __init__(self, tensor: Tensor):
        """Note the tensor that was written."""
        super().__init__("a source was changed")
        self.tensor = tensor


class SourceFreedError(Exception):
    """A parameter has no memory, because FSDP has resharded it."""


def check_source(value: TapeValue, tensor: Tensor) -> None:
    """Check that an operator is about to read what it read in the forward (Rule 5).

    A parameter whose `.data` was exchanged fails only here: autograd itself reads the
    new storage, as it does in the plain step.

    Raises:
        SourceChangedError: The storage was exchanged, or its content differs.
    """
    if value.address is not None and address_of(tensor) != value.address:
        raise SourceChangedError(tensor)
    if value.content is not None:
        (take, noted), value.content = value.content, None
        with without_dispatch_modes():
            if has_changed(tensor, noted, take):
                raise SourceChangedError(tensor)


def unpacked(value: TapeValue, unpack: Callable[[Any], Tensor]) -> Tensor:
    """Return a source from the saved-tensor hooks around the region.

    Raises:
        SourceChangedError: It was written after it was packed.
    """
    assert value.packed is not None
    tensor, is_changed = value.packed.unpacked(unpack)
    if is_changed:
        raise SourceChangedError(tensor)
    return tensor


def is_freed_parameter(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter whose memory FSDP has freed."""
    # The `isinstance` of Parameter alone takes 0.7 µs.
    return (
        type(tensor) is not Tensor
        and isinstance(tensor, Parameter)
        and is_freed(tensor)
    )


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def settle_source(
    source: TapeValue, outer: Hooks | None, take: Callable[[Tensor], Any] | None
) -> None:
    """Record how to detect changes of a source, or pack it with the surrounding hooks.

    Args:
        source: The source.
        outer: The saved-tensor hooks around the region.
        take: Fingerprints the content, in calls that compare contents, because some
            writers do not bump the version counter.
    """
    tensor = source.tensor
    assert tensor is not None
    if source.is_state:
        # The next call of the function overwrites it, before this call's backward.
        tensor = source.tensor = copy_of(tensor)
        source.address = None
    if outer is None or isinstance(tensor, Parameter) or tensor.is_inference():
        source.version = version_of(tensor)
        if source.address is None:
            source.address = address_of(tensor)
        if take is not None and not source.is_state:
            with without_dispatch_modes():
                source.content = take, take(tensor)
    else:
        if source.address == address_of(tensor):
            source.address = None  # The hooks may return a copy.
        source.packed = Packed(tensor, outer[0])
        source.tensor = None


def alias(tensor: Tensor) -> Tensor:
    """Return a detached tensor with the same memory and version; a leaf as it is."""
    # `is_leaf` of a view would rebuild the view's history, although the operator that
    # just wrote the base may not have told autograd yet.
    if (
        not tensor._is_view()
        and tensor.is_leaf
        and (tensor.requires_grad or isinstance(tensor, Parameter))
    ):
        return tensor
    return detach_with_version(tensor)


@torch.no_grad()
def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides and offset, so that view operators fit."""
    tensor = tensor.detach()
    # `clone` would materialise the conjugate, and a product of it rounds differently.
    if tensor.is_conj():
        return copy_of(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(copy_of(negative_view(tensor)))
    if not is_plain(tensor):
        return tensor.clone()
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if tensor.is_contiguous() and offset == 0:
        return tensor.clone()
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return (
        tensor.as_strided((elements,), (1,), 0).clone().as_strided(size, stride, offset)
    )


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is strided, plain, and neither conjugated nor negated."""
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
    )


def same_view(tensor: Tensor, place: LiveStorage) -> LiveTensor | None:
    """Return the entry of a tensor that shows the same elements of a storage.

    Autograd saves detached aliases, and `detach` is not observed.
    """
    if not is_plain(tensor):
        return None
    geometry = _geometry(tensor)
    found = None
    for entry in list(place.entries.values()):
        other = entry()
        if (
            other is not None
            and is_plain(other)
            and _geometry(other) == geometry
            and address_of(other) == place.address
        ):
            found = entry
            if entry.epoch == entry.memory.epoch:
                break
    return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
