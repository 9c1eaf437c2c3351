"""Measure what each block of a chain costs for one micro-batch, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch_accelerator import is_on_accelerator
from membudget.engine.region import checkpoint
from membudget.errors import OptionTypeError
from membudget.memory.counting import Counted
from membudget.memory.peak import storage_bytes
from membudget.planner.pipeline_costs import BlockOfPipeline
from membudget.profile.optimizer_step import OptimizerLike, state_bytes
from membudget.state.snapshot import State

_TensorMap = Callable[[Tensor], Tensor]

_RUNS = 5


def measure_blocks(
    blocks: Iterable[Module],
    micro_batch: Tensor,
    *,
    target: Any = None,
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None,
    optimizer: OptimizerLike = None,
) -> list[BlockOfPipeline]:
    """Return what each block of a chain costs, for `plan_pipeline`.

    Blocks run one after another, each forward and backward by itself, on the device of
    the micro-batch; a block that is elsewhere is there while it runs. Parameters,
    gradients, buffers and random streams are then what they were. Measure on one rank,
    and let the others have the result: their own seconds would differ, and so would
    their plans.

    Args:
        blocks: The chain.
        micro_batch: What the first block takes.
        target: What `loss_fn` takes beside the last block's output.
        loss_fn: The loss, which counts as part of the last block.
        optimizer: The optimizer, or its class, whose state counts as live before the
            step.

    Returns:
        One entry per block. Seconds are medians of five runs. Without a C++ compiler,
        bytes on the CPU are those of the tensors that Python sees, and peaks are 0.

    Raises:
        OptionTypeError: A block returns something else than one tensor.
    """
    counted = Counted(micro_batch.device)
    counted.start()
    try:
        found, x, chain = [], micro_batch.detach(), [*blocks]
        for number, block in enumerate(chain):
            loss_of: _TensorMap | None = None
            if loss_fn is not None and number == len(chain) - 1:
                loss_of = lambda output: loss_fn(output, target)  # noqa: E731
            with _as_it_was(block, x.device):
                output = _output(block, x, number)
                one = _MeasuredBlock(block, x, loss_of, counted)
                costs = one.measured(optimizer)
            found.append(replace(costs, output_bytes=output.nbytes))
            x = output
        return found
    finally:
        counted.stop()


@contextmanager
def _as_it_was(block: Module, device: torch.device) -> Iterator[None]:
    """Put a block on a device; then restore it, its gradients and random streams."""
    before = State([("block", block)])
    try:
        block.to(device)
        block.zero_grad()
        yield
    finally:
        before.restore()
        before.restore_gradients()


def _output(block: Module, x: Tensor, number: int) -> Tensor:
    """Return what the next block takes."""
    output: Any = block(x)
    if not isinstance(output, Tensor):
        raise OptionTypeError(
            f"block {number} returns a {type(output).__name__}: blocks that are "
            f"measured pass one tensor to the next"
        )
    return output.detach().requires_grad_(output.requires_grad)


class _MeasuredBlock:
    """One block, on what the one before it returns."""

    def __init__(
        self, block: Module, x: Tensor, loss_of: _TensorMap | None, counted: Counted
    ):
        self._block, self._x = block, x
        self._loss_of, self._counted = loss_of, counted

    def measured(self, optimizer: OptimizerLike) -> BlockOfPipeline:
        """Return what the block costs."""
        block = self._block
        runs = [self._run(block) for _ in range(_RUNS)]
        kept = self._run(lambda x: checkpoint(block, x))
        forward_s, backward_s = (median(run[i] for run in runs) for i in range(2))
        trained_bytes = storage_bytes(p for p in block.parameters() if p.requires_grad)
        held_bytes = storage_bytes([*block.parameters(), *block.buffers()])
        return BlockOfPipeline(
            forward_s=forward_s,
            backward_s=backward_s,
            static_bytes=held_bytes + self._state_bytes(optimizer),
            gradient_bytes=trained_bytes,
            input_bytes=self._x.nbytes,
            saved_bytes=runs[-1][2],
            kept_bytes=kept[2],
            working_bytes=runs[-1][3],
        )

    def _state_bytes(self, optimizer: OptimizerLike) -> int:
        trained = [p for p in self._block.parameters() if p.requires_grad]
        if optimizer is None or not trained:
            return 0
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        found = state_bytes(self._block, optimizer)
        self._block.zero_grad()
        return found

    def _run(self, call: _TensorMap) -> tuple[float, float, int, int]:
        """Run the block; return its seconds, the bytes it saves, and working bytes."""
        counted, x = self._counted, self._x
        before_bytes = counted.live_bytes()
        counted.restart()
        start_s = _now_s(x)
        # A stage holds its output to the end of the backward pass.
        output = call(x)
        result = output if self._loss_of is None else self._loss_of(output)
        middle_s = _now_s(x)
        saved_bytes = counted.live_bytes() - before_bytes
        if result.requires_grad:
            result.backward(torch.ones_like(result))
        end_s = _now_s(x)
        working_bytes = 0
        if counted.is_exact:
            working_bytes = counted.peak_bytes() - before_bytes - saved_bytes
        self._block.zero_grad()
        x.grad = None
        return middle_s - start_s, end_s - middle_s, saved_bytes, working_bytes


def _now_s(x: Tensor) -> float:
    """Return the time when all that was launched has run."""
    if is_on_accelerator(x.device):
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
