"""The result of `profile`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from membudget.errors import OptionError
from membudget.files import write_whole
from membudget.graph import StepGraph
from membudget.planner.simulate import Timeline, timeline


@dataclass(frozen=True)
class Profile:
    """One training step, measured or estimated.

    Attributes:
        graph: The recorded step.
        model: Class name of the model.
        tensors: `"real"` or `"fake"`.
        cost: Source of the seconds: `"measured"`, or the name of a device.
        loss_from: Where the loss came from, in words.
        notes: Caveats: what the figures leave out or only approximate.
    """

    graph: StepGraph
    model: str
    tensors: str
    cost: str
    loss_from: str
    notes: tuple[str, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes that the step allocated, at each op index."""
        return timeline(self.graph)

    @property
    def peak_bytes(self) -> int:
        """Peak of the bytes that the step allocates, as `membudget.peak` measures."""
        return self.timeline.peak_bytes

    @property
    def total_peak_bytes(self) -> int:
        """Peak of all bytes, with parameters, buffers, optimizer state and batch."""
        return self.peak_bytes + self.graph.static.total

    def report(self) -> str:
        """Return the profile as a page of text."""
        from membudget.report.profile_text import profile_text

        return profile_text(self)

    def __str__(self) -> str:
        """Return the report."""
        return self.report()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "graph"
        }
        return {**fields, "graph": self.graph.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Read what `to_dict` returned.

        Raises:
            OptionError: If the data has another version, or a field is missing.
        """
        try:
            texts = {k: str(data[k]) for k in ("model", "tensors", "cost", "loss_from")}
            notes = tuple(map(str, data["notes"]))
            graph = data["graph"]
        except (KeyError, TypeError) as error:
            raise OptionError(f"the profile is incomplete: {error!r}") from error
        return cls(graph=StepGraph.from_dict(graph), notes=notes, **texts)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the profile as JSON; with a path, also write it there.

        An existing file is replaced atomically.

        Raises:
            OptionError: If the file cannot be written.
        """
        text = json.dumps(self.to_dict())
        if path is not None:
            write_whole(Path(path), text + "\n", repr(str(path)))
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Profile:
        """Read JSON text, or the JSON file at a path.

        Raises:
            OptionError: If there is no such file, or it contains no profile.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            text = str(source) if is_text else Path(source).read_text()
            data = json.loads(text)
        except (OSError, ValueError) as error:
            raise OptionError(f"the profile cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise OptionError(
                f"a profile is a JSON object; this is a {type(data).__name__}"
            )
        return cls.from_dict(data)
