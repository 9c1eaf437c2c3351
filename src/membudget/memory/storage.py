"""Bytes by storage: a storage counts once, however many tensors look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that `tensors` keep alive, each storage counted once.

    A view keeps its whole base alive, so `x[:1]` costs what `x` costs and the three
    chunks of a fused projection cost one projection. A tensor made of others (a
    `DTensor`, a sparse tensor) counts what it is made of.

    Args:
        tensors: Any tensors, on any device; `meta` and fake ones count what they would
            take.

    Returns:
        Bytes.

    Example:
        >>> x = torch.zeros(6, 100)  # 2,400 bytes
        >>> storage_bytes([x[:1]]), storage_bytes(x.chunk(3))
        (2400, 2400)
        >>> storage_bytes([torch.eye(2).to_sparse()])  # two indices, two values
        40
    """
    # Keyed by the storage, not by its address: all meta and empty storages lie at 0.
    storages: dict[Any, int] = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage of which `tensor` is made; often itself."""
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.detach()
        yield from (coalesced._indices(), coalesced._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor
