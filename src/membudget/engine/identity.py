"""What tells whether a tensor's content is still the one that was seen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from membudget._torch import storage_address


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
