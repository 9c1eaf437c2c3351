"""Attach recompute regions to a model, and remove them, without wrapping any module.

Modules are selected by class, name or predicate (optionally only every n-th match), or
as spans of consecutive modules. See `membudget.attach` for how regions are attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from membudget.attach import (
    carried_by,
    check_can_carry,
    put,
    put_region,
    remove_region,
)
from membudget.engine.native import status as recorder_status
from membudget.engine.options import Statistics, checked_options
from membudget.errors import SelectionError
from membudget.offload import Offload, offload
from membudget.planned import carried_of_plan, policies_of
from membudget.planner.plan import Plan
from membudget.policies import Planned
from membudget.selection import select_modules
from membudget.sharding import unwrapped_model
from membudget.spans import put_spans


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """Counters of one region since it was attached.

    Attributes:
        name: Name of the module in the model, or of the span of modules.
        forwards: Number of calls to the region that dropped saved tensors.
        recomputes: Number of times that dropped tensors were recomputed.
        skipped: Number of calls to the region that dropped nothing, because nothing
            required a gradient.
        unrepeatable: Number of outputs kept because their replay gave different bits.
        differences: Number of calls that may have kept fewer outputs than planned,
            because their operators differed from those in the plan, or because the plan
            knows fewer calls of the module.
        switched: Whether the region is replayed because a rerun gave different bits.
    """

    name: str
    forwards: int
    recomputes: int
    skipped: int
    unrepeatable: int = 0
    differences: int = 0
    switched: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Counters of all regions of a model, printable as a table.

    Attributes:
        regions: One entry per region, in order of attachment.
        left_out: Why `fit` put no region on a module, keyed by the module's name.
        recorder: Which recorder the replay regions use: that in C++, or that in Python;
            empty if no region has replayed.
    """

    regions: tuple[RegionStatus, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    recorder: str = ""

    def __str__(self) -> str:
        """Return a table with one line per region, or module without one."""
        names = [*(region.name for region in self.regions), *self.left_out]
        width = max(map(len, ["region", *names]))
        lines = [f"{'region':{width}}  forwards  recomputes  skipped"]
        for r in self.regions:
            note = "" if r.forwards or r.skipped else "  (did not run)"
            if r.unrepeatable:
                note = f"  ({r.unrepeatable} values did not reproduce, and are kept)"
            if r.switched:
                note += "  (a rerun gave different bits; replayed since)"
            if r.differences:
                note += f"  ({r.differences} calls ran other operators than planned)"
            lines.append(
                f"{r.name:{width}}  {r.forwards:8d}  {r.recomputes:10d}  "
                f"{r.skipped:7d}{note}"
            )
        for name, why in self.left_out.items():
            lines.append(f"{name:{width}}  (no region, under which {why})")
        if self.recorder:
            lines.append(f"replay recorder: {self.recorder}")
        return "\n".join(lines)


class Applied:
    """Handle to the regions attached to a model."""

    def __init__(
        self,
        modules: dict[str, Module],
        statistics: dict[str, Statistics],
        policies: Mapping[str, Sequence[Planned]] = MappingProxyType({}),
    ):
        """Store counters, policies, and what modules carry; called by `apply`."""
        self._carried = [(m, carried_by(m)) for m in modules.values()]
        self._statistics = statistics
        self._policies = policies
        self.left_out: Mapping[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules or spans with regions, in order of attachment."""
        return tuple(self._statistics)

    def status(self) -> Status:
        """Return the counters of every region, including regions that never ran."""
        has_replayed = any(s.has_replayed for s in self._statistics.values())
        return Status(
            tuple(
                RegionStatus(
                    name,
                    s.forwards,
                    s.recomputes,
                    s.skipped,
                    s.unrepeatable,
                    self._differences(name),
                    s.switched,
                )
                for name, s in self._statistics.items()
            ),
            self.left_out,
            recorder_status() if has_replayed else "",
        )

    def _differences(self, name: str) -> int:
        return sum(policy.differences for policy in self._policies.get(name, ()))

    def say_kept(self, text: str) -> None:
        """Let an error say this if memory runs out in the forward of a region."""
        for _, carried in self._carried:
            if carried is not None:
                carried.kept = text

    def remove(self) -> None:
        """Remove the regions and restore the original model; idempotent.

        Regions that have replaced them since stay.
        """
        for module, carried in self._carried:
            now = carried_by(module)
            if now is carried or now is None:  # Its class may be left over.
                remove_region(module)
        self._carried = []


def apply(
    model: Module,
    plan: Plan | str | Path | None = None,
    *,
    blocks: type[Module] | tuple[type[Module], ...] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, Module], bool] | None = None,
    every: int = 1,
    spans: Sequence[tuple[str, str]] | None = None,
    **options: Any,
) -> Applied:
    """Attach regions to the selected modules; return a handle that can remove them.

    If several of `blocks`, `names` and `where` are given, a module must satisfy all of
    them. Regions nest if both a module and one of its submodules are selected. Calling
    `apply` again on the same modules replaces their regions.

    Args:
        model: Any module; modified in place.
        plan: A plan, or the path of a plan file, given instead of selectors. A plan's
            regions run under the engine that it names, and keep the outputs that it
            names. By default, planned regions use `verify=0.01`: fingerprints, which
            stay within the budget, of a sample of the calls.
        blocks: One or more module classes whose instances get regions.
        names: One or more glob patterns for names in `model.named_modules()`: `*`
            matches within one dotted part, `**` any number of parts. `"h.*"` matches
            `h.0` but not `h.0.mlp`.
        where: Predicate called with a module's name and the module.
        every: Use only every n-th match, starting with the first.
        spans: Pairs of module names, such as `[("h.0", "h.3"), ...]`, given instead of
            selectors. A span's region starts when the first module is called and ends
            when the second returns; the same parent module must call both. Spans run
            under the replay engine.
        **options: Options of the regions; see `checkpoint`. `offload=True` holds their
            inputs in at most half of the host's memory, allocated as it is needed.

    Returns:
        A handle with `status()`, `remove()` and `names`.

    Raises:
        SelectionError: If no selector is given, nothing matches, or a module cannot
            have a region.
        OptionError: If an option is unknown or invalid.
        PlanError: If the plan is incomplete or was made for another model.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> applied = mb.apply(model, blocks=torch.nn.Linear, every=2)
        >>> applied.names
        ('0', '2')
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> print(applied.status())
        region  forwards  recomputes  skipped
        0              1           1        0
        2              1           1        0
        >>> applied.remove()
    """
    if plan is not None:
        if any(x is not None for x in (blocks, names, where, spans)):
            raise SelectionError("pass a plan or a selection of modules, not both")
        return _apply_plan(model, plan, options)
    checked = checked_options(_with_offload(options))
    if spans is not None:
        if blocks is not None or names is not None or where is not None:
            raise SelectionError("pass spans or blocks, names and where; not both")
        return Applied(*put_spans(model, spans, checked))
    modules = select_modules(model, blocks, names, where, every)
    for name, module in modules.items():
        check_can_carry(name, module)
    statistics = {
        name: put_region(module, checked, name) for name, module in modules.items()
    }
    return Applied(modules, statistics)


def _with_offload(options: dict[str, Any]) -> dict[str, Any]:
    """Let `offload=True` be an `Offload` of its own; allocate its memory now."""
    given = options.get("offload")
    found = offload() if given is True else given
    if not isinstance(found, Offload):
        return options
    found.open()
    return {**options, "offload": found}


def _apply_plan(
    model: Module, plan: Plan | str | Path, options: dict[str, Any]
) -> Applied:
    if not isinstance(plan, Plan):
        plan = Plan.from_json(plan)
    carried = carried_of_plan(model, plan, options)
    known = dict(unwrapped_model(model).named_modules())
    # Only now change the model: all checks above may raise.
    for name, regions in carried.items():
        put(known[name], regions, name)
    return Applied(
        {name: known[name] for name in carried},
        {n: c.statistics for n, c in carried.items() if c.statistics is not None},
        {name: policies_of(regions) for name, regions in carried.items()},
    )
