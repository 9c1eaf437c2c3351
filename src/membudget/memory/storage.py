"""Bytes by storage: a storage counts once, however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from membudget.state.bits import plain_parts


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that `tensors` keep alive, each storage counted once.

    A view keeps its whole base alive, so `x[:1]` costs what `x` costs, and the three
    chunks of a fused projection cost one projection. A tensor made of others (a
    `DTensor`, a sparse tensor) counts those.

    Args:
        tensors: Any tensors, on any device; `meta` and fake tensors count the bytes
            that real ones would have.

    Returns:
        Bytes.

    Example:
        >>> import torch
        >>> x = torch.zeros(6, 100)  # 2,400 bytes
        >>> storage_bytes([x[:1]]), storage_bytes(x.chunk(3))
        (2400, 2400)
        >>> storage_bytes([torch.eye(2).to_sparse()])  # two indices, two values
        40
    """
    # Keyed by storage, not by address: all meta and empty storages have address 0.
    storages: dict[Any, int] = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
