"""Detect changes to a tensor by version, by storage, or by a copy of its bytes.

Copies are compared bytewise: a NaN equals the same NaN and -0.0 differs from 0.0,
whereas `torch.equal` returns the opposite in both cases. Copies are stored on the host,
because an accelerator may have no room for a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    detach_with_version,
    storage_address,
    without_dispatch_modes,
)
from membudget.state.bits import content_of, is_freed, plain_parts, same_bytes
from membudget.text import dtype_name


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Return the version of each tensor; half the time of as many `version_of`."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return list(map(version_of, tensors))


def is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of autograd's graph.

    A view of a base that was written since, such as FSDP1 leaves on its modules, has no
    history that autograd could rebuild; it is no leaf.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def address_of(tensor: Tensor) -> int:
    """Return a tensor's storage address; 0 for a tensor without storage (sparse)."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def addresses_of(tensors: list[Tensor]) -> list[int]:
    """Return the address of each tensor; half the time of as many `address_of`."""
    try:
        return list(map(storage_address, tensors))
    except (RuntimeError, NotImplementedError):
        return list(map(address_of, tensors))


class _Nowhere:
    """Placeholder for tensors without a storage, such as sparse tensors."""


_NOWHERE = _Nowhere()


def storage_of(tensor: Tensor) -> Any:
    """Return a tensor's storage, or a placeholder, as a target for weak references."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return _NOWHERE


class SavedVersion:
    """Detects writes to a tensor after autograd saved it, without holding its memory.

    The detector keeps an alias with empty data, which still shares the tensor's version
    counter. Autograd makes the same version check for tensors saved without hooks.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor):
        """Record the tensor's current version.

        Raises:
            RuntimeError: If the tensor's data cannot be replaced by an empty tensor.
        """
        self._counter = detach_with_version(tensor)
        self._version = version_of(tensor)
        # Assigning `.data` frees the memory but keeps the shared version counter.
        self._counter.data = _nothing(tensor.dtype, tensor.device)

    def has_moved(self) -> bool:
        """Return whether the tensor was written to after this object was created."""
        return version_of(self._counter) != self._version

    def renew(self) -> None:
        """Accept what was written so far."""
        self._version = version_of(self._counter)

    def alias(self, data: Tensor) -> Tensor:
        """Return `data` as an alias of the tensor, which shares its version counter."""
        made = detach_with_version(self._counter)
        made.data = data
        return made


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device)


@dataclass(frozen=True)
class TensorCopy:
    """A host copy of a tensor's content.

    Attributes:
        about: Dtype, shape and device of the tensor, as text.
        parts: Dense host tensors with the content; more than one only for sparse or
            nested tensors and wrapper subclasses.
    """

    about: str
    parts: tuple[Tensor, ...]


@dataclass(frozen=True)
class BitDifference:
    """The differences between two tensors of the same shape and dtype.

    Attributes:
        count: Number of elements that differ.
        total: Number of elements.
        index: Index of the first element that differs.
        left: First differing element of the first tensor, as text.
        right: First differing element of the second tensor, as text.
    """

    count: int
    total: int
    index: tuple[int, ...]
    left: str
    right: str


def host_copy(tensor: Tensor, same: TensorCopy | None = None) -> TensorCopy:
    """Copy a tensor's content to the host, or return `same` if it is an equal copy."""
    parts = tuple(part.to("cpu", copy=True) for part in dense_parts(tensor))
    copy = TensorCopy(_about(tensor), parts)
    return same if same is not None and is_same(copy, same) else copy


def digest(tensor: Tensor, same: TensorCopy | None = None) -> TensorCopy:
    """Return a tensor's fingerprints in place of its content; `same` is ignored.

    Digests are equal if and only if the contents are, except with a probability of
    about 2**-64, and take 16 bytes of the host.
    """
    prints = (content_of(part) for part in dense_parts(tensor))
    host = partial(torch.tensor, device="cpu")  # Whatever the default device is.
    return TensorCopy(_about(tensor), tuple(map(host, prints)))


def _about(tensor: Tensor) -> str:
    # A nested tensor has no shape, or one with a symbol that is new in each run.
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{dtype_name(tensor.dtype)} {shape} on {tensor.device}"


def write_back(tensor: Tensor, copy: TensorCopy) -> None:
    """Restore a tensor's content in place from a copy."""
    with torch.no_grad():
        for target, source in zip(dense_parts(tensor), copy.parts, strict=True):
            _without_repeats(target).copy_(_without_repeats(source, like=target))


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield detached dense tensors with the content of a tensor, usually just one.

    A tensor whose memory is freed has no content; reading it would crash the process.
    """
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    for part in plain_parts(tensor):
        if part.is_nested:
            yield from part.unbind()
        elif part.is_quantized:
            yield part.int_repr()
        elif not is_freed(part):
            yield part.resolve_conj().resolve_neg()


def _without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Narrow expanded dimensions to size 1, so that elements do not share memory."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bytes(part: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, one row per element."""
    # A tensor of one element is contiguous whatever its stride is.
    flat = part.contiguous().as_strided((part.numel(),), (1,))
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def is_same(left: TensorCopy, right: TensorCopy) -> bool:
    """Return whether two copies agree in dtype, shape, device and every byte."""
    same_kind = left.about == right.about and len(left.parts) == len(right.parts)
    return same_kind and all(
        a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b)
        for a, b in zip(left.parts, right.parts, strict=True)
    )


def still_has(tensor: Tensor, copy: TensorCopy) -> bool:
    """Return whether a tensor has the content of a copy; on the CPU, copy nothing."""
    parts = tuple(part.to("cpu") for part in dense_parts(tensor))
    return is_same(TensorCopy(_about(tensor), parts), copy)


def first_value(copy: TensorCopy) -> str:
    """Return the first element of a copy, as text."""
    return _text(copy.parts[0].reshape(-1)[0])


def is_zero(copy: TensorCopy) -> bool:
    """Return whether every byte of a copy is zero."""
    return not any(_bytes(part).any() for part in copy.parts)


def first_difference(left: TensorCopy, right: TensorCopy) -> BitDifference | None:
    """Return where two copies differ; `None` if they are equal or incomparable."""
    if len(left.parts) != len(right.parts):
        return None
    for a, b in zip(left.parts, right.parts, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return None
        differs = (_bytes(a) != _bytes(b)).any(dim=1)
        if differs.any():
            at = int(differs.to(torch.uint8).argmax())
            index = torch.unravel_index(torch.tensor(at, device="cpu"), a.shape)
            texts = _texts(a.reshape(-1)[at], b.reshape(-1)[at])
            count, total = int(differs.sum()), differs.numel()
            return BitDifference(count, total, tuple(map(int, index)), *texts)
    return None


def _texts(left: Tensor, right: Tensor) -> tuple[str, str]:
    """Format two values as different texts, with bytes if necessary (for two NaNs)."""
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
