"""Aliases and copies of tensors that preserve strides, offset and version."""

from __future__ import annotations

from typing import NamedTuple

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
        >>> are_apart(left, right), are_apart(left, right[0]), are_apart(left, left[1])
        (True, True, False)
    """
    if not (is_plain(one) and is_plain(other)) or other.dtype is not one.dtype:
        return False
    boxes = _box(one), _box(other)
    first = min(box.offset for box in boxes)
    # Either is the corner of an array whose parts they are.
    return any(_are_parts(*boxes, corner) for corner in {0, first})


class _Box(NamedTuple):
    """The elements of a view: the first, and by stride how many there are."""

    offset: int
    sizes: dict[int, int]


def _box(tensor: Tensor) -> _Box:
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    # Where there is one index only, its stride does not matter.
    pairs = [(int(stride), int(size)) for stride, size in strides if size != 1]
    # Where two indices have one stride, they meet, as with a stride of 0.
    sizes = dict(pairs) if len(dict(pairs)) == len(pairs) else {0: 0}
    return _Box(int(tensor.storage_offset()), sizes)


def _are_parts(one: _Box, other: _Box, corner: int) -> bool:
    """Return whether two boxes of one array with a given first element are apart."""
    start, other_start = one.offset - corner, other.offset - corner
    room, is_apart = None, False
    for stride in sorted(one.sizes.keys() | other.sizes.keys(), reverse=True):
        if not stride:
            return False
        begin, start = divmod(start, stride)
        other_begin, other_start = divmod(other_start, stride)
        end = begin + one.sizes.get(stride, 1)
        other_end = other_begin + other.sizes.get(stride, 1)
        # They are no boxes of this array if a row reaches into the next one.
        if room is not None and max(end, other_end) * stride > room:
            return False
        is_apart = is_apart or end <= other_begin or other_end <= begin
        room = stride
    return is_apart or start != other_start


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, not a subclass, and has no conj/neg bit."""
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
    )
