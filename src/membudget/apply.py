"""Put regions on a model without editing or wrapping it, and take them off again.

Which modules: by class, by name, by a predicate, every n-th; or spans of consecutive
modules. How a module carries a region is told in `carrier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from membudget.carrier import check_can_carry, put_region, remove_region
from membudget.engine.options import Statistics, checked_options
from membudget.engine.planned import Planned
from membudget.engine.policy import Stages
from membudget.errors import PlanError, SelectionError
from membudget.planner.plan import Plan, PlannedRegion, fingerprint_of
from membudget.selection import select_modules
from membudget.spans import put_spans


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one region did so far.

    Attributes:
        name: The module's name in the model.
        forwards: Calls that dropped saved tensors.
        recomputes: Times that what was dropped was made again.
        skipped: Calls in which nothing needed a gradient, and nothing was dropped.
        unrepeatable: Values that are kept because they did not come back bit for bit.
        differences: Calls in which other operators ran than the plan names, so that
            less was kept.
    """

    name: str
    forwards: int
    recomputes: int
    skipped: int
    unrepeatable: int = 0
    differences: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """What the regions of a model did so far.

    Attributes:
        regions: One entry for each region, in the order of the model.
    """

    regions: tuple[RegionStatus, ...]

    def __str__(self) -> str:
        """Return a table, one line a region."""
        width = max([len("region"), *(len(region.name) for region in self.regions)])
        lines = [f"{'region':{width}}  forwards  recomputes  skipped"]
        for r in self.regions:
            note = "" if r.forwards or r.skipped else "  (did not run)"
            if r.unrepeatable:
                note = f"  ({r.unrepeatable} values did not come back, and are kept)"
            if r.differences:
                note += f"  ({r.differences} calls ran other operators than planned)"
            lines.append(
                f"{r.name:{width}}  {r.forwards:8d}  {r.recomputes:10d}  "
                f"{r.skipped:7d}{note}"
            )
        return "\n".join(lines)


class Applied:
    """Regions on a model.

    Attributes:
        names: The modules that carry them, in the order of the model.
    """

    def __init__(
        self,
        modules: dict[str, Module],
        statistics: dict[str, Statistics],
        policies: Mapping[str, Planned] = MappingProxyType({}),
    ):
        """Hold the modules; `apply` makes these objects."""
        self._modules = modules
        self._statistics = statistics
        self._policies = policies

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that carry regions, in the order of the model."""
        return tuple(self._statistics)

    def status(self) -> Status:
        """Return what each region did so far: a region that never ran says so."""
        return Status(
            tuple(
                RegionStatus(
                    name,
                    s.forwards,
                    s.recomputes,
                    s.skipped,
                    s.unrepeatable,
                    self._differences(name),
                )
                for name, s in self._statistics.items()
            )
        )

    def _differences(self, name: str) -> int:
        policy = self._policies.get(name)
        return 0 if policy is None else policy.differences

    def remove(self) -> None:
        """Take the regions off: the model is what it was. Twice is once."""
        for module in self._modules.values():
            remove_region(module)
        self._modules = {}


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
    """Put regions on the modules of `model` that match, and return a way to undo it.

    What is given of `blocks`, `names` and `where` must all agree. A region on a module
    that is inside another with a region is nested in it. Applying again to the same
    modules is one application, with the newer options.

    Args:
        model: Any module; it is changed in place.
        plan: A plan, or the path of one: in place of everything that selects. Its
            regions run under the replay engine and keep what it says; they verify
            themselves by fingerprints (`verify="fingerprints"`), for which its budget
            has room.
        blocks: A class, or several, whose instances get a region.
        names: Patterns of module names as in `model.named_modules()`: `*` stands for
            any part of a name between two dots, `**` for any number of such names.
            `"h.*"` matches `h.0` and not `h.0.mlp`.
        where: Asked with the name and the module.
        every: Take every n-th of what matches, beginning with the first.
        spans: In place of all that: pairs of names, of the module whose call begins a
            region and of the later one whose return ends it, both called by one
            parent: `[("h.0", "h.3"), ("h.4", "h.7")]`. They run under the replay
            engine.
        **options: Options of the regions; see `checkpoint`.

    Returns:
        An object with `status()`, `remove()` and `names`.

    Raises:
        SelectionError: If nothing is asked for, nothing matches, or a module cannot
            carry a region.
        OptionError: If an option is unknown or cannot be meant.
        PlanError: If the plan is not whole, or for another model.

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
            raise SelectionError("give a plan, or say which modules get a region")
        return _apply_plan(model, plan, options)
    checked = checked_options(options)
    if spans is not None:
        if blocks is not None or names is not None or where is not None:
            raise SelectionError("give spans, or blocks, names and where; not both")
        return Applied(*put_spans(model, spans, checked))
    modules = select_modules(model, blocks, names, where, every)
    for name, module in modules.items():
        check_can_carry(name, module)
    statistics = {
        name: put_region(module, checked, name) for name, module in modules.items()
    }
    return Applied(modules, statistics)


def _apply_plan(
    model: Module, plan: Plan | str | Path, options: dict[str, Any]
) -> Applied:
    if not isinstance(plan, Plan):
        plan = Plan.from_json(plan)
    found = model_fingerprint(model)
    if found != plan.fingerprint:
        raise PlanError(
            f"the plan is for a {plan.model} with other parameters (fingerprint "
            f"{plan.fingerprint[:12]}) than this {type(model).__name__} (fingerprint "
            f"{found[:12]}): make a plan for this model"
        )
    known = dict(model.named_modules())
    modules: dict[str, Module] = {}
    policies: dict[str, Planned] = {}
    for region in plan.regions:
        if region.path not in known:
            raise PlanError(f"the plan names {region.path!r}, which the model lacks")
        modules[region.path] = known[region.path]
        check_can_carry(region.path, known[region.path])
        policies[region.path] = _policy(region)
    defaults = {"engine": "replay", "verify": "fingerprints"}
    statistics = {
        name: put_region(
            module,
            checked_options(defaults | options | {"keep": policies[name]}),
            name,
        )
        for name, module in modules.items()
    }
    return Applied(modules, statistics, policies)


def _policy(region: PlannedRegion) -> Planned:
    stages = Stages(
        [stage.first_saved for stage in region.stages],
        [
            frozenset((held.number, held.output) for held in stage.held)
            for stage in region.stages
        ],
    )
    return Planned(
        {(kept.number, kept.output): kept.operator for kept in region.kept},
        stages if region.stages else None,
    )


def model_fingerprint(model: Module) -> str:
    """Return what tells one model from another: its parameters."""
    return fingerprint_of(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
    )
