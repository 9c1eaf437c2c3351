"""The graph that a recording makes: values, and the operators between them.

A `Value` is the content of a tensor at one moment. It comes from an `Operation`, or it
is a *source*, whose content is held. The graph hangs on the handles that autograd
holds: what no handle needs is gone. Nothing in it points back, so it has no cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from membudget.engine.held import Packed
from membudget.state.bits import Fingerprint
from membudget.state.identity import SavedVersion


class Value:
    """The content of one tensor at one moment.

    Attributes:
        operation: What made it; `None` for a source.
        index: Its place among what the operation makes.
        root: The value of which it is a view; `None` if it is none.
        tensor: The content: for good in a source; otherwise for as long as a backward
            needs it.
        version: The version of a source's content at the end of the region; `None`
            while the region runs, and where nobody else can write it.
        address: Where a source's storage lay then, because `.data =` exchanges it.
        content: Of a source, where it is still to be compared: how its fingerprint is
            taken, and what that was then.
        is_used: Whether anything needs it, so that its content must not be lost.
        is_state: Whether it is a running statistic: a source of which a copy must be
            held, because every call of the region writes its memory anew.
        packed: A source that went through the saved-tensor hooks around the region.
        plan: The number of the plan in which the following are meant.
        uses: How often it is still needed, by handles and by operations.
        view_uses: How often its views are still needed.
        reads: How many operations that compute have yet to read it, or a view of it.
        is_lent: Whether autograd has it, or a view of it.
        is_carried: Whether the stage holds it for others.
    """

    __slots__ = (
        *("__weakref__", "address", "content", "index", "is_carried", "is_lent"),
        *("is_state", "is_used", "operation", "packed", "plan", "reads", "root"),
        *("tensor", "uses", "version", "view_uses"),
    )

    uses: int
    view_uses: int
    reads: int
    is_lent: bool
    is_carried: bool

    def __init__(
        self, operation: Operation | None, index: int = 0, root: Value | None = None
    ):
        """Begin without content."""
        self.operation = operation
        self.index = index
        self.root = root
        self.tensor: Tensor | None = None
        self.packed: Packed | None = None
        self.is_used = False
        self.is_carried = False
        self.is_state = False
        self.plan = 0

    def hold(self, tensor: Tensor) -> None:
        """Make it a source."""
        self.operation = None
        self.root = None
        self.tensor = tensor
        self.version: int | None = None
        self.address: int | None = None
        self.content: tuple[Callable[[Tensor], Fingerprint], Fingerprint] | None = None

    def is_held(self) -> bool:
        """Tell whether the content is there for good."""
        return self.operation is None and self.packed is None


class Operation:
    """One operator that ran in the region.

    Attributes:
        operator: The overload.
        args: Its positional arguments, with values in place of tensors.
        kwargs: Its keyword arguments, likewise.
        number: Its place in the recording.
        call: Its place among the operators that the region ran.
        grad_enabled: The grad mode in which it ran; some kernels ask.
        default_dtype: The dtype that was the default; factories ask.
        decides: Whether it decides something, so that its outputs are kept.
        drawn: For a random operator, its source and where that stood.
        outputs: The values that it makes, held weakly, by their index.
        targets: The values whose memory it writes, each with the index of the value
            that the memory has afterwards; -1 if the memory is held.
        plan: The number of the plan that counts on it.
        is_foreign: Whether its operator may not keep to its schema.
        is_view: Whether it computes nothing: all that it makes lies in its input.
    """

    __slots__ = (
        *("_inputs", "args", "call", "decides", "default_dtype", "drawn"),
        *("grad_enabled", "is_foreign", "is_view", "kwargs", "number", "operator"),
        *("outputs", "plan", "targets"),
    )

    def __init__(
        self,
        operator: Any,
        args: Any,
        kwargs: dict[str, Any],
        number: int,
        grad_enabled: bool,
    ):
        """Note an operator that runs now."""
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.number = number
        self.call = 0
        self._inputs: list[Value] | None = None
        self.grad_enabled = grad_enabled
        self.default_dtype = torch.get_default_dtype()
        self.decides = False
        self.is_foreign = False
        self.drawn: tuple[Any, Any] | None = None
        self.outputs: list[tuple[int, ReferenceType[Value]]] = []
        self.targets: list[tuple[Value, int]] = []
        self.plan = 0
        self.is_view = True

    def output(self, index: int, root: Value | None = None) -> Value:
        """Return a new value that it makes."""
        self.is_view = self.is_view and root is not None
        value = Value(self, index, root)
        self.outputs.append((index, ref(value)))
        return value

    def inputs(self) -> list[Value]:
        """Return the values that it needs: a written argument counts as its root."""
        if self._inputs is None:
            self._inputs = self._find_inputs()
        return self._inputs

    def _find_inputs(self) -> list[Value]:
        written = [root for root, _ in self.targets]
        found = list(written)
        _gather(self.args, found, written)
        if self.kwargs:
            _gather(self.kwargs.values(), found, written)
        return found


def _gather(arguments: Any, found: list[Value], written: list[Value]) -> None:
    for argument in arguments:
        if type(argument) is Value:
            if not written or (argument.root or argument) not in written:
                found.append(argument)
        elif type(argument) is list:
            _gather(argument, found, written)


class ReplayHandle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        value: The tensor's value.
        served: The number of the plan in which autograd last took it.
        stage: The stage of the way back that serves it; -1 where there are none.
        fingerprint: Of the content in the forward, where it is still to be compared.
        saved_version: Tells whether somebody has written the saved tensor since, where
            that is asked.
    """

    __slots__ = (
        "__weakref__",
        "fingerprint",
        "saved_version",
        "served",
        "stage",
        "value",
    )

    value: Value

    def __init__(self) -> None:
        """Begin without a value; it is known soon."""
        self.served = 0
        self.stage = -1
        self.fingerprint: Fingerprint | None = None
        self.saved_version: SavedVersion | None = None


class Scratch:
    """An argument that is written, and whose content before does not matter."""

    __slots__ = ("options", "shape")

    def __init__(self, tensor: Tensor):
        """Note its geometry."""
        self.shape = tensor.shape
        self.options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}


class RecordedMemory:
    """One storage, as the operators of a region write it.

    Attributes:
        root: The value of the whole storage now; `None` while the memory is held by
            reference, so that each tensor in it is a source.
        dtype: Of the root.
        epoch: How often it was written.
        is_external: Whether it lay outside of the region.
        is_state: Whether it did, and the region wrote it: a running statistic.
        sources: The sources that lie in it since it was last written.
    """

    __slots__ = (
        *("__weakref__", "dtype", "epoch", "is_external", "is_state", "root"),
        "sources",
    )

    def __init__(self, root: Value | None, dtype: torch.dtype | None = None):
        """Begin with the first value seen, or with `None` for what lay outside."""
        self.root = root
        self.dtype = dtype
        self.epoch = 0
        self.is_external = root is None
        self.is_state = False
        self.sources: list[ReferenceType[Value]] = []


class LiveStorage(ref[Any]):
    """A storage that is alive.

    Attributes:
        address: Its identity.
        memory: What it holds.
        entries: What is known of the tensors that show it, by their `id`.
    """

    __slots__ = ("address", "entries", "memory")

    address: int
    entries: dict[int, LiveTensor]
    memory: RecordedMemory


class LiveTensor(ref[Tensor]):
    """What is known of a tensor that is alive.

    Attributes:
        key: The tensor's `id`, while it lives.
        value: Its value, at the epoch.
        memory: Its memory.
        epoch: The epoch of the memory at which the value holds.
        address: The identity of its storage: `.data =` exchanges it.
    """

    __slots__ = ("address", "epoch", "key", "memory", "value")

    key: int
    value: Value
    memory: RecordedMemory
    epoch: int
    address: int
