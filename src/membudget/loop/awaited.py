"""The calls of a model whose backward passes have yet to begin.

A call is awaited until a gradient arrives at one of its outputs, or nothing refers to
them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module

from membudget.state.identity import is_leaf


@dataclass
class Forward:
    """A call of the model, as it was planned.

    Attributes:
        held_bytes: Bytes that it holds until its backward pass, as predicted.
        plain_held_bytes: The same without a plan.
        has_begun: Whether a gradient has arrived at one of its outputs.
        outer_bytes: What a backward pass through its backward pass needs beside what
            that has kept; 0 if it keeps nothing.
    """

    held_bytes: int = 0
    plain_held_bytes: int = 0
    has_begun: bool = False
    outer_bytes: int = 0


class Awaited:
    """Forwards that are awaited.

    Attributes:
        most: The most that were awaited together so far, with the newest.
    """

    def __init__(self) -> None:
        """Await nothing."""
        self.most = 1
        self._forwards: list[ReferenceType[Forward]] = []

    def now(self) -> list[Forward]:
        """Return the forwards that are awaited now."""
        found = (reference() for reference in self._forwards)
        awaited = [f for f in found if f is not None and not f.has_begun]
        self._forwards = [ref(forward) for forward in awaited]
        self.most = max(self.most, len(awaited) + 1)
        return awaited

    def gradient_bytes(self, model: Module, others: int) -> int:
        """Return the bytes of gradients that live beside those of a forward's own.

        Where several forwards run before one backward pass, autograd sums a parameter's
        gradients of all of them before it adds them to `.grad`. So those of the last
        forward, whose backward pass begins, live until that of the first one has ended.

        Args:
            model: The model.
            others: How many forwards are awaited already.
        """
        if self.most == 1:
            return 0
        is_last = others + 1 == self.most
        trained = (p for p in model.parameters() if p.requires_grad and is_leaf(p))
        return sum(p.nbytes for p in trained if not is_last or p.grad is not None)

    def add(
        self, forward: Forward, outputs: Sequence[Tensor], begun: Callable[[], object]
    ) -> None:
        """Await the backward pass of a forward; call `begun` when it begins."""

        def arrived(gradient: Tensor) -> None:
            forward.has_begun = True
            begun()

        if outputs:
            self._forwards.append(ref(forward))
            register_multi_grad_hook(outputs, arrived, mode="any")
