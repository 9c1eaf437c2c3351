"""Host memory of an exact size, allocated once and cut into blocks.

    piece of 4 GiB                             piece of 1 GiB
    ├─ block ─┼─ free ─┼────── block ─────┤    ├─ block ─┼── free ──┤

torch rounds page-locked memory up to a power of two. So the slab is made of pieces of
such sizes, which add up to what was asked for; no block lies in two of them. One tensor
for each block would take up to twice the bytes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from membudget._torch_accelerator import is_on_accelerator
from membudget.errors import OptionError
from membudget.offload.link import Link
from membudget.text import format_bytes

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

    place: tuple[int, int]
    size: int
    content: Tensor


class Slab:
    """Host memory that is given out in blocks.

    Attributes:
        size: Its bytes.
        used_bytes: Bytes in blocks that are given out.
        most_used_bytes: The most of these at one time.
        links: What copies from and to these blocks.
    """

    def __init__(self, size: int, device: torch.device):
        """Allocate the memory, page-locked for copies from and to an accelerator.

        Raises:
            OptionError: If the host has not that much memory.
        """
        self.size = size
        self.used_bytes = self.most_used_bytes = 0
        self.links: list[Link] = []
        is_locked = is_on_accelerator(device)
        sizes = _powers_of_two(size) if is_locked else [size]
        try:
            self._pieces = [
                torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
                for n in sizes
            ]
        except RuntimeError as error:
            raise OptionError(
                f"the host cannot give {format_bytes(size)} for offloaded tensors: "
                f"{str(error).splitlines()[0]}"
            ) from error
        # ((piece, offset), size), by place; neighbours in a piece are merged.
        self._free = [((n, 0), piece.nbytes) for n, piece in enumerate(self._pieces)]
        self._lock = Lock()  # Each device has a thread for its backward pass.

    def take(self, size: int) -> HostBlock | None:
        """Return a block; `None` if no free part is large enough."""
        with self._lock:
            return self._taken(size)

    def _taken(self, size: int) -> HostBlock | None:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [part for part in self._free if part[1] >= rounded]
        if not fitting:
            return None
        best = min(fitting, key=lambda part: part[1])
        self._free.remove(best)
        (piece, offset), found = best
        if found > rounded:
            insort(self._free, ((piece, offset + rounded), found - rounded))
        self.used_bytes += rounded
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        content = self._pieces[piece][offset : offset + size]
        return HostBlock((piece, offset), rounded, content)

    def give_back(self, block: HostBlock) -> None:
        """Take a block back."""
        with self._lock:
            self.used_bytes -= block.size
            self._merge(block)

    def _merge(self, block: HostBlock) -> None:
        insort(self._free, (block.place, block.size))
        merged: list[tuple[tuple[int, int], int]] = []
        for (piece, offset), size in self._free:
            if merged and merged[-1][0] == (piece, offset - merged[-1][1]):
                place, before = merged.pop()
                merged.append((place, before + size))
            else:
                merged.append(((piece, offset), size))
        self._free = merged


def _powers_of_two(size: int) -> Iterator[int]:
    """Yield powers of two that add up to a size, largest first."""
    while size:
        power = 1 << (size.bit_length() - 1)
        yield power
        size -= power
