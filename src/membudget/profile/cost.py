"""The cost of each operator: floating-point operations (FLOPs) and time.

FLOPs are counted as in `torch.utils.flop_counter`: a multiply-add counts as two, and
only matrix products, convolutions and attention count; all other operators are treated
as memory-bound. This module adds formulas for kernels that torch omits or overcounts.

Times are measured, or estimated from a device's roofline. To measure times, the step
runs a few times without the recorder, and a clock is read only where a block begins or
ends. The median time between two block boundaries is distributed over the operators in
between, in proportion to their recorded times:

    events      start       enter h.0     leave h.0             end
    recorded      │ a 2 µs  b 2 µs  │  c 6 µs  │  d 1 µs  e 3 µs │   slow: dispatch mode
    timed         │      1 µs       │   2 µs   │      1 µs       │   medians
    result        │ a .5    b .5    │  c 2     │  d .25   e .75  │

A block's operator times thus add up to the block's time without recording.

After some steps, the heap returns memory to the system, and the next forward pass pays
for a page fault at each 4 KiB: up to 3 µs, so it may take twice as long. An operator
that runs again finds memory that others have left. So between two boundaries, only the
runs with the fewest page faults count.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from membudget._torch_accelerator import in_use, synchronize
from membudget.graph import Operator, StepGraph
from membudget.profile.devices import Device, this_processor
from membudget.profile.events import TimerEvents

FEW_FAULTS = 0.1
"""Which share of the way from the fewest page faults to the most still are few."""


def step_clock() -> Callable[[], float]:
    """Return the clock of steps: it waits for what was launched before each reading.

    Without an accelerator it is CPU time, which other processes take nothing of, if one
    thread computes. Where several do, their CPU time is not what a user waits for.
    """
    devices = in_use()
    if not devices:
        return time.process_time if computes_alone() else time.perf_counter

    def clock() -> float:
        synchronize(devices)
        return time.perf_counter()

    return clock


def share_out(
    graph: StepGraph, recorded: TimerEvents, timed: Sequence[TimerEvents]
) -> StepGraph:
    """Return the graph with operator times scaled to match the timed runs."""
    same = _alike(recorded, timed)
    if not same:
        # Each run took another path through the model: time the step as a whole.
        recorded, same = _ends(recorded), [_ends(run) for run in timed]
    operators = list(graph.operators)
    for i in range(len(recorded.labels) - 1):
        start, end = recorded.readings[i], recorded.readings[i + 1]
        runs = _without_faults(same, i)
        seconds = median(run.readings[i + 1] - run.readings[i] for run in runs)
        operators[start:end] = _scaled(operators[start:end], seconds)
    return dataclasses.replace(graph, operators=tuple(operators))


def notes_on(recorded: TimerEvents, timed: Sequence[TimerEvents]) -> tuple[str, ...]:
    """Return caveats about timed runs whose events differ from the recorded run's."""
    others = len(timed) - len(_alike(recorded, timed))
    if not others:
        return ()
    if others < len(timed):
        return (
            f"{others} of {len(timed)} timed runs took another path through the model "
            "than the recorded run, and are left out",
        )
    return (
        "every timed run took another path through the model than the recorded run, so "
        "the step was timed as a whole, not block by block",
    )


def _alike(recorded: TimerEvents, timed: Sequence[TimerEvents]) -> list[TimerEvents]:
    """Return the timed runs with the same sequence of events as the recorded run."""
    return [run for run in timed if run.labels == recorded.labels]


def _ends(run: TimerEvents) -> TimerEvents:
    ends = TimerEvents(run._clock)
    ends.labels = [run.labels[0], run.labels[-1]]
    ends.readings = [run.readings[0], run.readings[-1]]
    ends.faults = [run.faults[0], run.faults[-1]]
    return ends


def _without_faults(runs: Sequence[TimerEvents], i: int) -> list[TimerEvents]:
    """Return the runs with about the fewest page faults between two events."""
    counts = [run.faults[i + 1] - run.faults[i] for run in runs]
    fewest, most = min(counts), max(counts)
    few = fewest + FEW_FAULTS * (most - fewest)
    return [run for run, count in zip(runs, counts, strict=True) if count <= few]


def _scaled(operators: Sequence[Operator], seconds: float) -> list[Operator]:
    total = sum(operator.seconds for operator in operators)
    factor = seconds / total if total else 0.0
    return [dataclasses.replace(o, seconds=o.seconds * factor) for o in operators]


def level(graph: StepGraph) -> StepGraph:
    """Return the graph with the same time for the same call of an operator.

    The blocks of a model repeat calls, whose times differ by noise. Their mean is
    nearer to the truth, and a planner treats blocks alike that are alike.
    """
    calls = [_call(graph, operator) for operator in graph.operators]
    times: dict[Hashable, list[float]] = {}
    for call, operator in zip(calls, graph.operators, strict=True):
        times.setdefault(call, []).append(operator.seconds)
    means = {call: fmean(seconds) for call, seconds in times.items()}
    operators = tuple(
        dataclasses.replace(operator, seconds=means[call])
        for call, operator in zip(calls, graph.operators, strict=True)
    )
    return dataclasses.replace(graph, operators=operators)


def _call(graph: StepGraph, operator: Operator) -> Hashable:
    """Return what makes two calls of an operator the same: code, shapes and dtypes."""
    values = [graph.values[i] for i in (*operator.inputs, *operator.outputs)]
    operands = tuple((value.shape, value.dtype) for value in values)
    return operator.name, operator.phase, operator.line, len(operator.inputs), operands


def roofline(graph: StepGraph, device: Device) -> StepGraph:
    """Return the graph with operator times estimated from a device's roofline."""
    operators = tuple(_at_best(graph, operator, device) for operator in graph.operators)
    return dataclasses.replace(graph, operators=operators)


def roofline_of_optimizer(graph: StepGraph) -> StepGraph:
    """Return the graph with optimizer times estimated from this CPU's roofline."""
    # The optimizer is recorded on fake tensors, so its time cannot be measured.
    operators = list(graph.operators)
    for index in range(graph.optimizer_start, len(operators)):
        operators[index] = _at_best(graph, operators[index], this_processor())
    return dataclasses.replace(graph, operators=tuple(operators))


def _at_best(graph: StepGraph, operator: Operator, device: Device) -> Operator:
    moved_bytes = operator.read_bytes + operator.written_bytes
    # Taken to compute in the dtype of its first output.
    values = [*operator.outputs, *operator.inputs]
    dtype = graph.values[values[0]].dtype if values else "float32"
    seconds = device.seconds(operator.flops, moved_bytes, dtype)
    return dataclasses.replace(operator, seconds=seconds)


def flops_of(operator: Any, args: Any, kwargs: dict[str, Any], output: Any) -> int:
    """Return the FLOPs of one operator call; 0 for operators that are not counted.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
        >>> flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)  # 2·2·3·5
        60
    """
    ours = _OURS.get(operator)
    if ours is not None:
        return ours(*args, **kwargs)
    formula = flop_registry.get(getattr(operator, "_overloadpacket", operator))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _attention(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any
) -> int:
    shapes = (t.shape for t in (grad, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))


def _lstm_layer(x: Any, weight: Any, recurrent: Any, *rest: Any, **kwargs: Any) -> int:
    """Count two matrix products per time step: with the input and the hidden state."""
    rows = x.shape[0] * x.shape[1]
    return 2 * int(rows) * int(weight.numel() + recurrent.numel())


def _lstm_layer_backward(x: Any, *weights: Any, **kwargs: Any) -> int:
    # Each product has two gradients: of its operand and of its weight.
    return 2 * _lstm_layer(x, *weights[:2])


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, *rest: Any, **kwargs: Any
) -> int:
    """Count one convolution per gradient that the backward call computes."""
    # torch's formula ignores `groups` in the gradient of the weight.
    transposed, mask = rest[4], rest[7]
    forward = conv_flop_count(
        list(x.shape), list(weight.shape), list(gradient.shape), transposed=transposed
    )
    return int(forward) * (bool(mask[0]) + bool(mask[1]))


_ATEN = torch.ops.aten
_OURS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        _attention_backward
    ),
    _ATEN.convolution_backward.default: _convolution_backward,
    _ATEN.mkldnn_rnn_layer.default: _lstm_layer,
    _ATEN.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
}


def computes_alone() -> bool:
    """Return whether kernels on the CPU are computed by the thread that calls them."""
    return torch.get_num_threads() == 1
