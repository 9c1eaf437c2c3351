"""Measure what each block of a chain costs for one micro-batch, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch_accelerator import is_on_accelerator
from membudget.engine.region import checkpoint
from membudget.memory.counting import Counted
from membudget.memory.peak import storage_bytes
from membudget.planner.pipeline_cuts import BlockOfPipeline

_RUNS = 5


def measure_blocks(
    blocks: Iterable[Module], micro_batch: Tensor, *, optimizer_states: int = 0
) -> list[BlockOfPipeline]:
    """Return what each block of a chain costs, for `plan_pipeline`.

    Blocks run one after another, each forward and backward by itself, on the device of
    the micro-batch. Measure on one rank, and let the others have the result: their own
    seconds would differ, and so would their plans.

    Args:
        blocks: The chain, on the device; gradients are cleared, buffers and random
            streams move as five steps move them.
        micro_batch: What the first block takes.
        optimizer_states: Number of tensors that the optimizer keeps for each trainable
            parameter, of its size: 2 for Adam. They count as live before the step.

    Returns:
        One entry per block. Seconds are medians of five runs. Without a C++ compiler,
        bytes on the CPU are those of the tensors that Python sees, and peaks are 0.
    """
    counted = Counted(micro_batch.device)
    counted.start()
    try:
        found, x = [], micro_batch.detach()
        for block in blocks:
            x = x.requires_grad_(x.is_floating_point())
            found.append(_measured(block, x, counted, optimizer_states))
            with torch.no_grad():
                x = block(x).detach()
        return found
    finally:
        counted.stop()


def _measured(
    block: Module, x: Tensor, counted: Counted, optimizer_states: int
) -> BlockOfPipeline:
    runs = [_run(block, block, x, counted) for _ in range(_RUNS)]
    kept = _run(lambda x: checkpoint(block, x), block, x, counted)
    forward_s, backward_s = (median(run[i] for run in runs) for i in range(2))
    trained_bytes = storage_bytes(p for p in block.parameters() if p.requires_grad)
    held_bytes = storage_bytes([*block.parameters(), *block.buffers()])
    return BlockOfPipeline(
        forward_s=forward_s,
        backward_s=backward_s,
        static_bytes=held_bytes + optimizer_states * trained_bytes,
        gradient_bytes=trained_bytes,
        saved_bytes=runs[-1][2],
        kept_bytes=kept[2],
        working_bytes=runs[-1][3],
    )


def _run(
    call: Callable[[Tensor], Tensor], block: Module, x: Tensor, counted: Counted
) -> tuple[float, float, int, int]:
    """Run a block; return its seconds, the bytes it saves, and its working bytes."""
    before_bytes = counted.live_bytes()
    counted.restart()
    start_s = _now_s(x)
    output = call(x)
    middle_s = _now_s(x)
    saved_bytes = counted.live_bytes() - before_bytes
    gradient = torch.ones_like(output)
    output.backward(gradient)
    end_s = _now_s(x)
    working_bytes = 0
    if counted.is_exact:
        working_bytes = counted.peak_bytes() - before_bytes - saved_bytes
    block.zero_grad()
    x.grad = None
    return middle_s - start_s, end_s - middle_s, saved_bytes, working_bytes


def _now_s(x: Tensor) -> float:
    """Return the time when all that was launched has run."""
    if is_on_accelerator(x.device):
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
