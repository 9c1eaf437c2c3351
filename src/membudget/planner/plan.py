"""Plans: schedules as JSON data, in terms of a model's modules and operators.

A plan lists modules and, for each module, the outputs to keep; an output is named by
its operator's number within the module's call. A plan is valid for one model,
identified by its parameters, and includes the predicted peak and slowdown.
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
"""Version of the JSON; it rises when an older reader would misread a newer plan."""


@dataclass(frozen=True)
class KeptOutput:
    """One operator output to keep.

    Attributes:
        number: The operator's position within the module's call, counted from 1.
        output: Index of the output; tensors that the operator writes in place are
            numbered after its outputs.
        operator: Name of the operator's overload; must match the operator that runs.
    """

    number: int
    output: int
    operator: str


@dataclass(frozen=True)
class StagePlan:
    """One stage of a region's backward pass; see `planner.choice.Stage`.

    Attributes:
        first_saved: Index of the first saved tensor that the stage recomputes, counted
            from 0 within the module's call.
        held: Outputs that stay live for the stages that run later.
    """

    first_saved: int
    held: tuple[KeptOutput, ...]


@dataclass(frozen=True)
class RegionPlan:
    """The outputs that one module keeps.

    Attributes:
        path: Path of the module, as in `named_modules()`.
        operators: Number of operators in the module's call.
        kept: Outputs to keep; all other saved tensors are recomputed.
        stages: Stages of the region's backward pass; empty for a single stage.
    """

    path: str
    operators: int
    kept: tuple[KeptOutput, ...]
    stages: tuple[StagePlan, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The outputs that each region of a model keeps, and the predicted costs.

    Attributes:
        model: Class name of the model.
        fingerprint: Hash of the names, shapes and dtypes of the model's parameters.
        budget_bytes: Budget in bytes, excluding memory in use before the step.
        plain_peak_bytes: Peak of the step without regions, excluding memory in use
            before it.
        peak_bytes: Predicted peak of the step, excluding memory in use before it.
        slowdown: Predicted step time relative to the step without regions.
        bound: Lower bound on the slowdown of any schedule; see `planner.bound`.
        cost: Source of the operator times: `"measured"` or the name of a device.
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
        """Return the plan as plain data that JSON can represent."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON text, and write it to `path` if given.

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
        """Create a plan from the data that `to_dict` returns.

        Raises:
            PlanError: If the version is unsupported, or a field is missing or has the
                wrong type.
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
        """Create a plan from JSON text, or from the path of a JSON file.

        Raises:
            PlanError: If the file cannot be read or is not a valid plan.
        """
        # A plan is a JSON object, so its text starts with a brace; a path does not.
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            data = json.loads(str(source) if is_text else Path(source).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan cannot be read: {error}") from error
        return cls.from_dict(data)


_FIELDS = {k: get_type_hints(k) for k in (KeptOutput, StagePlan, RegionPlan, Plan)}


def _read(data: Any, kind: Any, where: str) -> Any:
    """Convert plain data to a record, a tuple of records, a number or a string."""
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
    """Express a block's choice in terms of the operators of one module's call.

    A kept storage is identified by the last operator of the block that writes it.
    """
    last_writers, count = _last_writers(graph, choice)

    def outputs(storages: Iterable[int]) -> tuple[KeptOutput, ...]:
        found = [last_writers[s] for s in storages if s in last_writers]
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


def _last_writers(graph: StepGraph, block: Block) -> tuple[dict[int, KeptOutput], int]:
    """Return each storage's last writer in a block, and the number of operators."""
    found: dict[int, KeptOutput] = {}
    operators = graph.operators[block.start : block.end]
    for number, operator in enumerate(operators, start=1):
        if operator.is_view:
            continue
        for value in (graph.values[index] for index in operator.outputs):
            # The engine keeps outputs of `must_keep` operators without being told.
            if operator.must_keep or not graph.storages[value.storage].bytes:
                found.pop(value.storage, None)
            else:
                kept = KeptOutput(number, value.output, operator.name)
                found[value.storage] = kept
    return found, len(operators)


def fingerprint_of(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return a hash of the names, shapes and dtypes of a model's parameters.

    Example:
        >>> fingerprint_of([("weight", (2, 3), "float32")])[:8]
        'e4b949cd'
    """
    text = json.dumps([[name, list(shape), dtype] for name, shape, dtype in parameters])
    return hashlib.sha256(text.encode()).hexdigest()
