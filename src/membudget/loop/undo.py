"""Run a micro-batch again that ran out of memory, or was recomputed with other bits.

Gradients, buffers and random streams are undone in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.nn import Module

from membudget.allocation import is_out_of_memory, let_go
from membudget.errors import RecomputeMismatchError, UnrepeatableWarning
from membudget.loop.regions import NEVER, explain
from membudget.loop.root import Root
from membudget.state.identity import host_copy, write_back
from membudget.state.snapshot import State

R = TypeVar("R")

MOST_RETRIES = 4
"""How often a micro-batch runs again."""


def run_until_done(function: Callable[[], R], roots: Sequence[Root]) -> tuple[R, int]:
    """Run a micro-batch until nothing fails; return its result and the failures.

    After it ran out of memory, it runs under a tighter plan. After a tensor was
    recomputed with other bits, that tensor is kept.

    Raises:
        torch.OutOfMemoryError: If the smallest plan finds no memory twice.
        RecomputeMismatchError: If recomputed tensors differ in every attempt.

    Warns:
        UnrepeatableWarning: For each attempt in which recomputed tensors differed.
    """
    before = BatchUndo(root.model for root in roots)
    retries = 0
    with _retried(roots):
        while True:
            try:
                return function(), retries
            except Exception as error:
                is_inexact = isinstance(error, RecomputeMismatchError)
                if not is_inexact and not is_out_of_memory(error):
                    raise
                if any(root.sets.ranks > 1 for root in roots):
                    raise  # Its collectives would find no other rank.
                let_go(error)
                before.undo()
                for root in roots:
                    root.drop_measurement()
                tightened = (
                    [] if is_inexact else [root.plans.tighten() for root in roots]
                )
                # Under the smallest plan, somebody else's memory may be free by now.
                can_change = is_inexact or any(tightened)
                if retries == MOST_RETRIES or (retries and not can_change):
                    explain(error, [root.sets for root in roots], NEVER)
                    raise
                if is_inexact:
                    text = f"in a micro-batch that runs again, {error}"
                    warnings.warn(text, UnrepeatableWarning, stacklevel=3)
            retries += 1


@contextmanager
def _retried(roots: Iterable[Root]) -> Iterator[None]:
    for root in roots:
        root.is_retried = True
    try:
        yield
    finally:
        for root in roots:
            root.is_retried = False


class BatchUndo:
    """What forward and backward change in models, as it was before.

    Gradients and buffers are copied to the host; parameters are not, because only the
    optimizer writes them.
    """

    def __init__(self, models: Iterable[Module]):
        """Note the state of the models, and of all random streams."""
        roots = [(f"model {number}", model) for number, model in enumerate(models)]
        self._objects = State(roots, contents=False)
        buffers = [buffer for _, model in roots for buffer in model.buffers()]
        written = [*self._objects.gradients(), *buffers]
        self._written = [(tensor, host_copy(tensor)) for tensor in written]

    @torch.no_grad()
    def undo(self) -> None:
        """Bring everything back; the gradients are the tensors that they were."""
        self._objects.restore()
        self._objects.restore_gradients()
        for tensor, copy in self._written:
            write_back(tensor, copy)
