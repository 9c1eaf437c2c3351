"""What tells whether a tensor's content is still the one that was seen."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    detach_with_version,
    storage_address,
    without_dispatch_modes,
)


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor's content; -1 where torch keeps none."""
    try:
        return tensor._version
    except RuntimeError:  # An inference tensor tracks no version.
        return -1


def address_of(tensor: Tensor) -> int:
    """Return where the tensor's storage lies; 0 where it has none (a sparse tensor)."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


class _Nowhere:
    """Stands for the storage of a tensor that has none."""


_NOWHERE = _Nowhere()


def storage_of(tensor: Tensor) -> Any:
    """Return the storage, to refer to weakly; a sparse tensor has none of its own."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return _NOWHERE


class SavedVersion:
    """The version of a tensor when autograd saved it, and the counter to compare with.

    An alias shares the counter; its memory is exchanged for none, so that it holds
    nothing. This is the check that autograd makes where no saved-tensor hooks are.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor):
        """Note the version now.

        Raises:
            RuntimeError: Of a tensor of another kind than empty memory can stand for.
        """
        self._counter = detach_with_version(tensor)
        self._version = version_of(tensor)
        self._counter.data = _nothing(tensor.dtype, tensor.device)

    def has_moved(self) -> bool:
        """Tell whether somebody has written the tensor since."""
        return version_of(self._counter) != self._version


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device)
