"""One training step as plain data: operators, their values, and storage live ranges.

The records contain no torch objects, so that they can be stored in files. Time is
counted in op indices: positions of operators in the step. A storage is live from op
index `birth`, at which it is allocated, until just before op index `death`. One from
before the step has birth -1; one that outlives it has death `len(operators)`:

    op index      0      1      2      3      4 = len(operators)
    weight     ══════════════════════════════     birth -1, death 4
    activation        ═══════════════             birth  1, death 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from membudget.columns import from_table, to_table
from membudget.errors import OptionError

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal[
    "parameter", "buffer", "input", "outside", "activation", "gradient", "optimizer"
]

VERSION = 1
"""Version of the JSON form; raised when older readers would misread newer files."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One executed operator.

    Attributes:
        name: Name of the overload, such as `"aten.addmm.default"`.
        phase: Phase in which the operator ran; the loss belongs to the forward.
        module_path: Innermost running module; for a backward operator, the module of
            the forward operator that it differentiates.
        line: Line of user code, such as `"file.py:12"`, of the same operator.
        inputs: Indices of the values that the operator reads.
        outputs: Indices of the values that the operator creates or overwrites.
        flops: Floating-point operations of matrix products, convolutions and attention,
            with a multiply-add counted as two; 0 for all other operators.
        read_bytes: Bytes of the values read, with each storage counted once.
        written_bytes: Bytes of the values created or overwritten.
        workspace_bytes: Peak bytes allocated in addition to the outputs.
        seconds: Execution time according to the profile's cost model.
        is_view: Whether the outputs alias the input, so that no data is moved.
        is_random: Whether the operator draws random numbers.
        must_keep: Whether the outputs are always kept because the operator makes a
            routing decision, communicates, or changes a tensor's storage or strides.
    """

    name: str
    phase: Phase
    module_path: str
    line: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    read_bytes: int
    written_bytes: int
    workspace_bytes: int
    seconds: float
    is_view: bool
    is_random: bool
    must_keep: bool


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of a tensor between two writes.

    Attributes:
        storage: Index of the value's storage.
        bytes: Bytes of the elements; fewer than the storage's if the tensor is a slice.
        shape: Shape of the tensor.
        dtype: Data type of the elements, such as `"float32"`.
        operator: Op index of the producing operator; -1 if the value predates the step.
        output: Index among that operator's outputs; arguments it overwrites come after.
    """

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: int
    output: int


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that one or more tensors use.

    Attributes:
        bytes: Size in bytes.
        kind: Role of the storage; `"activation"` is all that the step creates, except
            final parameter gradients and optimizer tensors. `"outside"` is other memory
            from before the step; with a birth, the step allocates it again, as FSDP.
        name: Name of the parameter, buffer or input; for a gradient, of its parameter.
        birth: First op index at which the storage is live; -1 if it predates the step.
        death: First op index at which the storage is no longer live.
        released: First op index in the forward at which only autograd references the
            storage; `None` if other references last until its death or the backward.
    """

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int
    released: int | None

    @property
    def released_or_dead(self) -> int:
        """First op index at which at most autograd references the storage."""
        return self.death if self.released is None else self.released


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved for the backward pass.

    Attributes:
        value: Index of the saved value.
        moment: Op index of the operator that saved the tensor.
        asked: Op indices at which the backward pass unpacked the tensor.
        freed: First op index at which autograd no longer held the tensor.
        module_path: Innermost module whose forward saved the tensor.
        line: User's source line that saved the tensor, as `"file.py:12"`.
    """

    value: int
    moment: int
    asked: tuple[int, ...]
    freed: int
    module_path: str
    line: str


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in the forward pass.

    Attributes:
        path: Name of the module, as in `named_modules()`.
        start: Op index of the first operator of the call.
        end: Op index one past the last operator; equal to `start` if no operator ran.
        inputs: Values of the tensors among the positional arguments.
    """

    path: str
    start: int
    end: int
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes in use before the step begins, each storage counted once.

    Attributes:
        parameters: Bytes of parameters, including frozen ones.
        buffers: Bytes of the model's buffers.
        inputs: Bytes of the batch.
        optimizer: Bytes of the optimizer's state after its first step.
    """

    parameters: int
    buffers: int
    inputs: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of parameters, buffers, inputs and optimizer state together."""
        return self.parameters + self.buffers + self.inputs + self.optimizer


@dataclass(frozen=True)
class StepGraph:
    """One recorded training step.

    Attributes:
        operators: Operators, in execution order.
        values: Values that the operators read, created or overwrote.
        storages: Storages that hold the values.
        saved: Tensors that autograd saved, in order of saving.
        calls: Module calls of the forward pass, in the order in which they began.
        backward_start: Op index of the first operator of the backward pass.
        optimizer_start: Op index of the first operator of the optimizer's step;
            `len(operators)` without an optimizer.
        static: Bytes in use before the step.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    saved: tuple[Saved, ...]
    calls: tuple[ModuleCall, ...]
    backward_start: int
    optimizer_start: int
    static: StaticBytes

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return sum(operator.flops for operator in self.operators)

    @cached_property
    def seconds(self) -> float:
        """Execution time of the whole step, according to the profile's cost model."""
        return sum(operator.seconds for operator in self.operators)

    @cached_property
    def born_at(self) -> dict[int, list[int]]:
        """Indices of the storages that each operator allocates, keyed by op index."""
        table: dict[int, list[int]] = {}
        for index, storage in enumerate(self.storages):
            if storage.birth >= 0:
                table.setdefault(storage.birth, []).append(index)
        return table

    @cached_property
    def saved_on(self) -> dict[int, list[int]]:
        """Indices of saved tensors that use each storage, keyed by storage index."""
        table: dict[int, list[int]] = {}
        for index, saved in enumerate(self.saved):
            table.setdefault(self.values[saved.value].storage, []).append(index)
        return table

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Storages of each operator's inputs, each once."""
        return [self._storages(operator.inputs) for operator in self.operators]

    @cached_property
    def writes(self) -> list[tuple[int, ...]]:
        """Storages of each operator's outputs, each once."""
        return [self._storages(operator.outputs) for operator in self.operators]

    @cached_property
    def last_write(self) -> dict[int, int]:
        """Op index of the last write to each storage in the forward."""
        forward = enumerate(self.operators[: self.backward_start])
        return {s: i for i, o in forward if not o.is_view for s in self.writes[i]}

    @cached_property
    def known(self) -> dict[str, dict[Hashable, Any]]:
        """What was found of the step's blocks, by function; see `planner.choice`."""
        return {}

    def _storages(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.values[value].storage for value in values))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data, with one table per kind of record."""
        return {
            "version": VERSION,
            "backward_start": self.backward_start,
            "optimizer_start": self.optimizer_start,
            "static": dataclasses.asdict(self.static),
            **{name: to_table(getattr(self, name), kind) for name, kind in _TABLES},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepGraph:
        """Rebuild a graph from data that `to_dict` returned.

        Raises:
            OptionError: If the version is unsupported, or a field missing or wrong.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            text = f"this membudget reads profiles of version {VERSION}; the data has"
            raise OptionError(f"{text} version {version!r}")
        try:
            calls = data["calls"]  # Older files lack what they were called with.
            data = {**data, "calls": {"inputs": [()] * len(calls["path"]), **calls}}
            tables = {name: from_table(data[name], kind) for name, kind in _TABLES}
            return cls(
                backward_start=int(data["backward_start"]),
                optimizer_start=int(data["optimizer_start"]),
                static=StaticBytes(**data["static"]),
                **tables,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"the profile is incomplete: {error!r}") from error


_TABLES: tuple[tuple[str, type], ...] = (
    ("operators", Operator),
    ("values", Value),
    ("storages", Storage),
    ("saved", Saved),
    ("calls", ModuleCall),
)
