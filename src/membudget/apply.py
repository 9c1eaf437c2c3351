"""Attach regions to a model without editing or wrapping it, and remove them again.

Modules are selected by class, by name, by a predicate, every n-th; or as spans of
consecutive modules. `attach` tells how a region is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from membudget.attach import check_can_carry, put_region, remove_region
from membudget.engine.options import Statistics, checked_options
from membudget.engine.policy import Stages
from membudget.errors import PlanError, SelectionError
from membudget.planner.plan import Plan, RegionPlan, fingerprint_of
from membudget.policies import Planned
from membudget.selection import select_modules
from membudget.spans import put_spans


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one region did so far.

    Attributes:
        name: The module's name in the model.
        forwards: Calls that dropped saved tensors.
        recomputes: How often dropped tensors were recomputed.
        skipped: Calls in which nothing required a gradient, so that nothing was
            dropped.
        unrepeatable: Outputs kept because replaying them was not bitwise equal.
        differences: Calls that ran other operators than the plan names, and so kept
            less.
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
        regions: One entry per region, in the order of the model.
    """

    regions: tuple[RegionStatus, ...]

    def __str__(self) -> str:
        """Return a table with one line per region."""
        width = max([len("region"), *(len(region.name) for region in self.regions)])
        lines = [f"{'region':{width}}  forwards  recomputes  skipped"]
        for r in self.regions:
            note = "" if r.forwards or r.skipped else "  (did not run)"
            if r.unrepeatable:
                note = f"  ({r.unrepeatable} values did not reproduce, and are kept)"
            if r.differences:
                note += f"  ({r.differences} calls ran other operators than planned)"
            lines.append(
                f"{r.name:{width}}  {r.forwards:8d}  {r.recomputes:10d}  "
                f"{r.skipped:7d}{note}"
            )
        return "\n".join(lines)


class Applied:
    """Regions attached to a model.

    Attributes:
        names: The modules with regions, in the order of the model.
    """

    def __init__(
        self,
        modules: dict[str, Module],
        statistics: dict[str, Statistics],
        policies: Mapping[str, Planned] = MappingProxyType({}),
    ):
        """Store the modules; `apply` creates these objects."""
        self._modules = modules
        self._statistics = statistics
        self._policies = policies

    @property
    def names(self) -> tuple[str, ...]:
        """The modules with regions, in the order of the model."""
        return tuple(self._statistics)

    def status(self) -> Status:
        """Return what each region did so far, including regions that never ran."""
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
        """Remove the regions, which restores the model. Idempotent."""
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
    """Attach regions to the modules of `model` that match; return a handle to undo it.

    A module must satisfy all of `blocks`, `names` and `where` that are given. A region
    on a module inside another region is nested in it. Applying again to the same
    modules replaces their regions.

    Args:
        model: Any module; it is changed in place.
        plan: A plan, or the path of one, instead of all selectors. Its regions run
            under the replay engine and keep what it names. They verify themselves by
            fingerprints (`verify="fingerprints"`), which fit in its budget.
        blocks: A class, or several, whose instances get a region.
        names: Patterns for module names as in `model.named_modules()`: `*` matches any
            part of a name between two dots, `**` any number of such parts. `"h.*"`
            matches `h.0` but not `h.0.mlp`.
        where: A predicate on name and module.
        every: Take every n-th match, beginning with the first.
        spans: Instead of all that, pairs of module names, `[("h.0", "h.3"), ...]`: a
            region starts when the first is called and ends when the last returns. Both
            are called by the same parent. Spans run under the replay engine.
        **options: Options of the regions; see `checkpoint`.

    Returns:
        An object with `status()`, `remove()` and `names`.

    Raises:
        SelectionError: Nothing is selected, nothing matches, or a module cannot carry a
            region.
        OptionError: An option is unknown or invalid.
        PlanError: The plan is incomplete, or for another model.

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
    checked = checked_options(options)
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


def _policy(region: RegionPlan) -> Planned:
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
    """Return what distinguishes models: names, shapes and dtypes of parameters."""
    return fingerprint_of(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
    )
