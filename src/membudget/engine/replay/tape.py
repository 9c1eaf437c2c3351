"""The tape of a region's forward: values, and the operations that compute them.

A `TapeValue` is the content of a tensor between two writes: either the output of an
`Operation`, or a *source*, which stays in memory. Only the handles in the autograd
graph keep values alive. A value references its operation, and that its inputs, never
the reverse: the tape has no cycles, and operations that no handle needs are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from membudget._torch_accelerator import stream_of
from membudget.engine.held import Packed
from membudget.engine.replay.offloaded import Offloaded
from membudget.offload import Offload
from membudget.state.bits import Fingerprint
from membudget.state.identity import SavedVersion


class TapeValue:
    """The content of one tensor between two in-place writes.

    Attributes:
        operation: The operation that recomputes the value; `None` for a stored value.
        index: Position of the value among the operation's outputs.
        root: For a view, the value that owns the memory; `None` otherwise.
        tensor: The tensor with this content; `None` while dropped.
        version: Version counter of a stored tensor at the end of the forward; `None`
            before that, and for tensors that are packed.
        address: Storage address of a stored tensor, compared to detect a new `.data`;
            `None` if the address may change.
        content: A function that fingerprints a stored tensor, and the fingerprint from
            the forward; `None` once compared, or if contents are never compared.
        is_used: Whether a replay may read the value itself, not only views of it.
        is_needed: Whether a replay may read the value or views; writes preserve that.
        is_state: Whether it is a running statistic, copied because each call writes it.
        is_input: Whether it is a tensor from outside the region.
        packed: The stored tensor, if hooks around the region or a policy moved it.
        plan: Index of the replay plan for which uses of the value were counted.
        uses: Number of handles and operations that still need the value.
        view_uses: Number of remaining uses of the value's views.
        reads: Number of operations, other than views, that have yet to read the value
            or a view of the value.
        views: Weak references to the value's views, in the order of their operations;
            `None` before the first.
        sharing: All values whose tensors may be in the value's memory, if others are.
        is_carried: Whether the current stage retains the value for a later stage.
    """

    __slots__ = (
        *("__weakref__", "address", "content", "index", "is_carried", "is_input"),
        *("is_needed", "is_state", "is_used", "operation", "packed", "plan", "reads"),
        *("root", "sharing", "tensor", "uses", "version", "view_uses", "views"),
    )

    uses: int
    view_uses: int
    reads: int

    def __init__(
        self, operation: Operation | None, index: int = 0, root: TapeValue | None = None
    ):
        """Create a tape value that has no tensor yet."""
        self.operation = operation
        self.index = index
        self.root = root
        self.tensor: Tensor | None = None
        self.packed: Packed | Offloaded | None = None
        self.is_used = self.is_needed = False
        self.is_carried = self.is_input = self.is_state = False
        self.views: list[ReferenceType[TapeValue]] | None = None
        self.sharing: WeakSet[TapeValue] | None = None
        self.plan = 0

    def hold(self, tensor: Tensor) -> None:
        """Store `tensor` as the value's content, so that it is not recomputed."""
        self.operation = None
        self.root = None
        self.tensor = tensor
        self.version: int | None = None
        self.address: int | None = None
        self.content: tuple[Callable[[Tensor], Fingerprint], Fingerprint] | None = None

    def add_view(self, view: ReferenceType[TapeValue]) -> None:
        """Note a view, of an operation after those of the views before it."""
        if self.views is None:
            self.views = []
        self.views.append(view)

    def offload(self, by: Offload, stream: Any) -> None:
        """Let `by` hold the stored tensor, if it moves that.

        A replay reads it on the stream of its region, or on one of the tensor's device.
        """
        assert self.tensor is not None, "it is held"
        device, held = self.tensor.device, by.hold(self.tensor)
        if held is not None:
            if stream is not None and stream.device_index != device.index:
                stream = stream_of(device)
            self.packed, self.tensor = Offloaded(held, stream), None

    def is_held(self) -> bool:
        """Return whether the value's tensor is stored, neither packed nor offloaded."""
        return self.operation is None and self.packed is None


class Operation:
    """One recorded operator call.

    Attributes:
        operator: The operator overload.
        native: The arguments, kept in C++; `None` if recorded in Python.
        number: Position of the operation on the tape.
        call: Index of the operator call within the region, counted from 1; 0 for view
            operators that the engine re-applied.
        grad_enabled: Grad mode in the forward, which some kernels depend on.
        default_dtype: Default dtype in the forward, used by factory functions.
        decides: Whether to keep all outputs, because a recompute could select a
            different index or branch.
        drawn: For a random operator, the generator and its state before the draw.
        stream: The stream on which it ran; `None` for the one of the region's begin.
        outputs: Weak references to the produced values.
        targets: Each value that it overwrites, with the output index of the content;
            -1 if a replay does not recompute that.
        plan: Index of the last replay plan that includes the operation.
        is_foreign: Whether the operator is custom and so may violate its schema.
        is_view: Whether all outputs are views, so that a replay launches no kernel.
    """

    __slots__ = (
        *("_args", "_inputs", "_kwargs", "call", "decides", "default_dtype", "drawn"),
        *("grad_enabled", "is_foreign", "is_view", "native", "number", "operator"),
        *("outputs", "plan", "stream", "targets"),
    )

    def __init__(
        self,
        operator: Any,
        args: Any,
        kwargs: dict[str, Any],
        number: int,
        grad_enabled: bool,
    ):
        """Record an operator call and the current default dtype."""
        self.operator = operator
        self._args = args
        self._kwargs = kwargs
        self.native: Any = None
        self.number = number
        self.call = self.plan = 0
        self._inputs: list[TapeValue] | None = None
        self.grad_enabled = grad_enabled
        self.default_dtype = torch.get_default_dtype()
        self.decides = self.is_foreign = False
        self.drawn: tuple[Any, Any] | None = None
        self.stream: Any = None
        self.outputs: list[ReferenceType[TapeValue]] = []
        self.targets: Sequence[tuple[TapeValue, int]] = ()
        self.is_view = True  # Until an output with memory of its own is added.

    def output(self, index: int, root: TapeValue | None = None) -> TapeValue:
        """Create the tape value for one of the operation's outputs."""
        self.is_view = self.is_view and root is not None
        value = TapeValue(self, index, root)
        self.outputs.append(reference := ref(value))
        if root is not None:
            root.add_view(reference)
        return value

    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, by position and by name, with values for tensors."""
        if self._args is None:
            self._args, self._kwargs = self.native.arguments(self._inputs)
        return self._args, self._kwargs

    @property
    def args(self) -> Any:
        """Positional arguments, with tape values in place of tensors."""
        return self.arguments()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments, with tape values in place of tensors."""
        return self.arguments()[1]

    def inputs(self) -> list[TapeValue]:
        """Return the values read, and the storage's value for each written argument."""
        found = self._inputs
        if found is None:
            written = [root for root, _ in self.targets] if self.targets else []
            self._inputs = found = list(written)
            args, kwargs = self.arguments()
            _gather(args, found, written)
            if kwargs:
                _gather(kwargs.values(), found, written)
        return found


def _gather(arguments: Any, found: list[TapeValue], written: list[TapeValue]) -> None:
    for argument in arguments:
        if type(argument) is TapeValue:
            if not written or (argument.root or argument) not in written:
                found.append(argument)
        elif type(argument) is list:
            _gather(argument, found, written)


class ReplayHandle:
    """The placeholder that autograd stores instead of a saved tensor.

    Attributes:
        value: The saved tensor's value on the tape.
        served: Index of the replay plan that last supplied the handle's tensor.
        stage: Stage of the backward pass that unpacks the handle; -1 without stages.
        fingerprint: Fingerprint of the saved tensor, if taken and not yet compared.
        saved_version: Detects writes after the tensor was saved; `None` if unused.
    """

    __slots__ = (
        *("__weakref__", "fingerprint", "saved_version", "served", "stage", "value"),
    )

    value: TapeValue

    def __init__(self) -> None:
        """Create a handle; the recorder assigns `value`, its tape value, later."""
        self.served = 0
        self.stage = -1
        self.fingerprint: Fingerprint | None = None
        self.saved_version: SavedVersion | None = None
