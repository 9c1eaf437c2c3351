"""Plans: schedules as JSON data, in terms of a model's modules and operators.

A plan lists modules and, for each module, the outputs to keep; an output is named by
its operator's number within the module's call. A plan is valid for one model,
identified by its parameters, and includes the predicted peak and slowdown. That of a
training loop holds, beside the plan of its most frequent situation, what is known of
all of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from membudget.errors import PlanError
from membudget.planner.choice import (
    REPLAY,
    BlockEngine,
)
from membudget.planner.loop_plan import LoopPlan
from membudget.planner.plain_data import field_of, record_of
from membudget.text import read_json, write_whole

VERSION = 7
"""Version of the JSON; it rises when an older reader would misread a newer plan."""

READ = (6, VERSION)
"""Versions that are read: those of version 6 move nothing to the host."""


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
        after: Number of the last operator before the stage, whose saved tensors an
            earlier stage recomputes; 0 for the first stage.
        saved: How many tensors that operator saves once it has run.
        held: Outputs that stay live for the stages that run later.
    """

    after: int
    saved: int
    held: tuple[KeptOutput, ...]


@dataclass(frozen=True)
class RegionPlan:
    """The outputs that one module keeps, in all of its calls or in some.

    Attributes:
        path: Path of the module, as in `named_modules()`.
        operators: Number of operators in the module's call.
        kept: Outputs to keep; all other saved tensors are recomputed.
        stages: Stages of the region's backward pass; empty for a single stage.
        times: How often the model calls the module.
        numbers: Which of these calls keep this, counted from 0; other calls have a
            region of their own or none. Empty if the model calls the module once.
        engine: What recomputes: `"replay"`, or `"rerun"`, which keeps nothing.
        sequence: Names of the operators' overloads, in order, by which calls that run
            others are aligned; empty if the region keeps nothing and has no stages.
        offloaded: Those of `kept` that are moved to the host.
    """

    path: str
    operators: int
    kept: tuple[KeptOutput, ...]
    stages: tuple[StagePlan, ...] = ()
    times: int = 1
    numbers: tuple[int, ...] = ()
    engine: BlockEngine = REPLAY
    sequence: tuple[str, ...] = ()
    offloaded: tuple[KeptOutput, ...] = ()


@dataclass(frozen=True)
class HostPlan:
    """What a plan takes of the host, and of the link to it.

    Attributes:
        host_bytes: Memory of the host that is allocated.
        window_bytes: Bytes of the device for what is on its way, in either direction.
        moved_bytes: Bytes that a step copies to the host, and back.
        link_s: Time for which the link is busy, in both directions together.
        wait_s: Time for which the device waits for a copy.
    """

    host_bytes: int = 0
    window_bytes: int = 0
    moved_bytes: int = 0
    link_s: float = 0.0
    wait_s: float = 0.0


NO_HOST = HostPlan()


@dataclass(frozen=True)
class Plan:
    """The outputs that each region of a model keeps, and the predicted costs.

    Attributes:
        model: Class name of the model.
        parameters: Parameters of the model, such as `"0.weight float32[64,32]"`.
        budget_bytes: Budget in bytes, excluding memory in use before the step.
        plain_peak_bytes: Peak of the step without regions, excluding memory in use
            before it.
        peak_bytes: Predicted peak of the step, excluding memory in use before it.
        slowdown: Predicted step time relative to the step without regions.
        bound: Lower bound on the slowdown of any schedule; see `planner.bound`.
        cost: Source of the operator times: `"measured"` or the name of a device.
        regions: The regions, in forward order.
        device: Type of the device whose operators the plan names, such as `"cpu"`;
            empty if that is not known.
        loops: What a training loop taught, one for each of its models; empty if the
            plan is of a single step.
        host: What is taken of the host; all 0 if the regions move nothing there.
    """

    model: str
    parameters: tuple[str, ...]
    budget_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    slowdown: float
    bound: float
    cost: str
    regions: tuple[RegionPlan, ...]
    device: str = ""
    loops: tuple[LoopPlan, ...] = ()
    host: HostPlan = NO_HOST

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
        version = field_of(data, "version", int, "plan")
        if version not in READ:
            raise PlanError(
                "this membudget reads plan files of versions "
                f"{' and '.join(map(str, READ))}; this one has version {version}: "
                "make the plan again"
            )
        regions = data.get("regions")
        if version != VERSION and isinstance(regions, list):
            regions = [
                {"offloaded": [], **region} if isinstance(region, Mapping) else region
                for region in regions
            ]
            data = {"host": dataclasses.asdict(NO_HOST), **data, "regions": regions}
        plan: Plan = record_of({"device": "", "loops": [], **data}, cls, "plan")
        return plan

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Create a plan from JSON text, or from the path of a JSON file.

        Raises:
            PlanError: If the file cannot be read or is not a valid plan.
        """
        try:
            data = read_json(source)
        except ValueError as error:
            raise PlanError(f"the plan cannot be read: {error}") from error
        return cls.from_dict(data)


def parameter_text(name: str, shape: Iterable[int], dtype: str) -> str:
    """Describe a parameter as plans do.

    Example:
        >>> parameter_text("0.weight", (2, 3), "float32")
        '0.weight float32[2,3]'
    """
    return f"{name} {dtype}[{','.join(map(str, shape))}]"


def parameter_differences(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return one line for each parameter that two models do not share.

    Example:
        >>> one, other = ("0.weight float32[2,3]",), ("0.weight float32[2,4]",)
        >>> parameter_differences(one, other)
        ['0.weight is float32[2,3] in the first and float32[2,4] in the second']
    """
    tables = [dict(_halves(text) for text in of) for of in (first, second)]
    found = []
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        one, other = (table.get(name) for table in tables)
        if one is None or other is None:
            which, what = ("second", other) if one is None else ("first", one)
            found.append(f"{name}, {what}, is only in the {which}")
        elif one != other:
            found.append(f"{name} is {one} in the first and {other} in the second")
    if not found and tuple(first) != tuple(second):
        pairs = zip_longest(first, second)
        place = next(n for n, pair in enumerate(pairs) if pair[0] != pair[1])
        found.append(f"the parameters are in another order, from number {place} on")
    return found


def _halves(text: str) -> tuple[str, str]:
    name, _, shape = text.rpartition(" ")
    return name, shape
