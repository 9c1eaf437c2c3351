"""A plan: the schedule of a step as data, in terms of the model.

A plan names modules, and for each the outputs to keep, by the number of their operator
in the module's call. It is made for one model, identified by its parameters, and states
its predictions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from membudget.errors import PlanError
from membudget.graph import StepGraph
from membudget.planner.choice import Block, Choice, saved_in
from membudget.text import write_whole

VERSION = 2
"""Of the JSON; it rises when an older reader would misread a newer plan."""


@dataclass(frozen=True)
class KeptOutput:
    """An output to keep.

    Attributes:
        number: The operator's number in the module's call, from 1.
        output: Which of its outputs; tensors that it writes in place come after them.
        operator: Its overload, checked against the one that runs.
    """

    number: int
    output: int
    operator: str


@dataclass(frozen=True)
class StagePlan:
    """A part of a region's backward pass; see `planner.choice.Stage`.

    Attributes:
        first_saved: The first saved tensor that it serves, by its number from 0 among
            those that the module's call saves.
        held: The outputs that stay live for stages still to come.
    """

    first_saved: int
    held: tuple[KeptOutput, ...]


@dataclass(frozen=True)
class RegionPlan:
    """What one module keeps.

    Attributes:
        path: The module.
        operators: The number of operators in its call.
        kept: The outputs to keep; others that autograd saved are recomputed.
        stages: The stages of its backward pass; empty for a single one.
    """

    path: str
    operators: int
    kept: tuple[KeptOutput, ...]
    stages: tuple[StagePlan, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What each region of a model keeps, and the predictions.

    Attributes:
        model: The class of the model.
        fingerprint: A hash of its parameters' names, shapes and dtypes.
        budget_bytes: The budget, above what is in use before the step.
        plain_peak_bytes: The peak of the plain step, likewise.
        peak_bytes: The predicted peak, likewise.
        slowdown: The predicted time of a step, relative to the plain one.
        bound: A lower bound on the slowdown of any schedule; see `planner.bound`.
        cost: Where operator times came from.
        regions: The regions, in forward order.
    """

    model: str
    fingerprint: str
    budget_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    slowdown: float
    bound: float
    cost: str
    regions: tuple[RegionPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON; with a path, write it there as well.

        An existing file is replaced only once the new one is complete.

        Raises:
            OptionError: If the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_whole(Path(path), f"{text}\n", "the plan")
        return text

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read what `to_dict` returned.

        Raises:
            PlanError: If the version is another, or a field is missing or of another
                type; the message says which.
        """
        version = _field(data, "version", int, "plan")
        if version != VERSION:
            raise PlanError(
                f"this membudget reads plans of version {VERSION}; this one has "
                f"version {version}"
            )
        plan: Plan = _read(data, cls, "plan")
        return plan

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read a plan from JSON: its text, or the path of a file.

        Raises:
            PlanError: If the file cannot be read, or holds no plan.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            data = json.loads(str(source) if is_text else Path(source).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan cannot be read: {error}") from error
        return cls.from_dict(data)


_FIELDS = {k: get_type_hints(k) for k in (KeptOutput, StagePlan, RegionPlan, Plan)}


def _read(data: Any, kind: Any, where: str) -> Any:
    """Read a record, a tuple of records, or a number or text, from plain data."""
    if kind in _FIELDS:
        fields = _FIELDS[kind].items()
        return kind(*(_field(data, name, of, where) for name, of in fields))
    if get_origin(kind) is tuple:
        if not isinstance(data, list | tuple):
            raise PlanError(f"{where} must be list; it is {data!r:.40}")
        of = get_args(kind)[0]
        return tuple(_read(x, of, f"{where}[{i}]") for i, x in enumerate(data))
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise PlanError(f"{where} must be {kind.__name__}; it is {data!r:.40}")
    if kind is float and not math.isfinite(data):
        raise PlanError(f"{where} must be a finite number; it is {data!r}")
    return data


def _field(data: Any, name: str, kind: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be an object; it is a {type(data).__name__}")
    if name not in data:
        raise PlanError(f"{where}.{name} is missing: the plan is not whole")
    return _read(data[name], kind, f"{where}.{name}")


def region_plan(graph: StepGraph, path: str, choice: Choice) -> RegionPlan:
    """Return a choice in terms of the operators of a module's call.

    A storage is kept as the last operator of the block leaves it that writes it before
    autograd saves some of it. The region holds what is written into it later, too: the
    other parts of a split.
    """
    writers, count = _writers(graph, choice)

    def outputs(storages: Iterable[int]) -> tuple[KeptOutput, ...]:
        found = [writers[s] for s in storages if s in writers]
        return tuple(sorted(found, key=lambda kept: (kept.number, kept.output)))

    first = saved_in(graph, choice).start
    stages = tuple(
        StagePlan(
            saved_in(graph, Block(stage.start, choice.end)).start - first,
            outputs(stage.retained),
        )
        for stage in choice.stages
    )
    return RegionPlan(path, count, outputs(choice.kept), stages)


def _writers(graph: StepGraph, block: Block) -> tuple[dict[int, KeptOutput], int]:
    """Return what makes the content of each storage, and the number of operators.

    Storages without bytes are left out, and those that the engine keeps anyway.
    """
    found: dict[int, KeptOutput] = {}
    saved_from = _saved_from(graph)
    operators = graph.operators[block.start : block.end]
    for number, operator in enumerate(operators, start=1):
        if operator.is_view:
            continue
        for value in (graph.values[index] for index in operator.outputs):
            if saved_from.get(value.storage, block.end) < block.start + number:
                continue
            if operator.must_keep or not graph.storages[value.storage].bytes:
                found.pop(value.storage, None)
            else:
                kept = KeptOutput(number, value.output, operator.name)
                found[value.storage] = kept
    return found, len(operators)


def _saved_from(graph: StepGraph) -> dict[int, int]:
    """Return the first op index at which each storage has content that is saved."""
    found: dict[int, int] = {}
    for saved in graph.saved:
        value = graph.values[saved.value]
        # An operator's inputs are saved before it runs, its outputs afterwards.
        moment = saved.moment + (value.operator == saved.moment)
        if saved.asked:
            found[value.storage] = min(moment, found.get(value.storage, moment))
    return found


def fingerprint_of(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return a hash of the name, shape and dtype of each of a model's parameters.

    Example:
        >>> fingerprint_of([("weight", (2, 3), "float32")])[:8]
        'e4b949cd'
    """
    text = json.dumps([[name, list(shape), dtype] for name, shape, dtype in parameters])
    return hashlib.sha256(text.encode()).hexdigest()
