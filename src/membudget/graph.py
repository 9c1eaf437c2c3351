"""One training step as numbers: operators, the values they read and make, live ranges.

A moment is an op index: the position of an operator in the step. A storage is live from
the operator `birth` that makes it until just before the operator `death`. Storages from
before the step have the birth -1; those that outlive it die at `len(operators)`:

    moment        0      1      2      3      4 = len(operators)
    weight     ══════════════════════════════     birth -1, death 4
    activation        ═══════════════             birth  1, death 3

The records need no torch: planners read them, and files store them.
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
"""Version of the JSON form; rises when an older reader would misread a newer file."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran.

    Attributes:
        name: The overload, such as `"aten.addmm.default"`.
        phase: The phase in which it ran; the loss belongs to the forward.
        module_path: The innermost module whose forward ran; in the backward pass, of
            the forward operator whose gradient it computes.
        line: The user's line, `"file.py:12"`, found the same way.
        inputs: The values that it reads, by index.
        outputs: The values that it makes or overwrites, by index.
        flops: Floating-point operations of matrix products, convolutions and attention,
            a multiply-add counted as two; 0 for everything else.
        read_bytes: Bytes of the values that it reads, each storage once.
        written_bytes: Bytes of the values that it makes or overwrites.
        workspace_bytes: Peak bytes that it allocates in addition to its outputs.
        seconds: Its time, by the cost model of the profile.
        is_view: Whether it moves no data: its outputs share its input's storage.
        is_random: Whether it draws random numbers.
        must_keep: Whether a replay must not run it again, so that its outputs are
            always kept: routing decisions, communication, changes of storage.
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
    """The content of a tensor between two writes.

    Attributes:
        storage: Its storage, by index.
        bytes: Bytes of its elements; a partial view has fewer than its storage.
        shape: Its shape.
        dtype: Its dtype, such as `"float32"`.
        operator: Its producer, by index; -1 if it is from before the step.
        output: Its number among the producer's outputs; arguments that the producer
            overwrites are numbered after them.
    """

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: int
    output: int


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that one or several tensors use.

    Attributes:
        bytes: Its size.
        kind: Its role: `"activation"` is everything made by the step except final
            gradients of parameters and the optimizer's tensors.
        name: Name of the parameter, buffer or input, or of a gradient's parameter.
        birth: The first moment at which it is live; -1 if it is from before the step.
        death: The first moment at which it is no longer live.
        released: The first moment in the forward at which nothing but autograd holds
            it; `None` if something else does until its death or the backward pass.
    """

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int
    released: int | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved for the backward pass.

    Attributes:
        value: The saved value, by index.
        moment: The operator that saved it, by index.
        asked: The moments at which the backward pass unpacked it.
        freed: The first moment at which autograd no longer held it.
        module_path: The innermost module whose forward ran.
        line: The user's line, `"file.py:12"`.
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
        end: One past the last operator; equal to `start` if none ran.
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes in use before the step begins, each storage counted once.

    Attributes:
        parameters: Bytes of parameters, including frozen ones.
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
        """Sum of all four."""
        return self.parameters + self.buffers + self.inputs + self.optimizer


@dataclass(frozen=True)
class StepGraph:
    """One training step.

    Attributes:
        operators: The operators, in order.
        values: The values that operators read and made.
        storages: The storages of the values.
        saved: The tensors that autograd saved, in order.
        calls: The module calls of the forward, in the order in which they began.
        backward_start: The first operator of the backward pass.
        optimizer_start: The first operator of the optimizer's step; the number of
            operators without one.
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

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, by the cost model."""
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
        """Indices into `saved`, by the index of the storage."""
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
            OptionError: If the data has another version, or a field is missing.
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
            raise OptionError(f"the profile is incomplete: {error!r}") from error


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
    """Return the records as columns, so that the file has each field name once."""
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
