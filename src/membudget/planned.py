"""What modules carry under a plan: regions that keep the outputs that it names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from membudget.attach import (
    Carried,
    ModuleRegion,
    carried_by,
    check_can_carry,
    put,
    remove_region,
)
from membudget.engine.options import RegionOptions, Statistics, checked_options
from membudget.engine.stages import Output, Stages
from membudget.errors import PlanError
from membudget.numbered import CountedFrom, NumberedRegions
from membudget.offload import Offload
from membudget.offload.limits import Limits
from membudget.planner.choice import RERUN
from membudget.planner.loop_plan import LoopPlan
from membudget.planner.plan import (
    HostPlan,
    KeptOutput,
    Plan,
    RegionPlan,
    parameter_differences,
    parameter_text,
)
from membudget.policies import Planned, Unplanned, in_place_or_not_at
from membudget.sharding import units_of, unwrapped_model
from membudget.step import device_of_model
from membudget.text import dtype_name

MOST_NAMED = 3
"""How many parameters an error names, of those that a plan and a model do not share."""


def carried_of_plan(
    model: Module, plan: Plan, options: Mapping[str, Any]
) -> dict[str, Carried]:
    """Return what each module of a model carries under a plan, by its name.

    Raises:
        OptionError: If an option is unknown or invalid.
        PlanError: If the plan was made for another model.
        SelectionError: If a module cannot have a region.
    """
    check_parameters(model, plan)
    # Kernels may differ on another device than the one that the plan is made for.
    made_for = "" if plan.device == device_type(model) else plan.device
    offload = _offload_of(plan.host)
    return carried_of_regions(model, plan.regions, options, offload, made_for)


def carried_of_regions(
    model: Module,
    regions: Iterable[RegionPlan],
    options: Mapping[str, Any],
    offload: Offload | None,
    made_for: str = "",
) -> dict[str, Carried]:
    """Return what each module of a model carries under a plan's regions, by its name.

    Args:
        model: The model.
        regions: The regions.
        options: Options of all of them.
        offload: What moves tensors to the host; `None` if nothing does.
        made_for: The type of the device that they are planned for, if it is another.

    Raises:
        OptionError: If an option is unknown or invalid.
        PlanError: If the model lacks a module.
        SelectionError: If a module cannot have a region.
    """
    model = unwrapped_model(model)
    known = dict(model.named_modules())
    of_path: dict[str, list[RegionPlan]] = {}
    for region in regions:
        if region.path not in known:
            raise PlanError(f"the plan names {region.path!r}, which the model lacks")
        check_can_carry(region.path, known[region.path])
        _check_units(region.path, known[region.path])
        of_path.setdefault(region.path, []).append(region)
    policies = _Policies(made_for, offload)
    carried = {
        path: _carried(path, of, options, policies) for path, of in of_path.items()
    }
    numbered = [c for c in carried.values() if isinstance(c, NumberedRegions)]
    if numbered:
        if "" in carried:
            raise PlanError(
                "the plan has a region of the whole model, and others of single calls "
                "inside: make the plan again"
            )
        check_can_carry("", model)
        carried[""] = CountedFrom(numbered)
    return carried


def _check_units(path: str, module: Module) -> None:
    """Reject a region within which FSDP would gather parameters.

    Raises:
        PlanError: If `fully_shard` shards a module inside of the region's.
    """
    inside = [name for name in units_of(module) if name]
    if inside:
        raise PlanError(
            f"the plan has a region on {path or 'the model'!r}, inside of which "
            f"fully_shard shards {inside[0]!r}: FSDP would gather parameters within "
            "the region, on other ranks perhaps not. Make the plan of the sharded "
            "model, or of profile(model, batch, mesh=...)"
        )


def check_parameters(model: Module, plan: Plan | LoopPlan) -> None:
    """Reject a plan that was made for other parameters than a model's.

    Raises:
        PlanError: If one differs, with its name.
    """
    differ = parameter_differences(plan.parameters, model_parameters(model))
    if differ:
        named = "; ".join(differ[:MOST_NAMED])
        more = len(differ) - MOST_NAMED
        raise PlanError(
            f"the plan (first) was made for a {plan.model} with other parameters than "
            f"this {type(model).__name__} (second): {named}"
            f"{f'; and {more} more' if more > 0 else ''}. Make a plan for this model"
        )


@dataclass(frozen=True)
class _Policies:
    """Makes the policies of a plan's regions."""

    made_for: str  # The type of the device, if that is another.
    offload: Offload | None  # The regions share the host's memory.

    def of(self, region: RegionPlan) -> Planned:
        # A layer that the plan does not know keeps nothing. Its stages then hold what
        # the plan keeps of its counterpart, or each would recompute it.
        stages = Stages(
            [(stage.after, stage.saved) for stage in region.stages],
            [
                _places(
                    (*stage.held, *(k for k in region.kept if k.number <= stage.after))
                )
                for stage in region.stages
            ],
        )
        return Planned(
            {(kept.number, kept.output): kept.operator for kept in region.kept},
            stages if region.stages else None,
            self.made_for,
            region.operators,
            region.sequence,
            {
                (kept.number, kept.output): self.offload
                for kept in region.offloaded
                if self.offload is not None
            },
        )


def _offload_of(host: HostPlan) -> Offload | None:
    """Return what moves the tensors of a plan; `None` if it moves none."""
    if not host.host_bytes:
        return None
    # The plan has chosen: nothing stays because it is small, or is asked for first.
    limits = Limits(host.host_bytes, host.window_bytes, first_bytes=0, smallest_bytes=1)
    return Offload(limits)


def _carried(
    path: str,
    regions: list[RegionPlan],
    options: Mapping[str, Any],
    policies: _Policies,
) -> Carried:
    statistics, times = Statistics(path), regions[0].times
    if times == 1:
        found = _options(options, regions[-1], policies)
        return ModuleRegion(found, statistics, True)
    numbered: dict[int, RegionOptions] = {}
    for region in regions:
        found = _options(options, region, policies)
        numbered |= dict.fromkeys(region.numbers, found)
    return NumberedRegions(numbered, _replayed(options, Unplanned()), times, statistics)


def _options(
    options: Mapping[str, Any], region: RegionPlan, policies: _Policies
) -> RegionOptions:
    if region.engine == RERUN:
        # It is replayed after all if a second run would repeat side effects.
        return checked_options({**_VERIFY, **options, "engine": "auto", "keep": None})
    return _replayed(options, policies.of(region))


def _replayed(options: Mapping[str, Any], policy: Planned) -> RegionOptions:
    # The user's options override these defaults, but not what the plan keeps.
    return checked_options({**_VERIFY, "engine": "replay", **options, "keep": policy})


_VERIFY = {"verify": 0.01}


def _places(outputs: Iterable[KeptOutput]) -> frozenset[Output]:
    return frozenset(
        place
        for output in outputs
        for place in in_place_or_not_at(output.number, output.output, output.operator)
    )


def policies_of(carried: Carried | None) -> tuple[Planned, ...]:
    """Return the policies of a plan in what a module carries, each once."""
    options: tuple[RegionOptions, ...] = ()
    if isinstance(carried, ModuleRegion):
        options = (carried.options,)
    elif isinstance(carried, NumberedRegions):
        options = (*carried.options.values(), carried.further)
    planned = (o.keep for o in options if isinstance(o.keep, Planned))
    return tuple(dict.fromkeys(planned))


def is_planned(carried: Carried) -> bool:
    """Return whether a module carries something because of a plan."""
    if isinstance(carried, ModuleRegion):
        return carried.is_planned
    return isinstance(carried, NumberedRegions | CountedFrom)


PlanRegions = list[tuple[str, Module, Carried]]
"""What modules carry under a plan: name, module, and what it carries."""


def take_off(model: Module) -> PlanRegions:
    """Remove a plan's regions from a model, and return them."""
    found = [
        (name, module, carried)
        for name, module in model.named_modules()
        if (carried := carried_by(module)) is not None and is_planned(carried)
    ]
    for _, module, _ in found:
        remove_region(module)
    return found


def put_on(regions: PlanRegions) -> None:
    """Attach a plan's regions again, with all that they have learnt."""
    for name, module, carried in regions:
        put(module, carried, name)


@contextmanager
def without_plan(model: Module, put_back: bool = False) -> Iterator[None]:
    """Remove a plan's regions; put them back if asked to, or after an exception."""
    planned = take_off(model)
    try:
        yield
    except BaseException:
        put_back = True
        raise
    finally:
        if put_back:
            put_on(planned)


def device_type(model: Module) -> str:
    """Return the type of that device."""
    return device_of_model(model).type


def model_parameters(model: Module) -> tuple[str, ...]:
    """Return the names, shapes and dtypes of a model's parameters, as plans do."""
    return tuple(
        parameter_text(name, p.shape, dtype_name(p.dtype))
        for name, p in unwrapped_model(model).named_parameters()
    )
