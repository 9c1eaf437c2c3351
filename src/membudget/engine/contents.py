"""What lies in memory, to find what is written behind the version counters.

Fingerprints from before and after a run tell what it wrote through `.data`, through
NumPy, or by a kernel such as batch_norm's.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from membudget._torch import without_modes
from membudget.state.bits import content_of, has_changed
from membudget.state.identity import address_of, version_of


class Contents:
    """The contents of some tensors, as they were."""

    __slots__ = ("_noted",)

    def __init__(self, tensors: Iterable[Tensor]):
        """Take the fingerprints."""
        with without_modes():
            self._noted = [
                (tensor, version_of(tensor), address_of(tensor), content_of(tensor))
                for tensor in tensors
            ]

    def silently_written(self) -> list[Tensor]:
        """Return what has changed while its version and its storage have not."""
        with without_modes():
            return [
                tensor
                for tensor, version, address, content in self._noted
                if version_of(tensor) == version
                and address_of(tensor) == address
                and has_changed(tensor, content)
            ]
