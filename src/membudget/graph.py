"""One training step as numbers: what ran, what it made, how long each thing lived.

A moment is the index of an operator. A storage is alive from the moment `birth`, in
which an operator made it, up to the moment before `death`. Storages that were there
before the step have the birth -1; what outlives the step dies at `len(operators)`.

These records know nothing of torch: planners read them, and files hold them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from membudget.errors import OptionError

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal[
    "parameter", "buffer", "input", "outside", "activation", "gradient", "optimizer"
]

VERSION = 1
"""Of the JSON form; it rises when an older reader would misread a newer file."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran.

    Attributes:
        name: The overload, such as `"aten.addmm.default"`.
        phase: In which part of the step it ran; the loss belongs to the forward.
        module_path: The innermost module whose forward ran; in the backward, that of
            the forward operator whose gradient is computed.
        line: The user's line, `"file.py:12"`, likewise.
        inputs: The values that it reads, by index.
        outputs: The values that it makes, or writes anew, by index.
        flops: Floating-point operations of matrix products, convolutions and
            attention, a product and a sum counted as two; 0 for everything else.
        read_bytes: Bytes of the values that it reads, each storage once.
        written_bytes: Bytes of the values that it makes or writes.
        workspace_bytes: What it allocates beside its outputs while it runs.
        seconds: What it takes, by the cost model that the profile was made with.
        is_view: Whether it moves no data: its outputs lie where its input does.
        is_random: Whether it draws random numbers.
        must_keep: Whether a replay cannot or must not run it again, so that what it
            makes is always kept: routing decisions, communication, changes of storage.
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
    """The content of a tensor at a moment.

    Attributes:
        storage: The storage that it lies in, by index.
        bytes: Of its elements; a view of a part has fewer than its storage.
        shape: Its shape.
        dtype: Its dtype, such as `"float32"`.
        operator: What made it, by index; -1 if it was there before.
        output: Which output of the operator it is; what is written comes after them.
    """

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: int
    output: int


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that tensors share.

    Attributes:
        bytes: Its size.
        kind: What it is: `"activation"` is whatever the step made that is neither a
            parameter's final gradient nor the optimizer's.
        name: Of a parameter, buffer, input or gradient: whose it is.
        birth: The first moment at which it is alive; -1 if it was there before.
        death: The first moment at which it is alive no more.
        released: The first moment in the forward at which nothing but autograd held it;
            `None` if something else did until its death, or until the backward.
    """

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int
    released: int | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd kept for the backward.

    Attributes:
        value: What was kept, by index.
        moment: The operator that kept it, by index.
        asked: The moments at which the backward asked for it.
        freed: The first moment at which autograd held it no more.
        module_path: The innermost module whose forward ran.
        line: The user's line.
    """

    value: int
    moment: int
    asked: tuple[int, ...]
    freed: int
    module_path: str
    line: str


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in the forward.

    Attributes:
        path: The module, as in `named_modules()`.
        start: The first operator that ran in it.
        end: The first after them; equal to `start` if none ran.
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """What is there in every step, each storage counted once.

    Attributes:
        parameters: Bytes of parameters, frozen ones too.
        buffers: Bytes of buffers.
        inputs: Bytes of the batch.
        optimizer: Bytes of the optimizer's state after its first step.
    """

    parameters: int
    buffers: int
    inputs: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.buffers + self.inputs + self.optimizer


@dataclass(frozen=True)
class StepGraph:
    """One training step.

    Attributes:
        operators: What ran, in order.
        values: The contents that operators read and made.
        storages: The memory that those lie in.
        saved: What autograd kept, in the order in which it was kept.
        calls: The calls of modules in the forward, in the order in which they began.
        backward_start: The moment at which the backward began.
        optimizer_start: The moment at which the optimizer's step began; the number of
            operators if none ran.
        static: What is there in every step.
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
        """Of the whole step."""
        return sum(operator.flops for operator in self.operators)

    @property
    def seconds(self) -> float:
        """Of the whole step, by the cost model."""
        return sum(operator.seconds for operator in self.operators)

    @cached_property
    def born_at(self) -> dict[int, list[int]]:
        """The storages that each operator makes, by its index."""
        table: dict[int, list[int]] = {}
        for index, storage in enumerate(self.storages):
            if storage.birth >= 0:
                table.setdefault(storage.birth, []).append(index)
        return table

    @cached_property
    def saved_on(self) -> dict[int, list[int]]:
        """What autograd kept in each storage, by the storage's index."""
        table: dict[int, list[int]] = {}
        for index, saved in enumerate(self.saved):
            table.setdefault(self.values[saved.value].storage, []).append(index)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON: a table for each kind of record."""
        return {
            "version": VERSION,
            "backward_start": self.backward_start,
            "optimizer_start": self.optimizer_start,
            "static": dataclasses.asdict(self.static),
            **{name: _to_table(getattr(self, name), kind) for name, kind in _TABLES},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepGraph:
        """Read what `to_dict` returned.

        Raises:
            OptionError: If the data is of a newer version, or not whole.
        """
        version = data.get("version")
        if version != VERSION:
            raise OptionError(
                f"this membudget reads profiles of version {VERSION}; the data has "
                f"version {version!r}"
            )
        try:
            tables = {name: _from_table(data[name], kind) for name, kind in _TABLES}
            return cls(
                backward_start=int(data["backward_start"]),
                optimizer_start=int(data["optimizer_start"]),
                static=StaticBytes(**data["static"]),
                **tables,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f"the profile is not whole: {error!r}") from error


_COLUMNS = {"must_keep": "is_pinned"}
"""Names in files of version 1, where they differ."""

_TABLES: tuple[tuple[str, type], ...] = (
    ("operators", Operator),
    ("values", Value),
    ("storages", Storage),
    ("saved", Saved),
    ("calls", ModuleCall),
)


def _to_table(records: tuple[Any, ...], kind: type) -> dict[str, Any]:
    """Return the records by columns: a name for each field stands once in the file."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        _COLUMNS.get(name, name): [getattr(record, name) for record in records]
        for name in names
    }


def _from_table(table: Mapping[str, Any], kind: Any) -> tuple[Any, ...]:
    names = [field.name for field in dataclasses.fields(kind)]
    columns = [map(_tuples, table[_COLUMNS.get(name, name)]) for name in names]
    return tuple(kind(*row) for row in zip(*columns, strict=True))


def _tuples(cell: Any) -> Any:
    return tuple(cell) if isinstance(cell, list) else cell
