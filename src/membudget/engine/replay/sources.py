"""Sources: values whose content is held, and how it is checked before it is read."""

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
from membudget.engine.replay.tape import (
    Value,
)
from membudget.state.bits import has_changed, is_freed
from membudget.state.identity import address_of, version_of


class SourceChangedError(Exception):
    """A source was written since the region ended."""

    def __init__(self, tensor: Tensor):
        """Note which."""
        super().__init__("a source was changed")
        self.tensor = tensor


class SourceFreedError(Exception):
    """The memory of a parameter is freed: FSDP has resharded it."""


def check_source(value: Value, tensor: Tensor) -> None:
    """Check that an operator is about to read what it read (Rule 5).

    Autograd itself takes what is there, as it does in the plain step: a parameter whose
    `.data` was exchanged.

    Raises:
        SourceChangedError: If it would read something else.
    """
    if value.address is not None and address_of(tensor) != value.address:
        raise SourceChangedError(tensor)
    if value.content is not None:
        (take, noted), value.content = value.content, None
        with without_dispatch_modes():
            if has_changed(tensor, noted, take):
                raise SourceChangedError(tensor)


def unpacked(value: Value, unpack: Callable[[Any], Tensor]) -> Tensor:
    """Return a source that the hooks around the region have.

    Raises:
        SourceChangedError: If it was written since.
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
    source: Value, outer: Hooks | None, take: Callable[[Tensor], Any] | None
) -> None:
    """Note what tells whether a source is changed, or hand it to the hooks around.

    Args:
        source: The source.
        outer: The hooks around the region.
        take: Takes a fingerprint of its content, where that is compared, too, because
            some writers raise no version.
    """
    tensor = source.tensor
    assert tensor is not None
    if source.is_state:
        # The next call of the function writes it again, before the backward of this.
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
            source.address = None  # The hooks may give back a copy.
        source.packed = Packed(tensor, outer[0])
        source.tensor = None


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and version, and without its graph."""
    # Not `is_leaf` of a view: it renews the view's history, though the operator that
    # has just written the base may not have told autograd yet.
    if (
        not tensor._is_view()
        and tensor.is_leaf
        and (tensor.requires_grad or isinstance(tensor, Parameter))
    ):
        return tensor
    return detach_with_version(tensor)


@torch.no_grad()
def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same place in its storage, so that views fit."""
    tensor = tensor.detach()
    if tensor.is_conj():  # A clone would be written out, and a product round otherwise.
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
    """Tell whether a strided tensor of torch's own class shows memory as it is."""
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
    )
