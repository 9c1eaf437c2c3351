"""The recorder observes a region's operators and writes them to the tape.

It sits below autograd and autocast: it runs each operator on what the backend receives,
and records which values each output depends on.

Four kinds of tensors become *sources*, which stay in memory: tensors from outside the
region, outputs that the policy keeps, outputs of operators that cannot run again, and
memory filled by unobserved code (`torch.empty` filled by NumPy).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from membudget._torch import is_fake, is_fake_mode_active
from membudget.engine.replay.aliasing import AS_STRIDED, EMPTY, is_empty
from membudget.engine.replay.execute import FAULTY
from membudget.engine.replay.fingerprinted import Fingerprinter
from membudget.engine.replay.forward_record import ForwardRecord
from membudget.engine.replay.tape import ReplayHandle
from membudget.engine.replay.writes import run_in_place, run_special, written_by
from membudget.observer import Observer, observers
from membudget.ops import OperatorFacts, facts_of, flat_outputs
from membudget.state.identity import address_of


class Recorder(Observer):
    """Records one forward of a region.

    Attributes:
        recording: The record of the forward, filled by the recorder.
        is_suspended: Whether operators run unrecorded, like the engine's own operators.
        opaque_depth: The nesting depth of `opaque()` blocks.
        fingerprinter: Object that fingerprints dropped tensors; `None` if not in use.
    """

    __slots__ = ("_late", "fingerprinter", "is_suspended", "opaque_depth", "recording")

    def __init__(self, recording: ForwardRecord):
        """Create a recorder that fills the forward record `recording`."""
        self.recording = recording
        self.is_suspended = False
        self.opaque_depth = 0
        self.fingerprinter: Fingerprinter | None = None
        self._late: list[tuple[ReplayHandle, Tensor]] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and record it."""
        if self.is_suspended:
            return operator(*args, **kwargs)
        if self.fingerprinter is not None:
            # Before the operator runs, to free memory before it allocates.
            self.fingerprinter.take_ready()
        if self._late:
            return self._run_and_settle(operator, args, kwargs)
        facts = facts_of(operator)
        if facts is not None and facts.is_query:
            return operator(*args, **kwargs)
        if (recording := self.recording).trip is not None:
            recording.leave_route()
        if facts is None or facts.is_numbered:
            recording.advance(facts, operator)
        if facts is None or facts.is_opaque or self.opaque_depth:
            return self._run_opaque(operator, facts, args, kwargs)
        if not facts.is_simple:
            return self._run_by_kind(operator, facts, args, kwargs)
        recorded = list(args)
        addresses = recording.record_tensors(facts.tensors, recorded)
        output = operator(*args, **kwargs) if kwargs else operator(*args)
        operation = recording.operation(operator, recorded, kwargs)
        if type(output) is Tensor and (address := address_of(output)) not in addresses:
            recording.note_fresh(operation, facts, args, output, 0, address)
            return output
        recording.note_outputs(operation, facts, args, output, addresses)
        return output

    def _run_by_kind(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if facts.is_plain_view:
            return self._run_view(func, facts, args, kwargs)
        if facts.is_foreign and func in FAULTY:
            return self._run_opaque(func, facts, args, kwargs)
        if facts.is_in_place:
            return run_in_place(self.recording, func, facts, args, kwargs)
        if facts.is_empty:
            self.note_empty(output := func(*args, **kwargs))
            return output
        return run_special(self.recording, func, facts, args, kwargs)

    def handle(self, tensor: Tensor) -> ReplayHandle:
        """Return the handle that autograd stores for a saved tensor."""
        handle, tracker = ReplayHandle(), self.recording.tracker
        entry = tracker.entry(tensor)
        is_strided = tensor.is_nested and tensor.layout is not torch.jagged
        if is_strided and entry.value.operation is not None:
            # It cannot be compared: torch exposes none of its sizes.
            tracker.hold_value(tensor, entry)
        if is_empty(entry.value):
            # Either the saving operator will fill it (RReLU its noise), or code that
            # cannot be observed has done so.
            self._late.append((handle, tensor))
        else:
            handle.value = tracker.mark_read(tensor, entry)
        return handle

    def settle(self) -> None:
        """Assign tape values to tensors that were saved before they were filled."""
        late, self._late = self._late, []
        for handle, tensor in late:
            handle.value = self.recording.tracker.read(tensor)

    def finish(self) -> None:
        """Stop recording, and assign tape values to the tensors saved last."""
        self.__exit__(None, None, None)
        self.recording.recent.clear()
        self.settle()
        if self.fingerprinter is not None:
            self.fingerprinter.take_all()

    def _run_and_settle(self, operator: Any, args: Any, kwargs: Any) -> Any:
        late, self._late = self._late, []
        output = self.observe(operator, args, kwargs)
        self._late += late
        self.settle()
        return output

    # Calls by code inside the region.

    def name(self, tensor: Tensor, label: str) -> None:
        """Keep a tensor if the policy selects its label."""
        if answer := self.recording.policy.keeps_name(label):
            with self.suspended():
                entry = self.recording.tracker.entry(tensor)
                if entry.value.operation is not None:
                    self.recording.hold(tensor, entry, answer)

    def begin_opaque(self, written: Sequence[Tensor]) -> None:
        """Enter an opaque block, in which all operator outputs are kept."""
        self.opaque_depth += 1
        with self.suspended():
            self.recording.tracker.before_write(written, False)

    def end_opaque(self, written: Sequence[Tensor]) -> None:
        """Leave an opaque block, and keep the tensors that it wrote."""
        self.opaque_depth -= 1
        with self.suspended():
            for tensor in written:
                self.recording.hold_written(tensor)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run operators inside a `with` block without recording them."""
        self.recording.leave_route()
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    # Operators that need their own recording.

    def _run_view(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run and record a view operator, whose outputs share memory with its input."""
        tracker = self.recording.tracker
        entry = tracker.entry(args[0])
        if not entry.address:
            # A component's storage does not show which sparse tensor it belongs to.
            tracker.hold_memory(args[0], entry)
            output = func(*args, **kwargs)
            self._hold_outputs(output)
            return output
        output = func(*args, **kwargs)
        if func is AS_STRIDED and entry.memory.root is None:
            # `as_strided` counts from the start of the storage, and saved-tensor hooks
            # around the region may return a source in another storage. So its result is
            # a source, too.
            return output
        value, address = entry.value, entry.address
        operation = self.recording.operation(func, [value, *args[1:]], kwargs)
        if type(output) is Tensor and address_of(output) == address and address:
            if id(output) not in tracker.table:
                made = operation.output(0, value.root or value)
                tracker.enter(output, made, entry.memory, address)
            return output
        self.recording.note_outputs(operation, facts, args, output, (address,))
        return output

    def note_empty(self, output: Any) -> None:
        """Record uninitialised memory by its geometry."""
        is_plain = type(output) is Tensor or (is_fake(output) and is_fake_mode_active())
        if not is_plain or output.layout is not torch.strided:
            self._hold_outputs(output)
        elif id(output) not in self.recording.tracker.table:
            options = {"dtype": output.dtype, "device": output.device}
            geometry = [output.shape, output.stride()]
            value = self.recording.operation(EMPTY, geometry, options).output(0)
            self.recording.tracker.enter_fresh(output, value, address_of(output))

    def _run_opaque(
        self, func: Any, facts: OperatorFacts | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that cannot be replayed; keep outputs and written tensors."""
        written = [] if facts is None else list(written_by(facts, args, kwargs))
        if facts is not None and facts.is_gather:
            self._hold_living()
        self.recording.tracker.before_write(written, False)
        output = func(*args, **kwargs)
        for tensor in written:
            self.recording.hold_written(tensor)
        self._hold_outputs(output)
        return output

    def _hold_living(self) -> None:
        """Keep every live tensor, so that no replay needs operators before this point.

        FSDP gathers one layer's parameters and frees those of earlier layers. In the
        backward pass, too, FSDP gathers only one layer's parameters at a time.
        """
        tracker = self.recording.tracker
        for entry in list(tracker.table.values()):
            tensor = entry()
            if tensor is not None and entry.value.operation is not None:
                entry = tracker.entry(tensor)
                if not is_empty(entry.value) and entry.value.operation is not None:
                    tracker.hold_value(tensor, entry)

    def _hold_outputs(self, output: Any) -> None:
        tracker = self.recording.tracker
        for item in flat_outputs(output):
            if isinstance(item, Tensor) and id(item) not in tracker.table:
                tracker.meet(item, None)


def _recorders() -> list[Recorder]:
    return [o for o in observers() if isinstance(o, Recorder)]


def name(tensor: Tensor, label: str) -> Tensor:
    """Name a tensor, so that a policy can keep it.

    Outside a replay region, this function just returns `tensor`.

    Args:
        tensor: The tensor to name.
        label: The name, which `membudget.policies.named(label)` selects.

    Returns:
        The argument `tensor`, unchanged.

    Example:
        >>> import membudget as mb, torch
        >>> def block(x):
        ...     h = mb.name(x.sin(), "h")
        ...     return h.exp() * h.cos()
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mb.checkpoint(block, x, keep=mb.policies.named("h"))
    """
    for recorder in _recorders():
        recorder.name(tensor, label)
    return tensor


@contextmanager
def opaque(*written: Tensor) -> Iterator[None]:
    """Mark code that writes to tensors without going through the dispatcher.

    Use this context manager around raw Triton kernels, ctypes, or NumPy on shared
    memory. The tensors in `written` and all operator outputs in the block are kept.

    Args:
        *written: Tensors that the code writes to.

    Example:
        >>> import membudget as mb, torch
        >>> def halves(x):
        ...     out = torch.zeros_like(x)
        ...     with mb.opaque(out):
        ...         out.numpy()[:] = x.detach().numpy() / 2
        ...     return x * out
        >>> x = torch.ones(3, requires_grad=True)
        >>> mb.checkpoint(halves, x, engine="replay").sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000, 0.5000])
    """
    recorders = _recorders()
    for recorder in recorders:
        recorder.begin_opaque(written)
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.end_opaque(written)
