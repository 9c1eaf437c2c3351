"""What lowers the peak of a step, and what does not.

Checkpointing drops activations that the forward made and only autograd holds. It drops
neither gradients, nor what the operator of the peak reads, writes and needs besides:
if those are large, something else must be done about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from membudget.graph import StepGraph
from membudget.planner.timeline import Interval, Timeline, lifetimes, of_intervals
from membudget.profile.live_ranges import (
    Alive,
    Held,
    PeakContents,
    described,
    keeping,
    touched_storages,
)
from membudget.report.module_tree import repeated_blocks
from membudget.sizes import format_bytes

_NOTABLE = 0.25
"""A part of the peak that is at least this large is worth a word."""


@dataclass(frozen=True)
class Advice:
    """What is to be done about the peak.

    Attributes:
        droppable_bytes: What of the peak's contents checkpointing could have dropped.
        fixed_bytes: The rest.
        logits_bytes: What of the rest are the logits, and what the loss and its
            gradient make of them: large storages that are made at the end of the
            forward, outside of the repeated blocks, or before the backward gets there.
        gradient_bytes: What of the rest are gradients of parameters.
        floor_bytes: No checkpointing of this step, with its operators in this order,
            allocates less.
        floor_moment: Where that is reached.
        texts: In words.
    """

    droppable_bytes: int
    fixed_bytes: int
    logits_bytes: int
    gradient_bytes: int
    floor_bytes: int
    floor_moment: int
    texts: tuple[str, ...]


def advise(graph: StepGraph, peak: PeakContents) -> Advice:
    """Return what lowers the peak.

    Args:
        graph: The step.
        peak: What is alive at its peak.
    """
    least = floor(graph)
    large = logits(graph, peak)
    fixed = [item for item in peak.items if not item.is_droppable]
    found = Advice(
        droppable_bytes=peak.droppable_bytes,
        fixed_bytes=sum(item.bytes for item in fixed),
        logits_bytes=sum(item.bytes for item in large),
        gradient_bytes=sum(i.bytes for i in fixed if i.group == "gradients"),
        floor_bytes=least.peak_bytes,
        floor_moment=least.peak_moment,
        texts=(),
    )
    texts = tuple(_texts(graph, peak, found, large))
    return dataclasses.replace(found, texts=texts)


def logits(graph: StepGraph, peak: PeakContents) -> tuple[Alive, ...]:
    """Return the logits and what the loss makes of them, if alive at the peak.

    They are made by the last module, by what runs after it outside of every module, and
    by the backward of both; none is much smaller than the largest.
    """
    start, end = _end_of_forward(graph)
    made = [
        item
        for item in peak.items
        if item.storage >= 0
        and start <= graph.storages[item.storage].birth < end
        and item.group in ("saved activations", "temporaries")
        and not item.is_droppable
    ]
    largest = max((item.bytes for item in made), default=0)
    return tuple(item for item in made if item.bytes * 2 >= largest)


def _end_of_forward(graph: StepGraph) -> tuple[int, int]:
    """Return when the last module's forward begins and when its backward ends.

    If the last module is one of the repeated blocks, or lies inside one, it is what
    runs after it that counts.
    """
    paths = [operator.module_path for operator in graph.operators]
    forward = range(graph.backward_start)
    last = next((paths[i] for i in reversed(forward) if paths[i]), "")
    blocks = repeated_blocks(graph)
    is_in_block = any(f"{last}.".startswith(f"{block}.") for block in blocks)
    ours = {""} if is_in_block else {"", last}
    start = next((i + 1 for i in reversed(forward) if paths[i] not in ours), 0)
    backward = range(graph.backward_start, graph.optimizer_start)
    end = next((i for i in backward if paths[i] not in ours), graph.optimizer_start)
    return start, end


def floor(graph: StepGraph) -> Timeline:
    """Return the timeline of the step if each saved activation were dropped at once.

    It would come back only for the operators that read it. What is alive then is alive
    under every plan that keeps the operators' order, so none has a smaller peak.
    """
    held = keeping(graph)
    reads: dict[int, list[int]] = {index: [] for index in held}
    for moment in range(len(graph.operators)):
        for index in touched_storages(graph, moment) & reads.keys():
            reads[index].append(moment)
    intervals = lifetimes(graph, without=held)
    for index, hold in held.items():
        intervals += _needed(graph, index, hold, reads[index])
    return of_intervals(graph, intervals)


def _needed(
    graph: StepGraph, index: int, hold: Held, reads: list[int]
) -> Iterator[Interval]:
    """Yield when a saved storage is alive if it is dropped wherever it can be."""
    storage = graph.storages[index]
    start, end = max(hold.drop_start, storage.birth), hold.last
    if start >= end:
        yield storage.birth, storage.death, storage.bytes
        return
    yield storage.birth, start, storage.bytes
    yield end, storage.death, storage.bytes
    for moment in reads:
        if start <= moment < end:
            yield moment, moment + 1, storage.bytes


def _texts(
    graph: StepGraph, peak: PeakContents, found: Advice, large: tuple[Alive, ...]
) -> Iterator[str]:
    total = peak.peak_bytes
    if peak.operator is None or not total:
        yield "The step allocates nothing."
        return
    if peak.operator.phase == "optimizer":
        yield (
            "The peak lies in the optimizer's step, when no activation is alive: "
            "checkpointing does not lower it."
        )
    else:
        yield _about_checkpointing(graph, total, found)
    if found.logits_bytes >= _NOTABLE * total:
        yield (
            f"The logits, {large[0].dtype}{list(large[0].shape)}, and what the loss "
            f"makes of them are {_part(found.logits_bytes, total)}. Checkpointing does "
            "not lower that. Chunk the loss: compute it, and its gradient, for a few "
            "rows at a time."
        )
    if found.gradient_bytes >= _NOTABLE * total:
        yield (
            "Gradients of parameters are "
            f"{_part(found.gradient_bytes, total)}. Checkpointing does not lower that. "
            "Train fewer parameters, or in a smaller dtype, or let the optimizer step "
            "inside the backward (register_post_accumulate_grad_hook)."
        )
    if graph.static.total > total:
        yield (
            f"{format_bytes(graph.static.total)} are there before the step, more than "
            f"the {format_bytes(total)} that it allocates: a smaller dtype, or another "
            "optimizer, saves more than checkpointing can."
        )


def _about_checkpointing(graph: StepGraph, total: int, found: Advice) -> str:
    if not found.droppable_bytes:
        return (
            "Nothing that is alive at the peak can be dropped: checkpointing does not "
            "lower it."
        )
    least = graph.operators[found.floor_moment]
    return (
        f"Checkpointing can drop {_part(found.droppable_bytes, total)}, at most: saved "
        "activations that are not in use then. No choice of regions brings the step "
        f"below {format_bytes(found.floor_bytes)}, which it needs anyway during "
        f"{described(least)}."
    )


def _part(size: int, total: int) -> str:
    return f"{format_bytes(size)} ({size / total:.0%}) of the peak"
