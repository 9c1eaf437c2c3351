"""Foresee what a call without gradients takes, as in evaluation and generation.

Nothing is kept for a backward pass, so no plan lowers it: a call that needs more than
is left is refused before it begins.

Bytes are sums of products of lengths. A call whose lengths are at most r times those of
a recorded one takes at most r**5 times its bytes, if no more than five lengths are
multiplied. Another call is recorded only where that is more than what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from membudget.allowance import Budget
from membudget.attach import without_wrapper
from membudget.errors import BudgetError
from membudget.graph import StepGraph
from membudget.loop.call_recorder import CallRecorder, UnrecordableError
from membudget.loop.collectives import SendingError
from membudget.loop.micro_batch import RecordedBatch
from membudget.loop.room import Room
from membudget.loop.situation import Sizes, evaluation_of, sizes_text
from membudget.planner.planner import plain_schedule
from membudget.profile import Profile
from membudget.refusal import name_holders
from membudget.state.bits import plain_parts
from membudget.state.walk import walk
from membudget.step import Step

MOST_FACTORS = 5
"""Most lengths in a product of bytes, as in attention over images, batch · (h · w)²."""


class EvaluationStep(Step):
    """A call of the model without gradients, as a step that can be recorded.

    Attributes:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        replaced: Names of the tensors that the arguments no longer hold after the call,
            such as a cache of keys and values that has grown.
    """

    def __init__(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Define the step; nothing runs."""
        super().__init__(model, [args, kwargs], None)
        self.args, self.kwargs = args, kwargs
        self.replaced: frozenset[str] = frozenset()

    def run_as_drawn(self, before_backward: Callable[[], None] | None) -> Any:
        """Call the model; there is no backward pass."""
        before = self._held()
        with torch.no_grad(), without_wrapper(self.model):
            output = self.model(*self.args, **self.kwargs)
        held = set(self._held().values())
        self.replaced = frozenset(n for n, of in before.items() if of not in held)
        return output

    def _held(self) -> dict[str, tuple[int, ...]]:
        """Return the storages of the arguments' tensors, by the names in the batch."""
        # While it is recorded, `batch` is a copy, of which the model knows nothing.
        found = walk([("batch", [self.args, self.kwargs])]).tensors
        return {name: _storages(tensor) for name, (_, tensor) in found.items()}


def _storages(tensor: Tensor) -> tuple[int, ...]:
    return tuple(part.untyped_storage()._cdata for part in plain_parts(tensor))


class RecordedEvaluation(NamedTuple):
    """A recorded call without gradients.

    Attributes:
        profile: The call on fake tensors. What it frees of its arguments is allocated
            at its beginning.
        freed_bytes: Bytes of these.
    """

    profile: Profile
    freed_bytes: int

    @property
    def need_bytes(self) -> int:
        """Peak of the call above what is live before it."""
        return self.profile.peak_bytes - self.freed_bytes


def recorded(batch: RecordedBatch, replaced: frozenset[str]) -> RecordedEvaluation:
    """Return what is known of a recorded call.

    Args:
        batch: The recording. Casts that autocast caches live until the call has ended.
        replaced: Names of the arguments' tensors that the call may free.
    """
    graph = batch.profile.graph
    freed = {
        index
        for index, storage in enumerate(graph.storages)
        if storage.kind == "input" and storage.name in replaced
    }
    storages = [
        replace(storage, death=len(graph.operators))
        if index in batch.casts
        else storage
        for index, storage in enumerate(graph.storages)
    ]
    for index in freed:
        storages[index] = replace(
            storages[index], kind="outside", birth=0, death=_last_read(graph, index) + 1
        )
    freed_bytes = sum(storages[index].bytes for index in freed)
    inputs = graph.static.inputs - freed_bytes
    changed = replace(
        graph, storages=tuple(storages), static=replace(graph.static, inputs=inputs)
    )
    return RecordedEvaluation(replace(batch.profile, graph=changed), freed_bytes)


def _last_read(graph: StepGraph, storage: int) -> int:
    return max((i for i, read in enumerate(graph.reads) if storage in read), default=0)


class Evaluations:
    """The calls of one model without gradients.

    Attributes:
        why_not: Why they are not foreseen; empty if they are.
    """

    def __init__(self, model: Module, recorder: CallRecorder, room: Room):
        """Store what records a call, and what is left for it; nothing is known."""
        self.why_not = ""
        self._model, self._recorder, self._room = model, recorder, room
        self._needs: dict[Hashable, dict[Sizes, int]] = {}

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that needs more than is left, or warn of it.

        Raises:
            BudgetError: If nothing else was asked for.
        """
        budget = self._room.without_plan()
        if budget is None or self.why_not or not self._room.counted.is_exact:
            return
        situation = evaluation_of(self._model, args, kwargs)
        needs = self._needs.setdefault(situation.kind, {})
        if _at_most(needs, situation.sizes) <= budget.step_bytes:
            return
        try:
            found = self._recorded(args, kwargs)
        except (UnrecordableError, SendingError) as error:
            self.why_not = str(error)
            return
        needs[situation.sizes] = found.need_bytes
        if found.need_bytes > budget.step_bytes:
            about = f"{type(self._model).__name__} on {sizes_text(args, kwargs)}"
            self._room.refuse(_refused(about, found, budget))

    def _recorded(self, args: Any, kwargs: Any) -> RecordedEvaluation:
        step = EvaluationStep(self._model, args, kwargs)
        return recorded(self._recorder.recorded(step), step.replaced)


def _at_most(needs: Mapping[Sizes, int], sizes: Sizes) -> float:
    """Return a bound on the need of a call by those of others; infinite without one.

    Example:
        >>> needs = {(4, 100): 1000}
        >>> [_at_most(needs, sizes) for sizes in [(4, 50), (4, 101), (8, 100)]]
        [1000, 1051, 32000]
    """
    return min(
        (_grown(need, of, sizes) for of, need in needs.items()), default=math.inf
    )


def _grown(need_bytes: int, of: Sizes, sizes: Sizes) -> int:
    pairs = zip(of, sizes, strict=True)
    ratio = max((x / max(1, a) for a, x in pairs), default=1.0)
    return math.floor(need_bytes * max(1.0, ratio) ** MOST_FACTORS)


def _refused(about: str, found: RecordedEvaluation, budget: Budget) -> BudgetError:
    need_bytes = found.need_bytes + found.need_bytes // 100
    error = budget.too_small_for(f"a call of {about} without gradients", need_bytes)
    graph = found.profile.graph
    before_bytes = budget.before_bytes - found.freed_bytes  # The recording makes these.
    name_holders(error, graph, plain_schedule(graph), before_bytes, "call")
    return error
