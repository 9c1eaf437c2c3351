"""Copies of tensors: in the same layout, or on the host, compared bit for bit.

Comparing bytes, not numbers, makes a NaN equal to the same NaN and -0.0 different from
0.0; `torch.equal` has both the other way round. Copies lie on the host because an
accelerator may have no room for a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import detach_with_version, is_fake, negative_view
from membudget.state.bits import plain_parts


@dataclass(frozen=True)
class TensorCopy:
    """The content of a tensor at the time of the copy.

    Attributes:
        about: Dtype, shape and device, as text.
        parts: The dense tensors that the content consists of, on the host: one, except
            for sparse tensors and wrapper subclasses.
    """

    about: str
    parts: tuple[Tensor, ...]


@dataclass(frozen=True)
class BitDifference:
    """Where two tensors of one shape and dtype differ.

    Attributes:
        count: Number of elements that differ.
        total: Number of elements.
        index: The first element that differs.
        left: Its value in the first tensor, as text.
        right: Its value in the second tensor, as text.
    """

    count: int
    total: int
    index: tuple[int, ...]
    left: str
    right: str


def host_copy(tensor: Tensor, same: TensorCopy | None = None) -> TensorCopy:
    """Copy a tensor's content to the host.

    Args:
        tensor: The tensor.
        same: An earlier copy, returned instead if it is equal: what a step leaves
            alone is stored once.
    """
    parts = tuple(part.to("cpu", copy=True) for part in dense_parts(tensor))
    copy = TensorCopy(_about(tensor), parts)
    return same if same is not None and is_same(copy, same) else copy


def _about(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # A nested tensor has no shape, or one with a symbol that is new in each run.
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{dtype} {shape} on {tensor.device}"


def write_back(tensor: Tensor, copy: TensorCopy) -> None:
    """Write a copy into the tensor that it was made from, in place."""
    with torch.no_grad():
        for target, source in zip(dense_parts(tensor), copy.parts, strict=True):
            _without_repeats(target).copy_(_without_repeats(source, like=target))


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the dense tensors that hold a tensor's content; often itself, detached."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    for part in plain_parts(tensor):
        if part.is_nested:
            yield from part.unbind()
        elif part.is_quantized:
            yield part.int_repr()
        else:
            yield part.resolve_conj().resolve_neg()


def _without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Reduce an expanded tensor, whose elements share memory, to one copy of each."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bytes(part: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, one row per element."""
    flat = part.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def is_same(left: TensorCopy, right: TensorCopy) -> bool:
    """Tell whether two copies agree in dtype, shape, device and every byte."""
    same_kind = left.about == right.about and len(left.parts) == len(right.parts)
    return same_kind and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(left.parts, right.parts, strict=True)
    )


def first_value(copy: TensorCopy) -> str:
    """Return the first element of a copy, as text."""
    return _text(copy.parts[0].reshape(-1)[0])


def is_zero(copy: TensorCopy) -> bool:
    """Tell whether every byte is zero."""
    return not any(_bytes(part).any() for part in copy.parts)


def first_difference(left: TensorCopy, right: TensorCopy) -> BitDifference | None:
    """Return where two copies differ; `None` if their shapes or dtypes differ."""
    if len(left.parts) != len(right.parts):
        return None
    for a, b in zip(left.parts, right.parts, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return None
        differs = (_bytes(a) != _bytes(b)).any(dim=1)
        if differs.any():
            at = int(differs.to(torch.uint8).argmax())
            index = torch.unravel_index(torch.tensor(at), a.shape)
            texts = _texts(a.reshape(-1)[at], b.reshape(-1)[at])
            count, total = int(differs.sum()), differs.numel()
            return BitDifference(count, total, tuple(map(int, index)), *texts)
    return None


def _texts(left: Tensor, right: Tensor) -> tuple[str, str]:
    """Return two texts that differ: values, or values with bytes (of two NaNs, say)."""
    texts = _text(left), _text(right)
    if texts[0] != texts[1]:
        return texts
    return _text_with_bytes(left), _text_with_bytes(right)


def _text_with_bytes(value: Tensor) -> str:
    digits = bytes(reversed(_bytes(value)[0].tolist())).hex()
    return f"{_text(value)} (0x{digits})"


def _text(value: Tensor) -> str:
    number = value.item()
    if not isinstance(number, float):
        return str(number)
    # 9 digits distinguish all 32-bit floats, and 17 digits all 64-bit floats.
    return f"{number:.17g}" if value.dtype == torch.float64 else f"{number:.9g}"


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
