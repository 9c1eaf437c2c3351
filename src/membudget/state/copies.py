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


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, not a subclass, and has no conj/neg bit."""
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
    )
