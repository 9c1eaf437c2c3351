"""Copies of tensors on the host, and the comparison of two of them to the bit.

Bytes are compared, not numbers. So a NaN equals the same NaN, and a negative zero
differs from a positive one, which `torch.equal` has the other way round. Copies lie on
the host, because an accelerator may have no room for a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldTensor:
    """A copy of one tensor's content.

    Attributes:
        about: Its dtype, shape and device, as text.
        parts: The dense tensors that it is made of, on the host: one, except for
            sparse tensors and for subclasses that wrap others.
    """

    about: str
    parts: tuple[Tensor, ...]


@dataclass(frozen=True)
class Place:
    """Where two tensors of one shape and dtype differ.

    Attributes:
        count: How many elements differ.
        total: How many elements there are.
        index: The first element that differs.
        left: Its value in the first tensor, as text.
        right: Its value in the second tensor, as text.
    """

    count: int
    total: int
    index: tuple[int, ...]
    left: str
    right: str


def hold(tensor: Tensor, same: HeldTensor | None = None) -> HeldTensor:
    """Copy a tensor's content to the host.

    Args:
        tensor: The tensor.
        same: An earlier copy; it is returned if nothing has changed since, so that
            what a step leaves alone is held once.
    """
    held = HeldTensor(_about(tensor), tuple(map(_to_host, parts(tensor))))
    return same if same is not None and is_same(held, same) else held


def _about(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # A nested tensor has no shape, or one with a name in it that is new in each run.
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{dtype} {shape} on {tensor.device}"


def write(tensor: Tensor, held: HeldTensor) -> None:
    """Put the content of a copy back into the tensor that it was made from."""
    with torch.no_grad():
        for target, source in zip(parts(tensor), held.parts, strict=True):
            _without_repeats(target).copy_(_without_repeats(source, like=target))


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the dense tensors that hold a tensor's content; mostly itself, detached."""
    tensor = tensor.detach()
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.is_quantized:
        yield tensor.int_repr()
    else:
        yield tensor.resolve_conj().resolve_neg()


def _to_host(part: Tensor) -> Tensor:
    return part.to("cpu", copy=True)


def _without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Cut an expanded tensor, in which elements share memory, to what it stores."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bytes(part: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in rows of one element each."""
    flat = part.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def is_same(left: HeldTensor, right: HeldTensor) -> bool:
    """Tell whether two copies are equal: dtype, shape, device and every byte."""
    same_kind = left.about == right.about and len(left.parts) == len(right.parts)
    return same_kind and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(left.parts, right.parts, strict=True)
    )


def first_value(held: HeldTensor) -> str:
    """Return the first number of a copy, as text."""
    return _text(held.parts[0].reshape(-1)[0])


def is_zero(held: HeldTensor) -> bool:
    """Tell whether every byte is zero."""
    return not any(_bytes(part).any() for part in held.parts)


def first_difference(left: HeldTensor, right: HeldTensor) -> Place | None:
    """Say where two copies differ; `None` if they are of another shape."""
    if len(left.parts) != len(right.parts):
        return None
    for a, b in zip(left.parts, right.parts, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return None
        differs = (_bytes(a) != _bytes(b)).any(dim=1)
        if differs.any():
            at = int(differs.to(torch.uint8).argmax())
            index = tuple(
                int(i) for i in torch.unravel_index(torch.tensor(at), a.shape)
            )
            texts = _texts(a.reshape(-1)[at], b.reshape(-1)[at])
            return Place(int(differs.sum()), differs.numel(), index, *texts)
    return None


def _texts(left: Tensor, right: Tensor) -> tuple[str, str]:
    """Write two elements so that they read differently, as their bytes if need be."""
    texts = _text(left), _text(right)
    if texts[0] != texts[1]:
        return texts
    # Two NaNs, say.
    return tuple(  # type: ignore[return-value]
        f"{text} (0x{bytes(reversed(_bytes(value)[0].tolist())).hex()})"
        for text, value in zip(texts, (left, right), strict=True)
    )


def _text(value: Tensor) -> str:
    number = value.item()
    if not isinstance(number, float):
        return str(number)
    # Nine digits tell any two floats of 32 bits apart, and seventeen any two of 64.
    return f"{number:.17g}" if value.dtype == torch.float64 else f"{number:.9g}"
