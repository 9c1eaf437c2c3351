"""What holds the bytes at the peak of a schedule, in the words of those who train.

Each live storage is told by what the recording knows of it: its kind, the operator that
made it, and the module in which that ran. Nothing is guessed from names.

    gradients             of parameters, and what autograd is about to add to them;
                          those of embeddings apart, because they are dense
    loss                  made from the last module on, until its backward pass ends
    layer                 made in the module that runs at the peak
    activations           made in other modules
    parameters, inputs, optimizer state, other tensors      there before the step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from membudget.errors import ByteHolder, HolderKind
from membudget.graph import Operator, StepGraph
from membudget.planner.schedule import Schedule
from membudget.planner.simulate import LiveAtPeak, live_at_peak
from membudget.report.advice import end_of_forward
from membudget.report.module_tree import repeated_blocks

MOST_NAMED = 6
"""Holders that are named; the bytes of all others are summed."""

_LEAST_PART = 0.01
"""The least part of the peak that is worth a line."""

_MOSTLY = 0.75
"""A submodule that holds this part of its module's bytes is named in its place."""

_SUMS = "aten.add.", "aten.add_."
"""The operators by which autograd adds gradients."""

REMEDIES: dict[HolderKind, str] = {
    "loss": "compute the loss in chunks, a few rows at a time",
    "layer": "a smaller micro-batch",
    "activations": "a smaller micro-batch",
    "embedding": "freeze it; or, if nothing else uses it, sparse=True",
    "gradients": "train fewer parameters, use a smaller dtype, or an optimizer that "
    "steps in the backward pass (register_post_accumulate_grad_hook)",
    "earlier gradients": "train fewer parameters, or use a smaller dtype",
    "optimizer step": "an optimizer with fused=True or foreach=False",
    "optimizer state": "an optimizer with less state",
    "parameters": "a smaller dtype",
    "inputs": "a smaller micro-batch",
}
"""What lowers the bytes of each kind of holder; no plan does."""


class HeldAtPeak(NamedTuple):
    """The peak of a schedule.

    Attributes:
        operator: The operator that runs there, for the first time or again.
        holders: What holds the bytes, those in use before the step included; largest
            first, then the rest.
    """

    operator: Operator
    holders: tuple[ByteHolder, ...]

    @property
    def bytes(self) -> int:
        """All bytes that are live at the peak."""
        return sum(holder.bytes for holder in self.holders)


def held_at_peak(graph: StepGraph, schedule: Schedule, before_bytes: int) -> HeldAtPeak:
    """Return what holds the bytes at the peak of a schedule.

    Args:
        graph: The plain step.
        schedule: A schedule of it.
        before_bytes: Bytes in use before the step, whatever holds them.
    """
    live = live_at_peak(graph, schedule.choices, schedule.host)
    step = _StepHolders(graph, schedule).of(live)
    found = [*step, *_before(graph, before_bytes)]
    return HeldAtPeak(graph.operators[live.operator], tuple(_largest(found)))


def _largest(found: list[ByteHolder]) -> Iterator[ByteHolder]:
    """Yield the largest holders, then the sum of all others."""
    total = sum(holder.bytes for holder in found)
    named = [h for h in found if h.kind != "other" and h.bytes >= _LEAST_PART * total]
    named = sorted(named, key=lambda holder: -holder.bytes)[:MOST_NAMED]
    yield from (holder for holder in named if holder.bytes)
    rest = total - sum(holder.bytes for holder in named)
    if rest:
        yield ByteHolder("other", "other tensors", rest)


def _before(graph: StepGraph, before_bytes: int) -> Iterator[ByteHolder]:
    """Yield what holds what is in use before a step."""
    static = graph.static
    there = (s for s in graph.storages if s.kind == "gradient" and s.birth < 0)
    known: tuple[tuple[HolderKind, str, int], ...] = (
        (
            "parameters",
            "parameters and buffers",
            static.parameters + static.buffers,
        ),
        ("inputs", "the batch", static.inputs),
        (
            "earlier gradients",
            "gradients of earlier micro-batches",
            sum(storage.bytes for storage in there),
        ),
        ("optimizer state", "optimizer state", static.optimizer),
    )
    rest = before_bytes
    for kind, name, size in known:
        if size <= rest:  # Of a share, state that is yet to be made is no part.
            rest -= size
            yield _holder(kind, name, size)
    yield ByteHolder("other", "other tensors", rest)


class _StepHolders:
    """Tells what holds the storages that a step makes."""

    def __init__(self, graph: StepGraph, schedule: Schedule):
        self._graph = graph
        self._end = end_of_forward(graph)
        self._gradients = _gradients(graph)
        self._embeddings = {
            parameter
            for storage, parameter in self._gradients.items()
            if "embedding" in _maker(graph, storage)
        }
        self._parents = {block.rpartition(".")[0] for block in repeated_blocks(graph)}
        self._regions = {call.path for call in schedule.calls if call.path}

    def of(self, live: LiveAtPeak) -> Iterator[ByteHolder]:
        """Yield what holds some storages, and the workspace of an operator."""
        sizes: Counter[tuple[HolderKind, str]] = Counter()
        for storage in live.storages:
            sizes[self._of_storage(storage)] += self._graph.storages[storage].bytes
        running = self._of_operator(live.operator)
        sizes[running] += self._graph.operators[live.operator].workspace_bytes
        modules = Counter({n: size for (k, n), size in sizes.items() if k == "layer"})
        yield from self._of_modules(modules, running)
        for (kind, name), size in sizes.items():
            if kind == "loss":
                name += self._largest_shape(live.storages)
            if kind != "layer":
                yield _holder(kind, name, size)

    def _of_storage(self, index: int) -> tuple[HolderKind, str]:
        parameter = self._gradients.get(index)
        if parameter in self._embeddings:
            return "embedding", f"the gradient of {parameter}"
        if parameter is not None:
            return "gradients", "gradients of parameters"
        storage = self._graph.storages[index]
        if storage.kind == "outside":
            return "other", ""
        return self._of_operator(storage.birth)

    def _of_operator(self, index: int) -> tuple[HolderKind, str]:
        operator = self._graph.operators[index]
        if operator.phase == "optimizer":
            return "optimizer step", "temporaries of the optimizer's step"
        if self._end.module_path and index in self._end.moments:
            is_own = self._end.has_output
            of = f"the output of {self._end.module_path} and its" if is_own else "the"
            return "loss", f"{of} loss"
        return "layer", operator.module_path

    def _largest_shape(self, storages: Iterable[int]) -> str:
        """Return dtype and shape of the largest storage that belongs to the loss."""
        made = [s for s in storages if self._of_storage(s)[0] == "loss"]
        if not made:
            return ""
        largest = max(made, key=lambda storage: self._graph.storages[storage].bytes)
        value = next(v for v in self._graph.values if v.storage == largest)
        return f", {value.dtype}{list(value.shape)}"

    def _of_modules(
        self, sizes: Counter[str], running: tuple[HolderKind, str]
    ) -> Iterator[ByteHolder]:
        """Yield what the module at the peak holds, and what all others do."""
        others = "the modules"
        if running[0] == "layer":
            unit = self._unit(sizes, running[1])
            inside = [path for path in sizes if _is_in(path, unit)]
            size = sum(sizes.pop(path) for path in inside)
            itself = "the model itself"
            if not self._end.module_path:  # Its loss is not told from it.
                itself = "the model itself and its loss"
            yield _holder("layer", f"the working set of {unit or itself}", size)
            others = "other modules"
        yield _holder("activations", f"activations of {others}", sizes.total())

    def _block_of(self, path: str) -> str:
        """Return the repeated block, region or top module around a module."""
        parts = path.split(".")
        around = [".".join(parts[: n + 1]) for n in range(len(parts))]
        # The first of equal blocks may differ from them: its input needs no gradient.
        blocks = [
            block for block in around if block.rpartition(".")[0] in self._parents
        ]
        regions = [block for block in around if block in self._regions]
        return [around[0], *regions, *blocks][-1]

    def _unit(self, sizes: Counter[str], path: str) -> str:
        """Return the block of a module, or what in it holds most of its bytes."""
        unit = self._block_of(path)
        while unit:
            below: Counter[str] = Counter()
            for module, size in sizes.items():
                if _is_in(module, unit):
                    rest = module[len(unit) + 1 :].partition(".")[0]
                    below[f"{unit}.{rest}" if rest else unit] += size
            inner, size = max(below.items(), key=itemgetter(1), default=(unit, 0))
            if inner == unit or size < _MOSTLY * below.total():
                break
            unit = inner
        return unit


def _is_in(path: str, module: str) -> bool:
    """Return whether a path is that of a module or below; the model is by itself.

    Example:
        >>> _is_in("h.1.mlp", "h.1"), _is_in("h.10", "h.1"), _is_in("h.1", "")
        (True, False, False)
    """
    return f"{path}.".startswith(f"{module}.") if module else path == ""


def _holder(kind: HolderKind, name: str, size: int) -> ByteHolder:
    return ByteHolder(kind, name, size, REMEDIES.get(kind, ""))


def _maker(graph: StepGraph, storage: int) -> str:
    """Return the name of the operator that made a storage; empty if none did."""
    birth = graph.storages[storage].birth
    return graph.operators[birth].name if birth >= 0 else ""


def _gradients(graph: StepGraph) -> dict[int, str]:
    """Return the parameter of each storage that is its gradient, or is added to it."""
    found = {
        index: storage.name
        for index, storage in enumerate(graph.storages)
        if storage.kind == "gradient"
    }
    # What is added first was made last: the sums are followed from their end.
    for index in reversed(range(graph.backward_start, graph.optimizer_start)):
        if not graph.operators[index].name.startswith(_SUMS):
            continue
        of = next((found[s] for s in graph.writes[index] if s in found), None)
        for storage in graph.reads[index]:
            if of is not None and graph.storages[storage].birth >= graph.backward_start:
                found.setdefault(storage, of)
    return found
