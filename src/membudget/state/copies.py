"""Aliases and copies of tensors that preserve strides, offset and version."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import detach_with_version, is_fake, negative_view


def alias(tensor: Tensor) -> Tensor:
    """Return a detached alias of a tensor, or the tensor itself if a trainable leaf."""
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
    """Copy a tensor with its strides and offset, so that view operators still apply."""
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
    # Copy the whole storage: view operators may read beyond this tensor.
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return (
        tensor.as_strided((elements,), (1,), 0).clone().as_strided(size, stride, offset)
    )


def are_apart(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of a storage surely share no element: parts of a split.

    Example:
        >>> left, right = torch.zeros(2, 6).split(3, dim=1)
        >>> are_apart(left, right), are_apart(left, left[:, 2:])
        (True, False)
    """
    strides = one.stride() if is_plain(one) and is_plain(other) else ()
    if other.dtype is not one.dtype or 0 in strides or other.stride() != strides:
        return False
    first, last = sorted((one, other), key=Tensor.storage_offset)
    gap = int(last.storage_offset()) - int(first.storage_offset())
    room, is_apart = None, False
    # Both are boxes of one array, unless a row reaches into the next one.
    for stride, size, of_last in sorted(
        zip(strides, first.shape, last.shape, strict=True), reverse=True
    ):
        steps, gap = divmod(gap, stride)
        if room is not None and max(size, steps + of_last) * stride > room:
            return False
        is_apart = is_apart or steps >= size
        room = stride
    return is_apart and not gap


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, not a subclass, and has no conj/neg bit."""
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
    )
