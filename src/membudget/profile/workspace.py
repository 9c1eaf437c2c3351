"""What an operator allocates beside its outputs while it runs.

On the CPU every allocation and release is an event of torch's profiler, and each
operator can be one, too: what is alive at most inside its interval, less what was alive
at its start, less its outputs, is its workspace.

On fake tensors nothing is allocated, so kernels of the CPU are tried: each distinct
call that is small is run once on zeros. A convolution copies its input into another
layout; an LSTM keeps a workspace whose size no shape tells, and which is corrected
here. What multiplies matrices needs nothing beside its output, and is not tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile, record_function

from membudget._torch import (
    BelowAutograd,
    OperatorOverload,
    is_view_operator,
    tree_iter,
    tree_map_only,
    without_fake_mode,
)
from membudget.memory.peak import quiet_stderr
from membudget.profile.recorder import MARK, StepRecorder
from membudget.profile.records import RecordedCall, TensorSpec

MOST_BYTES = 1 << 27
"""A call whose operands are larger is not tried."""

MOST_FLOPS = 1 << 31
"""A call that computes more is not tried."""

_NEED_NOTHING = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


@contextmanager
def allocations() -> Iterator[dict[int, int]]:
    """Measure what marked events allocate.

    Yields:
        A table that is filled when the context ends: by the number of the mark, how
        many more bytes were alive at most inside it than at its start.
    """
    table: dict[int, int] = {}
    profiler = profile(profile_memory=True)
    with quiet_stderr():
        profiler.__enter__()
    try:
        yield table
    finally:
        with quiet_stderr():
            profiler.__exit__(None, None, None)
    results: Any = profiler.kineto_results
    events = list(results.events())
    memory = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    times = [time for time, _ in memory]
    alive = [0, *accumulate(size for _, size in memory)]
    for event in events:
        if event.name().startswith(MARK):
            first = bisect_left(times, event.start_ns())
            last = bisect_left(times, event.end_ns())
            number = int(event.name().removeprefix(MARK))
            table[number] = max(alive[first : last + 1]) - alive[first]


def note_workspaces(recorder: StepRecorder, table: dict[int, int]) -> None:
    """Note what the operators of a step on real tensors allocated."""
    made = [0] * len(recorder.operators)
    for storage in recorder.lifetimes.storages:
        if storage.birth >= 0:
            made[storage.birth] += storage.bytes
    for index, more in table.items():
        recorder.operators[index].workspace_bytes = max(0, more - made[index])


def try_kernels(recorder: StepRecorder) -> int:
    """Note what the operators of a step on fake tensors of the CPU would allocate.

    Returns:
        How many operators were too large to be tried; their workspace counts as 0.
    """
    calls = [call for call in recorder.distinct.values() if _may_need_more(recorder, call)]
    small = [call for call in calls if _is_small(recorder, call)]
    shapes: dict[int, torch.Size] = {}
    outputs: dict[int, int] = {}
    with allocations() as table, without_fake_mode(), BelowAutograd():
        for number, call in enumerate(small):
            outputs[number] = _try(recorder, number, call, shapes)
    for number, call in enumerate(small):
        for index in call.indices:
            more = table.get(number, 0) - outputs[number]
            recorder.operators[index].workspace_bytes = max(0, more)
    return sum(len(call.indices) for call in calls) - sum(len(c.indices) for c in small)


def _may_need_more(recorder: StepRecorder, call: RecordedCall) -> bool:
    func = call.operator
    if not isinstance(func, OperatorOverload) or func.namespace != "aten":
        return False
    if is_view_operator(func) or func.name().split(".")[0] in _NEED_NOTHING:
        return False
    # An operator on each element needs more only to bring operands into one layout.
    is_pointwise = torch.Tag.pointwise in func.tags
    return not is_pointwise or not all(spec.is_contiguous() for spec in call.specs())


def _is_small(recorder: StepRecorder, call: RecordedCall) -> bool:
    operator = recorder.operators[call.indices[0]]
    values = {*operator.inputs, *operator.outputs}
    size = sum(recorder.lifetimes.values[value].bytes for value in values)
    return size <= MOST_BYTES and operator.flops <= MOST_FLOPS


def _try(
    recorder: StepRecorder, number: int, call: RecordedCall, shapes: dict[int, Any]
) -> int:
    """Run a call on zeros; return the bytes of what it made."""
    operator = recorder.operators[call.indices[0]]
    values = iter(operator.inputs)

    def zeros(spec: TensorSpec) -> Tensor:
        shape = shapes.get(next(values))
        return spec.zeros() if shape is None else torch.zeros(shape, dtype=spec.dtype)

    args, kwargs = tree_map_only(TensorSpec, zeros, (call.args, call.kwargs))
    known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
    try:
        with record_function(f"{MARK}{number}"):
            output = call.operator(*args, **kwargs)
    except Exception:
        return 1 << 62  # Zeros are no input for it, so nothing is known.
    made = [t for t in _tensors(output) if t.untyped_storage()._cdata not in known]
    for index in call.indices:
        _correct(recorder, recorder.operators[index].outputs, index, made, shapes)
    return sum(
        {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in made
        }.values()
    )


def _correct(
    recorder: StepRecorder,
    outputs: Sequence[int],
    index: int,
    made: Sequence[Tensor],
    shapes: dict[int, Any],
) -> None:
    """Correct the sizes of outputs of which the fake kernel knows less."""
    for position, tensor in zip(outputs, made, strict=False):
        value = recorder.lifetimes.values[position]
        storage = recorder.lifetimes.storages[value.storage]
        if value.shape != tuple(tensor.shape) and storage.birth == index:
            shapes[position] = tensor.shape
            storage.bytes = tensor.untyped_storage().nbytes()
            value.shape, value.bytes = tuple(tensor.shape), tensor.nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]
