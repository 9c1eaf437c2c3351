"""Measure memory: the tensors that autograd saves during a call, and their origin.

`peak` measures a call's peak; `formulas` computes the bytes that a transformer saves.

A pack hook runs whenever autograd saves a tensor: the Python stack shows the module and
the user's line, and a `TorchFunctionMode` the function. The pack hook returns the
original tensor, so autograd's graph stays usable. The report counts only tensors that
are still saved when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode, resolve_name

from membudget._torch import storage_address, tree_iter
from membudget.callsite import CallSite, calling_frame
from membudget.errors import ChangedSinceForwardError
from membudget.memory.allocator import DevicePeak
from membudget.memory.peak import Peak, peak, peak_on, storage_bytes
from membudget.state.bits import plain_parts
from membudget.text import dtype_name

__all__ = [
    "DevicePeak",
    "Peak",
    "SavedReport",
    "SavedTensor",
    "peak",
    "peak_on",
    "saved",
    "storage_bytes",
]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd saves.

    Attributes:
        bytes: Size of the tensor's storage, or of all storages of a sparse tensor.
        storage: Identifier of the storage; equal for tensors that share a storage.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, such as `"float32"`.
        module_path: Path of the innermost module that was running; empty if none was.
        operator: Function that saved the tensor, such as `"torch.nn.functional.gelu"`.
        line: Line of the user's code that saved the tensor, such as `"file.py:12"`.
        kind: One of `"parameter"`, `"buffer"`, `"input"` (of the call), `"activation"`.
        is_view: Whether the tensor is a view, or uses only part of its storage.
    """

    bytes: int
    storage: int
    shape: tuple[int, ...]
    dtype: str
    module_path: str
    operator: str
    line: str
    kind: str
    is_view: bool


@dataclass(frozen=True)
class SavedReport:
    """The tensors that autograd saves during a call and retains after the call.

    Every total counts a storage once, under the first saved tensor that uses it.

    Attributes:
        records: The saved tensors, in the order in which autograd saved them.
        result: Return value of the call, with a usable autograd graph.
    """

    records: tuple[SavedTensor, ...]
    result: Any

    @property
    def total_bytes(self) -> int:
        """Total bytes of the saved tensors."""
        return sum(self._by(lambda record: "").values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of saved parameters, which stay live in any case."""
        return self._by(lambda record: record.kind).get("parameter", 0)

    @property
    def input_bytes(self) -> int:
        """Bytes of the call's inputs that autograd saves."""
        return self._by(lambda record: record.kind).get("input", 0)

    @property
    def activation_bytes(self) -> int:
        """Bytes of saved tensors that the call created, which a region could drop."""
        return self._by(lambda record: record.kind).get("activation", 0)

    def by_module(self) -> dict[str, int]:
        """Return the saved bytes of each module path, in execution order."""
        return self._by(lambda record: record.module_path)

    def by_operator(self) -> dict[str, int]:
        """Return the saved bytes of each operator, in execution order."""
        return self._by(lambda record: record.operator)

    def _by(self, key: Callable[[SavedTensor], str]) -> dict[str, int]:
        seen: set[int] = set()
        totals: dict[str, int] = {}
        for record in self.records:
            if record.storage not in seen:
                seen.add(record.storage)
                name = key(record)
                totals[name] = totals.get(name, 0) + record.bytes
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {
            "total_bytes": self.total_bytes,
            "parameter_bytes": self.parameter_bytes,
            "input_bytes": self.input_bytes,
            "activation_bytes": self.activation_bytes,
            "records": [asdict(record) for record in self.records],
        }

    def __str__(self) -> str:
        """Return a table with one row per saved tensor and the total as its title."""
        from membudget.report import Table, page

        table = Table(title=f"saved for backward: {self.total_bytes:,} bytes")
        for column in ("module", "operator", "line", "kind", "shape", "bytes"):
            table.add_column(column, justify="right" if column == "bytes" else "left")
        seen: set[int] = set()
        for record in self.records:
            size = "(shared)" if record.storage in seen else f"{record.bytes:,}"
            seen.add(record.storage)
            kind = f"{record.kind}{' (view)' if record.is_view else ''}"
            shape = f"{record.dtype}{list(record.shape)}"
            table.add_row(
                record.module_path, record.operator, record.line, kind, shape, size
            )
        return page([table], width=120)


def saved(function: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedReport:
    """Call a function and report the tensors that autograd saves.

    Not counted: tensors that a region inside the call drops (inputs that the region
    retains are counted), and tensors that other saved-tensor hooks pack.

    Args:
        function: The function to call. Module paths are relative to the modules among
            the arguments, the function itself, or the object of a bound method.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        The saved tensors, and the function's result.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> report = saved(model, torch.zeros(2, 4))
        >>> [(r.module_path, r.kind, r.bytes) for r in report.records]
        [('0', 'input', 32), ('1', 'activation', 64)]
    """
    recorder = _SavedTensorRecorder(function, args, kwargs)
    with recorder.mode, saved_tensors_hooks(recorder.pack, _unpack):
        result = function(*args, **kwargs)
    return SavedReport(recorder.still_saved(), result)


class _VersionedTensor:
    """A saved tensor with its version counter at the time of saving."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.version = tensor._version


def _unpack(packed: _VersionedTensor) -> Tensor:
    # Saved-tensor hooks disable autograd's check for in-place changes; repeat it here.
    if packed.tensor._version != packed.version:
        raise ChangedSinceForwardError(
            "one of the variables needed for gradient computation has been modified by "
            f"an inplace operation: a tensor of shape {tuple(packed.tensor.shape)}"
        )
    return packed.tensor


class _FunctionName(TorchFunctionMode):
    """Tracks the torch function that the user's code is calling."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outer = self.name
        self.name = resolve_name(func) or getattr(func, "__name__", str(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outer


class _SavedTensorRecorder:
    """Records each tensor that autograd saves during one call."""

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.mode = _FunctionName()
        self.records: list[tuple[ReferenceType[_VersionedTensor], SavedTensor]] = []
        owner = getattr(function, "__self__", function)
        leaves = list(tree_iter((owner, args, kwargs)))
        modules = [leaf for leaf in leaves if isinstance(leaf, Module)]
        self.names = {
            id(module): name
            for root in modules
            for name, module in root.named_modules()
        }
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.kinds = _by_address(inputs, "input")
        for root in modules:
            self.kinds |= _by_address(root.buffers(), "buffer")
            self.kinds |= _by_address(root.parameters(), "parameter")

    def pack(self, tensor: Tensor) -> _VersionedTensor:
        packed = _VersionedTensor(tensor)
        site = CallSite(calling_frame(), self.names)
        address = _address(tensor)
        kind = "parameter" if isinstance(tensor, Parameter) else ""
        size = storage_bytes([tensor])
        record = SavedTensor(
            bytes=size,
            storage=address,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            module_path=site.module_path,
            operator=self.mode.name or site.operator,
            line=site.line,
            kind=kind or self.kinds.get(address, "activation"),
            is_view=tensor._is_view() or tensor.nbytes != size,
        )
        # Only autograd holds `packed`, so a dead reference means a freed tensor.
        self.records.append((ref(packed), record))
        return packed

    def still_saved(self) -> tuple[SavedTensor, ...]:
        return tuple(record for packed, record in self.records if packed() is not None)


def _by_address(tensors: Iterable[Tensor], kind: str) -> dict[int, str]:
    return {_address(tensor): kind for tensor in tensors}


def _address(tensor: Tensor) -> int:
    return storage_address(next(iter(plain_parts(tensor))))
