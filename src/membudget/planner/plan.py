"""A plan: what each region of a model keeps, as data.

A plan names modules, and of each the outputs that stay, by the number of the operator
in the module's call. It is for one model, known by its parameters, and says what it
predicts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from membudget.errors import PlanError
from membudget.graph import StepGraph
from membudget.planner.regions import Region, saved_in

VERSION = 2
"""Of the JSON form; it rises when an older reader would misread a newer plan."""


@dataclass(frozen=True)
class KeptOutput:
    """An output that stays.

    Attributes:
        number: The operator, from 1, among those that run in the module's call.
        output: Which of its outputs; what it writes comes after them.
        operator: Its overload, which is compared when it runs.
    """

    number: int
    output: int
    operator: str


@dataclass(frozen=True)
class PlannedStage:
    """A part of a region's way back; see `planner.regions.Stage`.

    Attributes:
        first_saved: The first saved tensor that it serves, by its number from 0 among
            those that the module's call saves.
        held: The outputs that stay for later stages.
    """

    first_saved: int
    held: tuple[KeptOutput, ...]


@dataclass(frozen=True)
class PlannedRegion:
    """What one module keeps.

    Attributes:
        path: The module.
        operators: How many operators run in its call.
        kept: The outputs that stay.
        stages: How the way back is divided; none for one stage.
    """

    path: str
    operators: int
    kept: tuple[KeptOutput, ...]
    stages: tuple[PlannedStage, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What each region of a model keeps, and what that is expected to cost.

    Attributes:
        model: The class of the model.
        fingerprint: Of its parameters: names, shapes, dtypes.
        budget_bytes: What the step was to fit into, above what is there before it.
        plain_peak_bytes: The peak of the plain step, likewise.
        peak_bytes: The predicted peak, likewise.
        slowdown: The predicted time of a step, of the plain one.
        bound: The least slowdown of any schedule, by the same seconds; see
            `planner.bound`.
        cost: Where the seconds came from.
        regions: The regions, in the order of the forward.
    """

    model: str
    fingerprint: str
    budget_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    slowdown: float
    bound: float
    cost: str
    regions: tuple[PlannedRegion, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read what `to_dict` returned.

        Raises:
            PlanError: If it is of a newer version or not whole; the message says where.
        """
        version = _get(data, "version", int, "plan")
        if version != VERSION:
            raise PlanError(
                f"this membudget reads plans of version {VERSION}; this one has "
                f"version {version}"
            )
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "regions"}
        kinds = {"str": str, "int": int, "float": float}
        values = {
            name: _get(data, name, kinds[str(field.type)], "plan")
            for name, field in known.items()
        }
        regions = _get(data, "regions", (list, tuple), "plan")
        read = tuple(_region(r, f"plan.regions[{i}]") for i, r in enumerate(regions))
        return cls(**values, regions=read)

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read a plan: a JSON text, or the path of a file.

        Raises:
            PlanError: If there is no such file, or it holds no plan.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            data = json.loads(str(source) if is_text else Path(source).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan cannot be read: {error}") from error
        return cls.from_dict(data)


def _region(data: Any, where: str) -> PlannedRegion:
    return PlannedRegion(
        _get(data, "path", str, where),
        _get(data, "operators", int, where),
        _outputs(data, "kept", where),
        tuple(
            PlannedStage(
                _get(stage, "first_saved", int, f"{where}.stages[{i}]"),
                _outputs(stage, "held", f"{where}.stages[{i}]"),
            )
            for i, stage in enumerate(_get(data, "stages", (list, tuple), where))
        ),
    )


def _outputs(data: Any, name: str, where: str) -> tuple[KeptOutput, ...]:
    return tuple(
        KeptOutput(
            _get(entry, "number", int, f"{where}.{name}[{i}]"),
            _get(entry, "output", int, f"{where}.{name}[{i}]"),
            _get(entry, "operator", str, f"{where}.{name}[{i}]"),
        )
        for i, entry in enumerate(_get(data, name, (list, tuple), where))
    )


def _get(data: Any, name: str, kind: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be an object; it is a {type(data).__name__}")
    if name not in data:
        raise PlanError(f"{where}.{name} is missing: the plan is not whole")
    value = data[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        name_of = kind[0].__name__ if isinstance(kind, tuple) else kind.__name__
        raise PlanError(f"{where}.{name} must be {name_of}; it is {value!r:.40}")
    if kind is float and not math.isfinite(value):
        raise PlanError(f"{where}.{name} must be a finite number; it is {value!r}")
    return value


def planned_region(graph: StepGraph, path: str, region: Region) -> PlannedRegion:
    """Say what a region keeps by the numbers of its operators.

    A storage is kept as the last operator of the region leaves it that writes it.
    """
    writers, number = _writers(graph, region)

    def outputs(storages: Iterable[int]) -> tuple[KeptOutput, ...]:
        found = [writers[s] for s in storages if s in writers]
        return tuple(sorted(found, key=lambda kept: (kept.number, kept.output)))

    first = saved_in(graph, region).start
    stages = tuple(
        PlannedStage(
            saved_in(graph, Region(stage.start, region.end)).start - first,
            outputs(stage.held),
        )
        for stage in region.stages
    )
    kept = outputs(region.kept)
    return PlannedRegion(path, number, kept, stages)


def _writers(graph: StepGraph, region: Region) -> tuple[dict[int, KeptOutput], int]:
    """Return what leaves each storage as it is, and how many operators have numbers.

    No policy is asked about what has no bytes, or what the engine keeps anyway.
    """
    writers: dict[int, KeptOutput] = {}
    number = 0
    for operator in graph.operators[region.start : region.end]:
        number += 1
        for value in (graph.values[position] for position in operator.outputs):
            if operator.is_view:
                continue
            writers[value.storage] = KeptOutput(number, value.output, operator.name)
            if operator.is_pinned or not graph.storages[value.storage].bytes:
                del writers[value.storage]
    return writers, number


def fingerprint_of(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return what tells one model from another: its parameters.

    Args:
        parameters: Name, shape and dtype of each.

    Example:
        >>> fingerprint_of([("weight", (2, 3), "float32")])[:8]
        'e4b949cd'
    """
    text = json.dumps([[name, list(shape), dtype] for name, shape, dtype in parameters])
    return hashlib.sha256(text.encode()).hexdigest()
