"""The tape: values, and the operations that compute them.

A `TapeValue` is the content of a tensor at one moment. An `Operation` produces it, or
it is a *source*, whose content is held. Only the handles that autograd stores keep
values alive; a value keeps its operation, and an operation its inputs. References point
from outputs to inputs only, so the tape has no cycles, and parts that no handle needs
are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from membudget.engine.held import Packed
from membudget.state.bits import Fingerprint
from membudget.state.copies import is_plain
from membudget.state.identity import SavedVersion, address_of


class TapeValue:
    """The content of one tensor at one moment.

    Attributes:
        operation: The operation that produced it; `None` for a source.
        index: Its position among the operation's outputs.
        root: For a view, the value that owns the memory; `None` otherwise.
        tensor: The content: permanently for a source, otherwise only while a backward
            pass needs it.
        version: The version of a source's content at the end of the region; `None`
            while the region runs, and where no other code can write it.
        address: The storage of a source at that moment, which `.data =` would exchange;
            `None` where it need not match.
        content: The function that fingerprints a source and its result in the forward,
            until the comparison is done; `None` if contents are not compared.
        is_used: Whether anything reads it, so that its content must survive writes.
        is_state: Whether it is a running statistic, of which a copy is held, because
            every call of the region overwrites it.
        packed: A source that the saved-tensor hooks around the region have packed.
        plan: The number of the plan to which the following counters belong.
        uses: How many handles and operations still need it.
        view_uses: How many uses of its views remain.
        reads: How many operations that compute something have yet to read it or one of
            its views.
        is_lent: Whether autograd has been given it or one of its views.
        is_carried: Whether the current stage keeps it for a later one.
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
        self, operation: Operation | None, index: int = 0, root: TapeValue | None = None
    ):
        """Create a value without content."""
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
        """Turn it into a source that holds `tensor`."""
        self.operation = None
        self.root = None
        self.tensor = tensor
        self.version: int | None = None
        self.address: int | None = None
        self.content: tuple[Callable[[Tensor], Fingerprint], Fingerprint] | None = None

    def is_held(self) -> bool:
        """Tell whether its content is permanently in memory."""
        return self.operation is None and self.packed is None


class Operation:
    """One operator call of the region.

    Attributes:
        operator: The overload.
        args: Its positional arguments, with values in place of tensors.
        kwargs: Its keyword arguments, likewise.
        number: Its position on the tape.
        call: Its number among the operators that the region ran.
        grad_enabled: The grad mode in which it ran, on which some kernels depend.
        default_dtype: The default dtype in which it ran, on which factories depend.
        decides: Whether it makes a decision, so that its outputs are kept.
        drawn: For a random operator, its random source and the state of that source
            before the draw.
        outputs: The values it produced, weakly referenced, by output index.
        targets: The values whose memory it writes, each with the index of the value
            that holds the memory's new content; -1 if the memory is held.
        plan: The number of the last plan that includes it.
        is_foreign: Whether its kernel may violate its schema.
        is_view: Whether all its outputs are views of its input, so that it computes
            nothing.
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
        """Record an operator that is running now."""
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.number = number
        self.call = 0
        self._inputs: list[TapeValue] | None = None
        self.grad_enabled = grad_enabled
        self.default_dtype = torch.get_default_dtype()
        self.decides = False
        self.is_foreign = False
        self.drawn: tuple[Any, Any] | None = None
        self.outputs: list[tuple[int, ReferenceType[TapeValue]]] = []
        self.targets: list[tuple[TapeValue, int]] = []
        self.plan = 0
        self.is_view = True

    def output(self, index: int, root: TapeValue | None = None) -> TapeValue:
        """Return a new value for one of its outputs."""
        self.is_view = self.is_view and root is not None
        value = TapeValue(self, index, root)
        self.outputs.append((index, ref(value)))
        return value

    def inputs(self) -> list[TapeValue]:
        """Return the values it needs; a written argument counts as its root."""
        if self._inputs is None:
            written = [root for root, _ in self.targets]
            self._inputs = found = list(written)
            _gather(self.args, found, written)
            if self.kwargs:
                _gather(self.kwargs.values(), found, written)
        return self._inputs


def _gather(arguments: Any, found: list[TapeValue], written: list[TapeValue]) -> None:
    for argument in arguments:
        if type(argument) is TapeValue:
            if not written or (argument.root or argument) not in written:
                found.append(argument)
        elif type(argument) is list:
            _gather(argument, found, written)


class ReplayHandle:
    """What autograd stores in place of a saved tensor.

    Attributes:
        value: The saved tensor's value.
        served: The number of the plan in which autograd last unpacked it.
        stage: The stage of the backward pass that serves it; -1 without stages.
        fingerprint: The fingerprint of the saved tensor, until the comparison is done.
        saved_version: Tells whether the saved tensor was written after it was saved,
            where that is checked.
    """

    __slots__ = (
        *("__weakref__", "fingerprint", "saved_version", "served", "stage", "value"),
    )

    value: TapeValue

    def __init__(self) -> None:
        """Create a handle; its value is assigned once it is known."""
        self.served = 0
        self.stage = -1
        self.fingerprint: Fingerprint | None = None
        self.saved_version: SavedVersion | None = None


class Scratch:
    """A written argument whose previous content does not matter."""

    __slots__ = ("options", "shape")

    def __init__(self, tensor: Tensor):
        """Note shape, dtype and device."""
        self.shape = tensor.shape
        self.options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}


class RecordedMemory:
    """The write history of one storage, as the region's operators see it.

    Attributes:
        root: The value of the whole storage now; `None` while the memory is held by
            reference, so that each tensor in it is a source.
        dtype: The dtype of the root.
        epoch: How often the storage was written.
        is_external: Whether the storage was created outside the region.
        is_state: Whether it was created outside and the region wrote it, as running
            statistics are.
        sources: The sources in it since the last write.
    """

    __slots__ = (
        *("__weakref__", "dtype", "epoch", "is_external", "is_state", "root"),
        "sources",
    )

    def __init__(self, root: TapeValue | None, dtype: torch.dtype | None = None):
        """Start from the first value in it, or from `None` for memory from outside."""
        self.root = root
        self.dtype = dtype
        self.epoch = 0
        self.is_external = root is None
        self.is_state = False
        self.sources: list[ReferenceType[TapeValue]] = []


class LiveStorage(ref[Any]):
    """A weak reference to a storage, with what is recorded of it.

    Attributes:
        address: The storage's identity.
        memory: Its write history.
        entries: The tensors that view it, by `id`.
    """

    __slots__ = ("address", "entries", "memory")

    address: int
    entries: dict[int, LiveTensor]
    memory: RecordedMemory

    def entry_like(self, tensor: Tensor) -> LiveTensor | None:
        """Return the entry of a tensor that shows the same elements.

        Autograd saves detached aliases, and `detach` is not observed.
        """
        if not is_plain(tensor):
            return None
        geometry = _geometry(tensor)
        found = None
        for entry in list(self.entries.values()):
            other = entry()
            if (
                other is not None
                and is_plain(other)
                and _geometry(other) == geometry
                and address_of(other) == self.address
            ):
                found = entry
                if entry.epoch == entry.memory.epoch:
                    break
        return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class LiveTensor(ref[Tensor]):
    """A weak reference to a tensor, with what is recorded of it.

    Attributes:
        key: The tensor's `id`.
        value: The tensor's value, valid while `epoch` is the memory's.
        memory: The write history of its storage.
        epoch: The memory's epoch for which `value` is valid.
        address: The identity of its storage, which `.data =` exchanges.
    """

    __slots__ = ("address", "epoch", "key", "memory", "value")

    key: int
    value: TapeValue
    memory: RecordedMemory
    epoch: int
    address: int
