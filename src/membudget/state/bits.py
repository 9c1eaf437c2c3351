"""The bits of a tensor: whether they can be read, and a fingerprint of them.

A fingerprint must need little memory beside the tensor, because it is taken where there
is none to spare: the tensor is read in pieces, and none is copied whole, whatever its
strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Fingerprint = tuple[int, int]

SKIPPED: Fingerprint = (0, 0)

PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
_PLAIN_DISPATCH: Any = Tensor.__torch_dispatch__

_PIECES = 32
_LEAST_ELEMENTS = 1 << 11
_SAMPLE = 256
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_HALF = (1 << 32) - 1
# Odd, so that a product with them loses nothing; their bits are those of 2**64 divided
# by the golden ratio, and of the finaliser of MurmurHash3 (Appleby, public domain).
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xFF51AFD7ED558CCD - (1 << 64)


def has_bits(tensor: Tensor) -> bool:
    """Tell whether a tensor has bytes that can be read."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    )


def is_subclass(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a class that answers operators itself."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is not _PLAIN_DISPATCH


def may_be_a_workspace(tensor: Tensor) -> bool:
    """Tell whether it is a vector of bytes.

    oneDNN and cuDNN keep their workspaces so, and leave parts of them unfilled.
    """
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return two sums over the elements' bits, the first of them mixed with the place.

    Both wrap at 64 bits. Tensors of one shape with equal elements have equal
    fingerprints, whatever their strides. Changing one element changes both sums;
    another change goes unseen with a probability of about 2**-64. It reads every
    element once, waits for the device, and needs 16 bytes for each of 2,048 elements
    or of a 32nd of the tensor, whichever is more.

    Args:
        tensor: Of any shape; what has no bytes to be read gives `SKIPPED`.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(-a)
        (True, False)
        >>> fingerprint(a) == fingerprint(a.flip(0))
        False
    """
    if not has_bits(tensor):
        return SKIPPED
    bits = _bits(tensor.detach().resolve_conj().resolve_neg())
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    most = max(_LEAST_ELEMENTS, -(-bits.numel() // _PIECES))
    work = sums.new_empty((2, min(most, bits.numel())))
    start = 0
    for piece in _pieces(bits, most):
        _add(sums, piece, start, work[:, : piece.numel()])
        start += piece.numel()
    mixed, plain = sums.tolist()
    return mixed, plain


def content_of(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of memory that nobody promised to be there.

    FSDP frees a parameter's memory and keeps the tensor; a wrapper has none.
    """
    if not has_bits(tensor) or tensor.is_quantized or is_freed(tensor):
        return SKIPPED
    return fingerprint(tensor)


def sample_of(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of some 256 elements, spread evenly.

    It takes 4 KiB, so that it can be taken where a budget is tight. A write of a whole
    tensor changes it; one of a few rows may not.
    """
    if has_bits(tensor) and tensor.numel() > _SAMPLE:
        if not tensor.is_contiguous() or is_freed(tensor):
            return SKIPPED
        tensor = tensor.detach().view(-1)[:: -(-tensor.numel() // _SAMPLE)]
    return content_of(tensor)


def has_changed(
    tensor: Tensor,
    noted: Fingerprint,
    take: Callable[[Tensor], Fingerprint] = content_of,
) -> bool:
    """Tell whether a tensor's content is known to be another than it was."""
    now = take(tensor)
    return now != noted and SKIPPED not in (now, noted)


def is_freed(tensor: Tensor) -> bool:
    """Tell whether the memory of a tensor was freed."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield all elements in order, in vectors of at most so many."""
    if tensor.numel() <= most:
        yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(most)
    else:
        rows = most // (tensor.numel() // len(tensor))
        for part in tensor.split(rows) if rows else tensor.unbind():
            yield from _pieces(part, most)


def _add(sums: Tensor, piece: Tensor, start: int, work: Tensor) -> None:
    words, spare = work
    words.copy_(piece)
    sums[1] += words.sum()
    torch.arange(start + 1, start + 1 + len(words), out=spare)
    words += spare.mul_(_SPREAD)
    for _ in range(2):
        words *= _MIX
        torch.bitwise_right_shift(words, 32, out=spare)
        words ^= spare.bitwise_and_(_LOW_HALF)
    sums[0] += words.sum()
