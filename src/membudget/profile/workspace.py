"""Measure the memory of kernel workspaces.

A workspace is memory that an operator allocates while it runs, beyond its outputs:

    workspace = (most live bytes while it runs) - (live bytes at its start) - outputs

On the CPU, live bytes follow from the allocations that torch's profiler records; on an
accelerator, its allocator counts them.

Fake tensors allocate nothing, so each distinct CPU call runs once on zeros if it is
small. On an accelerator none does: a kernel that fails there may take the device away
from the process. Trial runs detect, for instance, convolutions that copy their input
into another layout, and correct the size of an LSTM's workspace output, which the fake
kernel does not know. Matrix products that BLAS computes without copies need no trial
run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from membudget._torch import (
    BelowAutograd,
    tree_map_only,
    without_dispatch_modes,
)
from membudget._torch_accelerator import HOST, memory_stats
from membudget.errors import OptionError
from membudget.memory.counting import Counted
from membudget.memory.peak import recorded_events, storage_bytes
from membudget.ops import facts_of, tensors_in_tree
from membudget.profile.recorded_call import RecordedCall, TensorSpec
from membudget.profile.step_recorder import StepRecorder
from membudget.state.bits import plain_parts

MOST_BYTES = 1 << 27
"""Calls with larger operands and outputs are not tried."""

MOST_FLOPS = 1 << 31
"""Calls with more floating-point operations are not tried."""

ALIGNMENT = 64
"""Bytes at whose multiples torch allocates memory, and any number may begin."""

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


MARK = "membudget operator "
"""Followed by the op index: the name of an operator's profiler event."""


class Meter:
    """Measures operators: most live bytes while one runs, less those at its start.

    This one measures none, for allocators that keep no statistics.

    Attributes:
        table: What was measured, keyed by op index.
        before: Live bytes at the start of each operator, of those allocated since the
            meter began; only on the CPU.
    """

    def __init__(self) -> None:
        """Begin with empty tables."""
        self.table: dict[int, int] = {}
        self.before: dict[int, int] = {}

    def around(self, index: int) -> AbstractContextManager[Any]:
        """Return the context in which the operator with this op index is to run."""
        return nullcontext()


class _HostMeter(Meter):
    """Marks operators among the profiler's events, which fill the table in the end."""

    def around(self, index: int) -> AbstractContextManager[Any]:
        return record_function(f"{MARK}{index}")


class _DeviceMeter(Meter):
    """Asks the allocator of an accelerator's device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._counted = Counted(device)

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        self._counted.restart()
        before_bytes = self._counted.live_bytes()
        yield
        self.table[index] = self._counted.peak_bytes() - before_bytes


@contextmanager
def allocations(device: torch.device) -> Iterator[Meter]:
    """Measure what operators allocate on a device.

    Yields:
        The meter, whose table is complete on exit.
    """
    if device.type != "cpu":
        meter = Meter()
        with suppress(OptionError):
            memory_stats(device)
            meter = _DeviceMeter(device)
        yield meter
        return
    meter = _HostMeter()
    with recorded_events() as events:
        yield meter
    times = [change.moment for change in events.memory]
    alive = [0, *accumulate(change.bytes for change in events.memory)]
    for event in events.others:
        if event.name().startswith(MARK):
            first = bisect_left(times, event.start_ns())
            last = bisect_left(times, event.end_ns())
            index = int(event.name().removeprefix(MARK))
            meter.before[index] = alive[first]
            meter.table[index] = max(alive[first : last + 1]) - alive[first]


def note_workspaces(recorder: StepRecorder, table: dict[int, int]) -> None:
    """Set each operator's workspace from the table of a meter."""
    made = [0] * len(recorder.operators)
    for storage in recorder.lifetimes.storages:
        # Memory from outside was allocated before the operator at its birth began.
        if storage.birth >= 0 and storage.kind != "outside":
            made[storage.birth] += storage.bytes - sum(storage.grown.values())
            for operator, more in storage.grown.items():
                made[operator] += more
    for index, more in table.items():
        recorder.operators[index].workspace_bytes = max(0, more - made[index])


def try_kernels(recorder: StepRecorder) -> int:
    """Set the workspaces of a fake step on the CPU by running its kernels on zeros.

    What shares memory in the step does so here: a trial takes what its operator takes
    in the step, and copies of the parameters that it reads.

    Returns:
        The number of operators not measured: those too large to run, or that fail on
        zeros. The workspace of an unmeasured operator is taken as 0, or for a matrix
        product as the size of all operands that BLAS cannot read in place.
    """
    calls = [call for call in recorder.distinct.values() if _may_need_more(call)]
    small = [call for call in calls if _is_small(recorder, call)]
    shapes: dict[int, torch.Size] = {}
    outputs: list[int | None] = []
    with allocations(HOST) as meter, without_dispatch_modes(), BelowAutograd():
        for number, call in enumerate(small):
            outputs.append(_try(recorder, meter.around(number), call, shapes))
    untried = [call for call in calls if call not in small]
    for number, (call, made) in enumerate(zip(small, outputs, strict=True)):
        if made is None:
            untried.append(call)
            continue
        _note(recorder, call, max(0, meter.table.get(number, 0) - made))
    for call in untried:
        copied = [spec for spec in call.specs() if not spec.is_matrix()]
        _note(recorder, call, sum(map(_copy_bytes, copied)) if _is_product(call) else 0)
    return sum(len(call.indices) for call in untried)


def _note(recorder: StepRecorder, call: RecordedCall, workspace_bytes: int) -> None:
    for index in call.indices:
        recorder.operators[index].workspace_bytes = workspace_bytes


def _copy_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize if len(spec.shape) > 1 else 0


def _may_need_more(call: RecordedCall) -> bool:
    facts = facts_of(call.operator)
    if facts is None or facts.is_view or call.operator.namespace != "aten":
        return False
    specs = list(call.specs())
    if not all(spec.is_strided() for spec in specs):
        return False
    if _is_product(call):
        # It copies operands that BLAS cannot read; oneDNN repacks bfloat16.
        return any(s.dtype is torch.bfloat16 or not s.is_matrix() for s in specs)
    if not all(spec.is_contiguous() for spec in specs):
        return True
    # An elementwise operator allocates only to convert operands to one layout or dtype;
    # a lookup does not copy its table, which may be the largest tensor of a model.
    is_pointwise = torch.Tag.pointwise in call.operator.tags
    is_uniform = len({spec.dtype for spec in specs}) == 1
    is_lookup = call.operator is torch.ops.aten.embedding.default
    return not ((is_pointwise and is_uniform) or is_lookup)


def _is_product(call: RecordedCall) -> bool:
    return call.operator.name().split(".")[0] in _PRODUCTS


def _is_small(recorder: StepRecorder, call: RecordedCall) -> bool:
    operator, values = recorder.operators[call.indices[0]], recorder.lifetimes.values
    read = _extents(recorder, call)
    made = {v for v in operator.outputs if values[v].storage not in read}
    size = sum(end - start for start, end in read.values())
    size += sum(values[value].bytes for value in made)
    return size <= MOST_BYTES and operator.flops <= MOST_FLOPS


def _extents(recorder: StepRecorder, call: RecordedCall) -> dict[int, tuple[int, int]]:
    """Return which bytes of each storage the arguments of a call take."""
    found: dict[int, tuple[int, int]] = {}
    inputs = recorder.operators[call.indices[0]].inputs
    for spec, value in zip(call.specs(), inputs, strict=False):
        start, end = spec.extent()
        start -= start % ALIGNMENT
        storage = recorder.lifetimes.values[value].storage
        first, last = found.get(storage, (start, end))
        found[storage] = min(start, first), max(end, last)
    return found


def _try(
    recorder: StepRecorder,
    metered: AbstractContextManager[Any],
    call: RecordedCall,
    shapes: dict[int, Any],
) -> int | None:
    """Run a call on zeros; return its output bytes, or `None` if the call fails."""
    operator = recorder.operators[call.indices[0]]
    values, extents = iter(operator.inputs), _extents(recorder, call)
    memory: dict[int, Tensor] = {}

    def zeros(spec: TensorSpec) -> Tensor:
        value = next(values)
        if value in shapes:  # An earlier call has corrected it.
            return torch.zeros(shapes[value], dtype=spec.dtype, device="cpu")
        storage = recorder.lifetimes.values[value].storage
        start, end = extents[storage]
        if storage not in memory:
            memory[storage] = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
        return spec.within(memory[storage], start)

    try:
        args, kwargs = tree_map_only(TensorSpec, zeros, (call.args, call.kwargs))
        known = {t.untyped_storage()._cdata for t in tensors_in_tree((args, kwargs))}
        with metered:
            output = call.operator(*args, **kwargs)
    except Exception:
        return None
    parts = [part for t in tensors_in_tree(output) for part in plain_parts(t)]
    made = [t for t in parts if t.untyped_storage()._cdata not in known]
    for index in call.indices:
        _correct(recorder, recorder.operators[index].outputs, index, made, shapes)
    return storage_bytes(made)


def _correct(
    recorder: StepRecorder,
    outputs: Sequence[int],
    index: int,
    made: Sequence[Tensor],
    shapes: dict[int, Any],
) -> None:
    """Correct recorded outputs whose shape the fake kernel predicted wrongly."""
    for position, tensor in zip(outputs, made, strict=False):
        value = recorder.lifetimes.values[position]
        storage = recorder.lifetimes.storages[value.storage]
        if value.shape != tuple(tensor.shape) and storage.birth == index:
            shapes[position] = tensor.shape
            storage.bytes = tensor.untyped_storage().nbytes()
            recorder.lifetimes.values[position] = replace(
                value, shape=tuple(tensor.shape), bytes=tensor.nbytes
            )
