"""Stand in for an optimizer between measured steps: allocate what its step allocates.

What an accelerator's allocator reserves depends on what came before. The first step of
an optimizer makes its state of blocks that the backward pass has freed, and the second
step of the training finds these taken; soon each step reserves the same. `fit` runs no
optimizer, so it allocates as much, in the order of its recorded step:

    step  ──>  state, temporaries  ──>  step  ──>  temporaries  ──>  step  ──>  ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from membudget.graph import StepGraph


@dataclass(frozen=True)
class Rehearsal:
    """What an optimizer allocates on a device.

    Attributes:
        state: Bytes of each tensor of its state that does not exist yet.
        temporaries: Bytes of what its step allocates and frees again, and the op
            indices at which it does so.
    """

    state: tuple[int, ...] = ()
    temporaries: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, graph: StepGraph, absent_bytes: int) -> Rehearsal:
        """Create the rehearsal of a recorded optimizer, of whose state so much lacks.

        Example:
            >>> from membudget.graph import Storage, StaticBytes
            >>> kinds = ("optimizer", 300, -1, 2), ("activation", 40, 0, 1)
            >>> storages = [Storage(b, k, "", at, to, None) for k, b, at, to in kinds]
            >>> static = StaticBytes(0, 0, 0, 300)
            >>> graph = StepGraph((), (), tuple(storages), (), (), 0, 0, static)
            >>> Rehearsal.of(graph, 300)
            Rehearsal(state=(300,), temporaries=((40, 0, 1),))
            >>> Rehearsal.of(graph, 0).state
            ()
        """
        storages = [s for s in graph.storages if s.bytes]
        made = [s.bytes for s in storages if s.kind == "optimizer" and s.birth < 0]
        # State that exists in part is taken to exist in order.
        rest = reversed(list(accumulate(reversed(made))))
        return cls(
            tuple(
                b for b, more in zip(made, rest, strict=True) if more <= absent_bytes
            ),
            tuple(
                (s.bytes, s.birth, s.death)
                for s in storages
                if s.birth >= graph.optimizer_start
            ),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that the first step makes."""
        return sum(self.state)

    @contextmanager
    def begun(self, device: torch.device) -> Iterator[None]:
        """Allocate as the first step of the optimizer; free its state on exit."""
        state = [_block(size, device) for size in self.state]
        self.step(device)
        yield
        state.clear()

    def step(self, device: torch.device) -> None:
        """Allocate and free as a step of the optimizer, beside its state."""
        live: list[tuple[int, Tensor]] = []
        for size, birth, death in sorted(self.temporaries, key=lambda t: t[1]):
            live = [(end, block) for end, block in live if end > birth]
            live.append((death, _block(size, device)))


def _block(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
