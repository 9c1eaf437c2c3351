"""Compare tensors bit for bit, directly or by fingerprint.

Fingerprints are taken under tight memory budgets, so tensors are read in chunks and
never copied as a whole, whatever their strides.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget._torch import is_fake
from membudget._torch_accelerator import is_on_accelerator, synchronize

Fingerprint = tuple[int, int]

SKIPPED: Fingerprint = (0, 0)

_SUMS: list[Callable[[Tensor], Fingerprint | None]] = []
"""Takes the fingerprint of integers on the CPU in one pass, where C++ is built; returns
`None` for tensors without memory."""

PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
_PLAIN_DISPATCH: Any = Tensor.__torch_dispatch__

_PIECES = 32
_LEAST_ELEMENTS, _MOST_ELEMENTS = 1 << 11, 1 << 20
_SAMPLE = 256
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_HALF = (1 << 32) - 1
# Odd, so that multiplying by them modulo 2**64 is invertible: 2**64 divided by the
# golden ratio, and a constant of MurmurHash3's finaliser (Appleby, public domain).
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xFF51AFD7ED558CCD - (1 << 64)


def has_bits(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, not nested, not a subclass, not on `meta`."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    )


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a sparse tensor or subclass, or the plain tensor itself."""
    if tensor.layout is torch.sparse_coo:
        detached = tensor.detach()
        yield from (detached._indices(), detached._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        # Not every part is a tensor: a `DTensor` names its `DeviceMesh`, too.
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from plain_parts(part)
    else:
        yield tensor


def is_subclass(tensor: Tensor) -> bool:
    """Return whether a tensor's class overrides `__torch_dispatch__`."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is not _PLAIN_DISPATCH


def may_be_a_workspace(tensor: Tensor) -> bool:
    """Return whether a tensor is a byte vector, as kernel workspaces are.

    oneDNN and cuDNN leave parts of their workspaces uninitialised, so identical kernel
    runs may leave different bytes.
    """
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return two 64-bit sums over all elements' bits; the first depends on the order.

    Tensors with the same shape and elements have equal fingerprints, whatever their
    strides. Changing one element changes both sums; any other change goes unnoticed
    with a probability of about 2**-64. The function reads every element once,
    synchronises with the device, and allocates 16 bytes per element of a chunk, which
    is 1/32 of the tensor, but no less than 2,048 and no more than 1,048,576 elements;
    in C++, it allocates nothing.

    Args:
        tensor: Any tensor; the result is `SKIPPED` if its bits cannot be read.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(-a)
        (True, False)
        >>> fingerprint(a) == fingerprint(a.flip(0))
        False
    """
    if not has_bits(tensor):
        return SKIPPED
    bits = _bits(tensor)
    if _SUMS and bits.is_cpu and (found := _SUMS[0](bits)) is not None:
        return found
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    most = _piece_of(bits.numel())
    work = sums.new_empty((2, min(most, bits.numel())))
    start = 0
    for piece in _pieces(bits, most):
        _add(sums, piece, start, work[:, : piece.numel()])
        start += piece.numel()
    mixed, plain = sums.tolist()
    return mixed, plain


def accelerate(sums: Callable[[Tensor], Fingerprint | None]) -> None:
    """Let a function in C++ take the fingerprints of integers on the CPU."""
    _SUMS[:] = [sums]


def fingerprint_bytes(count: int) -> int:
    """Return the most bytes that `fingerprint` allocates for so many elements.

    Example:
        >>> fingerprint_bytes(1 << 20)
        786528
    """
    piece = min(count, _piece_of(count))
    # The chunk, its positions, and a copy of one that is not contiguous.
    return (2 * 8 + 8) * piece + 96


def _piece_of(count: int) -> int:
    """Return how many of a tensor's elements are read at once."""
    return min(max(_LEAST_ELEMENTS, -(-count // _PIECES)), _MOST_ELEMENTS)


def content_of(tensor: Tensor) -> Fingerprint:
    """Return a tensor's fingerprint; `SKIPPED` if its memory is freed or unreadable.

    FSDP frees a parameter's memory but keeps the tensor object.
    """
    if not has_bits(tensor) or tensor.is_quantized or is_freed(tensor):
        return SKIPPED
    return fingerprint(tensor)


def sample_of(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of about 256 evenly spaced elements, using 4 KiB.

    The sample reveals an overwritten tensor, but may miss a change of a few rows.
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
    """Return whether a tensor's fingerprint differs from `noted`, if both are known."""
    now = take(tensor)
    return now != noted and SKIPPED not in (now, noted)


def living_tensors() -> list[Tensor]:
    """Return all tensors that Python's garbage collector knows.

    Those that only C++ refers to, such as what autograd saved, are not found.
    """
    # Not `isinstance`, which asks a proxy for the class of what it stands for.
    classes = {Tensor, *_subclasses(Tensor)}
    return [thing for thing in gc.get_objects() if type(thing) in classes]


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def emptied_storages() -> dict[int, Any]:
    """Return references to the storages that are empty now, by address.

    They belong to living tensors whose memory FSDP, say, has freed until it is needed.
    Where libraries are imported, to look at all that Python's collector knows takes a
    tenth of a second.
    """
    found = {}
    for tensor in living_tensors():
        is_plain = type(tensor) in PLAIN_CLASSES and has_bits(tensor)
        if (is_plain or is_fake(tensor)) and is_freed(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = ref(storage)
    return found


def is_freed(tensor: Tensor) -> bool:
    """Return whether a non-empty tensor's storage was resized to 0 bytes."""
    is_strided = tensor.layout is torch.strided
    return is_strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def same_bits(original: Tensor, replayed: Tensor | None) -> bool:
    """Return whether two tensors have the same bytes in the same layout."""
    if replayed is None or original.shape != replayed.shape:
        return False
    if original.dtype is not replayed.dtype or _layout(original) != _layout(replayed):
        return False
    # Without comparable bytes, a recomputed tensor gets the benefit of the doubt.
    if not has_bits(original) or may_be_a_workspace(original):
        return True
    return same_bytes(original, replayed)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bytes."""
    return torch.equal(_bits(one), _bits(other))


def _layout(tensor: Tensor) -> Any:
    """Return the strides and flags by which kernels may select an algorithm."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    if not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    # The stride of a dimension of size 1 is arbitrary.
    strides = [stride for size, stride in sizes if size > 1]
    return tensor.is_conj(), tensor.is_neg(), strides


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, as a view where torch has one.

    On an accelerator, it waits for all streams: who wrote the tensor is not known.
    """
    if is_on_accelerator(tensor.device):
        synchronize([tensor.device])
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield all elements in order, as vectors of at most `most` elements."""
    if tensor.numel() <= most:
        yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(most)
    else:
        rows = most // (tensor.numel() // len(tensor))
        for part in tensor.split(rows) if rows else tensor.unbind():
            yield from _pieces(part, most)


def _add(sums: Tensor, piece: Tensor, start: int, work: Tensor) -> None:
    """Add one chunk of elements to both sums of a fingerprint.

    Both sums are modulo 2**64; mix(w) = v ^ (v >> 32), with v = w times a constant:

        sums[0] += mix(mix(x[i] + (i + 1) * _SPREAD));  sums[1] += x[i]
    """
    words, spare = work  # `spare`: the positions, then the shifted words.
    words.copy_(piece)
    sums[1] += words.sum()
    end = start + 1 + len(words)
    torch.arange(start + 1, end, out=spare, device=spare.device)
    words += spare.mul_(_SPREAD)
    for _ in range(2):
        words *= _MIX
        torch.bitwise_right_shift(words, 32, out=spare)
        # `>>` copies the sign bit of a signed integer; the mask clears those copies.
        words ^= spare.bitwise_and_(_LOW_HALF)
    sums[0] += words.sum()
