"""Advice on what lowers the peak of a step and what does not.

Checkpointing drops activations of the forward that only autograd holds. Checkpointing
cannot drop gradients or tensors that the operator at the peak reads, writes or uses as
workspace. Computing the loss in chunks or in a smaller dtype can shrink the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from membudget.graph import Operator, StepGraph
from membudget.planner.timeline import Interval, Timeline, lifetimes, of_intervals
from membudget.profile.live_ranges import (
    LiveItem,
    PeakContents,
    SavedRange,
    saved_ranges,
    touched_storages,
)
from membudget.report.module_tree import repeated_blocks
from membudget.text import format_bytes

_NOTABLE = 0.25
"""The least fraction of the peak that is worth mentioning."""


@dataclass(frozen=True)
class Advice:
    """Advice for lowering the peak of one step, with the figures behind it.

    Attributes:
        droppable_bytes: Bytes at the peak that checkpointing could drop.
        fixed_bytes: Bytes at the peak that checkpointing cannot drop.
        logits_bytes: Undroppable bytes of the logits and the loss, including gradients,
            allocated between the forward and the backward of the last repeated block.
        gradient_bytes: Undroppable bytes of parameter gradients.
        floor_bytes: Lower bound on the peak of the step under any checkpointing that
            preserves the order of operators.
        floor_moment: Op index at which the lower bound is reached.
        texts: The advice, one paragraph per entry.
    """

    droppable_bytes: int
    fixed_bytes: int
    logits_bytes: int
    gradient_bytes: int
    floor_bytes: int
    floor_moment: int
    texts: tuple[str, ...]


def advise(graph: StepGraph, peak: PeakContents) -> Advice:
    """Return advice for a step, given the tensors live at its peak."""
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


def logits(graph: StepGraph, peak: PeakContents) -> tuple[LiveItem, ...]:
    """Return the logits, and similarly large loss tensors, that are live at the peak.

    Of the tensors made by the last module, by the code after it and by the backward
    pass of both, those at least half as large as the largest are returned.
    """
    moments = end_of_forward(graph).moments
    made = [
        item
        for item in peak.items
        if item.storage >= 0  # Not workspace.
        and graph.storages[item.storage].birth in moments
        and item.group in ("saved activations", "temporaries")
        and not item.is_droppable
    ]
    largest = max((item.bytes for item in made), default=0)
    return tuple(item for item in made if item.bytes * 2 >= largest)


class EndOfForward(NamedTuple):
    """What runs from the last module's forward to the end of its backward pass.

    Attributes:
        moments: Op indices of its operators; the loss is among them.
        module_path: The last module; empty if no module runs.
        has_output: Whether they begin with that module, not after it: what the last of
            repeated blocks makes are activations, not logits.
    """

    moments: range
    module_path: str
    has_output: bool


def end_of_forward(graph: StepGraph) -> EndOfForward:
    """Return the operators from the last module's forward to its backward's end."""
    paths = [operator.module_path for operator in graph.operators]
    forward = range(graph.backward_start)
    last = next((paths[i] for i in reversed(forward) if paths[i]), "")
    blocks = repeated_blocks(graph)
    # The dot keeps `h.1` from matching `h.10`.
    is_in_block = any(f"{last}.".startswith(f"{block}.") for block in blocks)
    ours = {""} if is_in_block else {"", last}
    start = next((i + 1 for i in reversed(forward) if paths[i] not in ours), 0)
    backward = range(graph.backward_start, graph.optimizer_start)
    end = next((i for i in backward if paths[i] not in ours), graph.optimizer_start)
    if not is_in_block:  # Without what the model itself runs before that module.
        start = next((i for i in forward[start:] if paths[i] == last), start)
        own = (i for i in backward if i < end and paths[i] == last)
        end = max(own, default=end - 1) + 1
    return EndOfForward(range(start, end), last, not is_in_block)


def floor(graph: StepGraph) -> Timeline:
    """Return the timeline in which saved activations are live as briefly as possible.

    Each saved activation is freed once only autograd holds it, and is live again only
    while an operator reads it. Every plan that preserves the order of operators keeps
    at least the bytes of this timeline live, so no plan has a smaller peak.
    """
    ranges = saved_ranges(graph)
    reads: dict[int, list[int]] = {index: [] for index in ranges}
    for moment in range(len(graph.operators)):
        for index in touched_storages(graph, moment) & reads.keys():
            reads[index].append(moment)
    intervals = lifetimes(graph, without=ranges)
    for index, saved in ranges.items():
        intervals += _needed(graph, index, saved, reads[index])
    return of_intervals(graph, intervals)


def _needed(
    graph: StepGraph, index: int, saved: SavedRange, reads: list[int]
) -> Iterator[Interval]:
    """Yield the live ranges of a saved storage that is dropped wherever possible."""
    storage = graph.storages[index]
    start, end = max(saved.drop_start, storage.birth), saved.last
    if start >= end:
        yield storage.birth, storage.death, storage.bytes
        return
    yield storage.birth, start, storage.bytes
    yield end, storage.death, storage.bytes
    for moment in reads:
        if start <= moment < end:
            yield moment, moment + 1, storage.bytes


def _texts(
    graph: StepGraph, peak: PeakContents, found: Advice, large: tuple[LiveItem, ...]
) -> Iterator[str]:
    total = peak.peak_bytes
    if peak.operator is None or not total:
        yield "The step allocates nothing."
        return
    if peak.operator.phase == "optimizer":
        yield (
            "The peak is in the optimizer's step, when no activation is live: "
            "checkpointing does not lower it."
        )
    else:
        yield _about_checkpointing(graph, total, found)
    if found.logits_bytes >= _NOTABLE * total:
        yield (
            f"The logits, {large[0].dtype}{list(large[0].shape)}, and what the loss "
            f"computes from them are {_part(found.logits_bytes, total)}. Checkpointing "
            "does not lower that. Chunk the loss: compute it, and its gradient, for a "
            "few rows at a time."
        )
    if found.gradient_bytes >= _NOTABLE * total:
        yield (
            "Gradients of parameters are "
            f"{_part(found.gradient_bytes, total)}. Checkpointing does not lower that. "
            "Train fewer parameters, use a smaller dtype, or run the optimizer inside "
            "the backward pass (register_post_accumulate_grad_hook)."
        )
    if graph.static.total > total:
        yield (
            f"{format_bytes(graph.static.total)} are in use before the step, more than "
            f"the {format_bytes(total)} that it allocates: a smaller dtype or another "
            "optimizer saves more than checkpointing can."
        )


def _about_checkpointing(graph: StepGraph, total: int, found: Advice) -> str:
    if not found.droppable_bytes:
        return (
            "Nothing that is live at the peak can be dropped: checkpointing does not "
            "lower it."
        )
    least = graph.operators[found.floor_moment]
    return (
        f"Checkpointing can drop at most {_part(found.droppable_bytes, total)}: saved "
        "activations that no operator uses then. No choice of regions lowers the step "
        f"below {format_bytes(found.floor_bytes)}, which it needs during "
        f"{operator_text(least)}."
    )


def operator_text(operator: Operator) -> str:
    """Describe an operator by name, phase, module and source line."""
    if operator.phase == "optimizer":
        return f"{operator.name} (the optimizer's step)"
    of = operator.module_path or "the model's own code or the loss"
    line = f", {operator.line}" if operator.line else ""
    return f"{operator.name} ({operator.phase} of {of}{line})"


def _part(size: int, total: int) -> str:
    return f"{format_bytes(size)} ({size / total:.0%}) of the peak"
