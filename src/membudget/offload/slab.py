"""Host memory of an exact size, allocated once and cut into blocks.

    piece of 4 GiB                             piece of 1 GiB
    ├─ block ─┼─ free ─┼────── block ─────┤    ├─ block ─┼── free ──┤

torch rounds page-locked memory up to a power of two. So the slab is made of pieces of
such sizes, which add up to what was asked for; no block lies in two of them. One tensor
for each block would take up to twice the bytes. A slab that grows begins without a
piece, and doubles until it has the bytes that are its bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from membudget._torch_accelerator import is_on_accelerator
from membudget.errors import OptionError
from membudget.offload.extents import Extent, Extents
from membudget.offload.link import Link
from membudget.text import format_bytes

SMALLEST_PIECE = 1 << 26
"""Bytes of the first piece of a slab that grows, if the bound has as many."""

ALIGNMENT = 64
"""Blocks begin at multiples of this many bytes, so that any dtype can be viewed."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlock:
    """A part of a slab.

    Attributes:
        place: Its piece, and where it begins there, in bytes.
        size: Its bytes, a multiple of `ALIGNMENT`.
        content: The bytes that were asked for.
    """

    place: Extent
    size: int
    content: Tensor


class Slab:
    """Host memory that is given out in blocks.

    Attributes:
        size: The bytes of its pieces.
        most_used_bytes: The most bytes in blocks that were given out at one time.
        links: What copies from and to these blocks.
    """

    def __init__(self, size: int, device: torch.device, grows: bool = False):
        """Allocate the memory, page-locked for copies from and to an accelerator.

        Args:
            size: Its bytes, or at most so many if it grows.
            device: The accelerator's, or the CPU.
            grows: Whether to allocate what is needed when it is.

        Raises:
            OptionError: If the host has not that much memory.
        """
        self.size = self.most_used_bytes = 0
        self.links: list[Link] = []
        self._is_locked = is_on_accelerator(device)
        self._pieces: list[Tensor] = []
        self._extents = Extents(ALIGNMENT)
        self._bound_bytes = size if grows else 0
        self._lock = Lock()  # Each device has a thread for its backward pass.
        if not grows:
            self._allocate(size)

    def _allocate(self, size: int) -> None:
        try:
            for piece in _powers_of_two(size) if self._is_locked else [size]:
                memory = torch.empty(
                    piece, dtype=torch.uint8, device="cpu", pin_memory=self._is_locked
                )
                self._extents.add(len(self._pieces), piece)
                self._pieces.append(memory)
        except RuntimeError as error:
            raise OptionError(
                f"the host cannot give {format_bytes(size)} for offloaded tensors: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.size += size

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are given out."""
        return self._extents.used_bytes

    def take(self, size: int) -> HostBlock | None:
        """Return a block; `None` if no free part is large enough.

        Raises:
            OptionError: If the slab is to grow, and the host has no memory.
        """
        with self._lock:
            block = self._taken(size)
            if block is None and self._grow(size):
                block = self._taken(size)
            return block

    def _grow(self, needed: int) -> bool:
        """Allocate another piece, if there is one in which a block finds room."""
        piece = _next_piece(self.size, self._bound_bytes, needed)
        if piece:
            self._allocate(piece)
        return piece > 0

    def _taken(self, size: int) -> HostBlock | None:
        place = self._extents.take(size)
        if place is None:
            return None
        rounded, (piece, offset) = self._extents.rounded(size), place
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        return HostBlock(place, rounded, self._pieces[piece][offset : offset + size])

    def give_back(self, block: HostBlock) -> None:
        """Take a block back, without waiting for a thread that takes one."""
        self._extents.give_back(block.place, block.size)


def growing_pieces(bound_bytes: int) -> list[int]:
    """Return the pieces of a slab that has grown to its bound, of small blocks."""
    pieces: list[int] = []
    while piece := _next_piece(sum(pieces), bound_bytes, needed=1):
        pieces.append(piece)
    return pieces


def _next_piece(size: int, bound_bytes: int, needed: int) -> int:
    """Return by how much a slab grows: as many bytes as it has, or as are needed.

    That is a power of two, and 0 if no such piece is left within the bound.
    """
    wanted = max(needed, size, SMALLEST_PIECE)
    piece = 1 << (wanted - 1).bit_length()
    left = bound_bytes - size
    while piece > left and piece // 2 >= needed:
        piece //= 2
    return piece if piece <= left else 0


def _powers_of_two(size: int) -> Iterator[int]:
    """Yield powers of two that add up to a size, largest first."""
    while size:
        power = 1 << (size.bit_length() - 1)
        yield power
        size -= power
