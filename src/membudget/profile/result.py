"""The result of `profile`: a recorded step, assembled into a `StepGraph`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from membudget.errors import OptionError
from membudget.graph import Operator, Saved, StaticBytes, StepGraph, Storage, Value
from membudget.ops import decides, facts_of
from membudget.planner.timeline import Timeline, timeline
from membudget.profile.in_place import add_in_place, without_memory
from membudget.profile.kinds import PeakKind, peak_by_kind
from membudget.profile.lifetimes import Lifetimes, RecordedOperator, RecordedStorage
from membudget.profile.step_recorder import StepRecorder
from membudget.text import read_json, write_whole


@dataclass(frozen=True)
class Profile:
    """Memory and time of one training step, measured or estimated.

    Attributes:
        graph: Graph of the recorded step.
        model: Class name of the model.
        tensors: Kind of tensors that the step ran on, `"real"` or `"fake"`.
        cost: Source of the operator times: `"measured"`, or the name of a device.
        loss_from: Where the loss comes from, such as `"the model's output"`.
        notes: Caveats about bytes and times that are omitted or approximate.
        draws: Letters of the random numbers that decide what the step runs (`draws`);
            empty if none do.
        chance: Numbers of the module calls in which one of those is drawn, so that they
            run other operators in other steps.
    """

    graph: StepGraph
    model: str
    tensors: str
    cost: str
    loss_from: str
    notes: tuple[str, ...] = ()
    draws: str = ""
    chance: tuple[int, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes allocated by the step that are live at each op index."""
        return timeline(self.graph)

    @property
    def peak_bytes(self) -> int:
        """Peak of the bytes that the step allocates, as `membudget.peak` reports it."""
        return self.timeline.peak_bytes

    @property
    def total_peak_bytes(self) -> int:
        """Peak bytes, including parameters, buffers, optimizer state and batch."""
        return self.peak_bytes + self.graph.static.total

    def peak_by_kind(self) -> dict[PeakKind, int]:
        """Return what `total_peak_bytes` is for, as parameters and activations are."""
        return peak_by_kind(self.graph)

    def report(self) -> str:
        """Return a text report of the profile."""
        from membudget.report.profile_text import profile_text

        return profile_text(self)

    __str__ = report

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data for JSON."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "graph"
        }
        return {**fields, "graph": self.graph.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Create a profile from the data that `to_dict` returned.

        Raises:
            OptionError: If the data is of an unknown version, or a field is missing or
                has the wrong type.
        """
        try:
            texts = {k: str(data[k]) for k in ("model", "tensors", "cost", "loss_from")}
            notes = tuple(map(str, data["notes"]))
            graph = data["graph"]
            draws = str(data.get("draws", ""))  # Older files have none.
            chance = tuple(map(int, data.get("chance", ())))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"the profile is incomplete: {error!r}") from error
        return cls(
            graph=StepGraph.from_dict(graph),
            notes=notes,
            draws=draws,
            chance=chance,
            **texts,
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the profile as JSON text; given a path, also write a file atomically.

        Raises:
            OptionError: If the file cannot be written.
        """
        text = json.dumps(self.to_dict())
        if path is not None:
            write_whole(Path(path), text + "\n", repr(str(path)))
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Profile:
        """Create a profile from JSON text or from a JSON file.

        Raises:
            OptionError: If the file cannot be read, or the JSON is not a profile.
        """
        try:
            data = read_json(source)
        except ValueError as error:
            raise OptionError(f"the profile cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise OptionError(
                f"a profile is a JSON object; this is a {type(data).__name__}"
            )
        return cls.from_dict(data)


def assemble(recorder: StepRecorder, optimizer_bytes: int) -> StepGraph:
    """Assemble the recorded step into a graph with the recorded operator times."""
    without_memory(recorder)
    add_in_place(recorder)
    count = len(recorder.operators)
    values = recorder.lifetimes.values
    phases = [operator.phase for operator in recorder.operators]
    return StepGraph(
        operators=tuple(
            _operator(recorder.lifetimes, i, o)
            for i, o in enumerate(recorder.operators)
        ),
        values=tuple(values),
        storages=tuple(_storage(s, count) for s in recorder.lifetimes.storages),
        saved=tuple(
            Saved(
                s.value,
                s.moment,
                tuple(s.asked),
                count if s.freed is None else s.freed,
                *s.place,
            )
            for s in recorder.saved
        ),
        calls=tuple(recorder.calls),
        backward_start=_first(phases, ("backward", "optimizer")),
        optimizer_start=_first(phases, ("optimizer",)),
        static=_static(recorder.lifetimes.storages, optimizer_bytes),
    )


def _first(phases: Sequence[str], wanted: Sequence[str]) -> int:
    return next((i for i, p in enumerate(phases) if p in wanted), len(phases))


def _operator(lifetimes: Lifetimes, index: int, recorded: RecordedOperator) -> Operator:
    facts = facts_of(recorded.operator)
    inputs = [lifetimes.values[i] for i in recorded.inputs]
    outputs = [lifetimes.values[i] for i in recorded.outputs]
    is_import = (
        facts is not None
        and facts.is_view
        and any(lifetimes.storages[value.storage].birth == index for value in outputs)
    )
    is_view = facts is not None and (
        (facts.is_view and not is_import)
        or _makes_nothing(recorded.operator, inputs, outputs)
    )
    reads_shape = facts is not None and (facts.is_empty or facts.is_constant)
    return Operator(
        name=str(recorded.operator),
        phase=recorded.phase,
        module_path=recorded.place[0],
        line=recorded.place[1],
        # `zeros_like(x)` reads only the shape of x.
        inputs=() if reads_shape else tuple(recorded.inputs),
        outputs=tuple(recorded.outputs),
        flops=recorded.flops,
        read_bytes=0 if is_view else _bytes(inputs),
        written_bytes=0 if is_view else _bytes(outputs),
        workspace_bytes=recorded.workspace_bytes,
        seconds=recorded.nanoseconds * 1e-9,
        is_view=is_view,
        is_random=facts is not None and facts.is_random,
        must_keep=facts is None
        or is_import
        or facts.is_opaque
        or facts.is_routing
        or decides(facts, _dtypes(inputs), _dtypes(outputs)),
    )


def _dtypes(values: Sequence[Value]) -> list[Any]:
    return [getattr(torch, value.dtype) for value in values]


def _makes_nothing(
    operator: Any, inputs: Sequence[Value], outputs: Sequence[Value]
) -> bool:
    """Return whether every output aliases an input, and the operator writes nothing."""
    if not outputs or operator._schema.is_mutable:
        return False
    return {value.storage for value in outputs} <= {value.storage for value in inputs}


def _bytes(values: Sequence[Value]) -> int:
    """Return the bytes of the values, counting only the largest in each storage."""
    largest: dict[int, int] = {}
    for value in values:
        largest[value.storage] = max(largest.get(value.storage, 0), value.bytes)
    return sum(largest.values())


def _storage(recorded: RecordedStorage, count: int) -> Storage:
    death = count if recorded.death is None else recorded.death
    released = recorded.released
    if released is not None and released >= death:
        released = None
    return Storage(
        recorded.bytes, recorded.kind, recorded.name, recorded.birth, death, released
    )


def _static(storages: Sequence[RecordedStorage], optimizer_bytes: int) -> StaticBytes:
    def total(*kinds: str) -> int:
        return sum(s.bytes for s in storages if s.kind in kinds and s.birth < 0)

    return StaticBytes(
        parameters=total("parameter"),
        buffers=total("buffer"),
        inputs=total("input"),
        optimizer=optimizer_bytes,
    )
