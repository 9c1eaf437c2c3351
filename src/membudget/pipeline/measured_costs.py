"""What a micro-batch costs each stage, from a measured step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any

import torch.distributed as dist

from membudget.errors import OptionError
from membudget.pipeline.event_log import ActionBytes
from membudget.pipeline.pipeline_schedule import PipelineSchedule
from membudget.planner.pipeline_costs import StageCosts
from membudget.planner.pipeline_order import PipelineOrder, is_sent
from membudget.planner.pipeline_simulation import PipelineEvent


def measured_costs(schedule: PipelineSchedule) -> tuple[StageCosts, ...]:
    """Return what a micro-batch costs each stage, from the schedule's last step.

    Call it on every rank. What is measured holds for stages that drop and recompute
    as they did in that step, with other schedules and numbers of micro-batches. Take
    a later step than the first, which makes gradients and verifies regions.

    Args:
        schedule: A schedule that has run a step. Bytes are 0 without `meter=True`.

    Returns:
        The costs of all stages: medians over the micro-batches, which leave out that
        some calls of a region are verified. The seconds of a backward pass that
        recomputes on demand stand in `backward_s` as a whole.

    Raises:
        OptionError: The schedule has not run a step.
    """
    if not schedule.events:
        raise OptionError("nothing is measured yet: run a step of the schedule first")
    found: list[Any] = [None] * len(schedule.order.ranks)
    here = (schedule.events, schedule.bytes)
    dist.all_gather_object(found, here, schedule.group)
    costs: dict[int, StageCosts] = {}
    for rank, (events, counted) in enumerate(found):
        stages = sorted(s for s, r in schedule.order.rank_of.items() if r == rank)
        static_bytes = counted[0].before_bytes if counted else 0
        for stage in stages:
            costs[stage] = StageCosts(
                **_seconds(event for event in events if event.action.stage == stage),
                **_bytes(schedule.order, stage, counted),
                static_bytes=static_bytes if stage == stages[0] else 0,
            )
        for stage in {*stages} & {next_stage - 1 for next_stage in stages}:
            # Its output's gradient is that of the next stage's input.
            output_bytes = costs[stage + 1].input_bytes
            costs[stage] = replace(costs[stage], output_bytes=output_bytes)
    return tuple(costs[stage] for stage in sorted(costs))


def _seconds(events: Iterable[PipelineEvent]) -> dict[str, Any]:
    """Return the seconds of one stage."""
    seconds = defaultdict(list)
    for event in events:
        seconds[event.action.kind].append(event.end_s - event.start_s)
    typical = {kind: median(of) for kind, of in seconds.items()}
    transfers = [kind for kind in seconds if kind.startswith(("send", "receive"))]
    weight_s = typical.get("backward_weight")
    whole_s = typical.get("backward_input", 0.0) + (weight_s or 0.0)
    return {
        "forward_s": typical["forward"],
        "recompute_s": typical.get("recompute", 0.0),
        "backward_s": whole_s if weight_s else typical.get("backward", 0.0),
        "weight_s": weight_s,
        "transfer_s": median(s for kind in transfers for s in seconds[kind])
        if transfers
        else 0.0,
    }


def _bytes(
    order: PipelineOrder, stage: int, counted: Sequence[ActionBytes]
) -> dict[str, int]:
    """Return the bytes of one stage."""
    changes: dict[str, list[int]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    for around in counted:
        action = around.action
        if action.stage == stage:
            kind: str = action.kind
            if kind == "forward" and not order.recomputes(stage, action.micro_batch):
                kind = "forward without regions"
            changes[kind].append(around.after_bytes - around.before_bytes)
            peaks[kind].append(around.peak_bytes - around.before_bytes)
    is_lazy = order.checkpoint[stage] != "never" and "recompute" not in changes
    backward = "lazy_peak_bytes" if is_lazy else "backward_peak_bytes"
    ends = changes["backward"] or changes["backward_weight"]
    forwards = [*peaks["forward"], *peaks["forward without regions"]]
    # The first backward pass makes the gradients, which are counted apart.
    backwards = [
        peak_bytes
        for kind, found in peaks.items()
        if kind.startswith("backward")
        for peak_bytes in found[1:] or found
    ]
    held = changes["forward"] or changes["forward without regions"]
    is_local = stage > 0 and not is_sent(order.rank_of, stage, stage - 1)
    if is_local and ends:
        inputs = changes["backward_input"] or [_typical(held) + _typical(ends)]
    else:
        inputs = changes["receive_forward"]
    return {
        "input_bytes": _typical(inputs),
        "output_bytes": _typical(changes["receive_backward"]),
        "saved_bytes": _typical(changes["forward without regions"]),
        "kept_bytes": _typical(changes["forward"]),
        "recomputed_bytes": _typical(changes["recompute"]),
        "gradient_bytes": max(0, ends[0] - _typical(ends)) if ends else 0,
        "forward_peak_bytes": _typical(forwards),
        "recompute_peak_bytes": _typical(peaks["recompute"]),
        backward: _typical(backwards),
    }


def _typical(counts: Sequence[int]) -> int:
    return median_low(counts) if counts else 0
