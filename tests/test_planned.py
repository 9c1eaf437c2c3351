"""What modules carry under a plan, and which plans a model refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import membudget as mb
from membudget import planned
from membudget.attach import ModuleRegion
from membudget.errors import PlanError
from membudget.numbered import CountedFrom, NumberedRegions
from membudget.planned import carried_of_plan, model_parameters, policies_of
from membudget.planner.plan import Plan, RegionPlan
from membudget.policies import Planned
from tests.oracles import CountedOperators
from tests.planner.drafts import PLAN


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def plan_of(*regions: RegionPlan) -> Plan:
    return replace(PLAN, parameters=model_parameters(made()), regions=regions)


TWICE = RegionPlan("1", 1, (), times=3, numbers=(0, 2))


def test_a_module_that_is_called_once_carries_one_region():
    carried = carried_of_plan(made(), plan_of(RegionPlan("0", 1, ())), {})
    assert list(carried) == ["0"]
    assert isinstance(carried["0"], ModuleRegion)
    assert carried["0"].options.engine == "replay"
    assert carried["0"].options.share == 0.01
    assert carried["0"].statistics.label == "0"
    assert len(policies_of(carried["0"])) == 1


def test_options_of_the_user_go_before_those_of_plans_but_for_what_is_kept():
    plan = plan_of(RegionPlan("0", 1, ()))
    carried = carried_of_plan(made(), plan, {"verify": False, "debug": True})
    region = carried["0"]
    assert isinstance(region, ModuleRegion)
    assert (region.options.verify, region.options.debug) == (False, True)
    kept = carried_of_plan(made(), plan, {"keep": print})["0"]
    assert len(policies_of(kept)) == 1


def test_a_module_that_is_called_often_is_counted_from_the_model(monkeypatch):
    checked: list[str] = []
    monkeypatch.setattr(
        planned, "check_can_carry", lambda name, module: checked.append(name)
    )
    carried = carried_of_plan(made(), plan_of(TWICE), {})
    assert [type(c) for c in carried.values()] == [NumberedRegions, CountedFrom]
    assert list(carried) == ["1", ""]
    # The model carries something, too.
    assert checked == ["1", ""]


def test_a_region_of_the_model_and_of_calls_inside_do_not_go_together():
    plan = plan_of(RegionPlan("", 2, ()), TWICE)
    with pytest.raises(PlanError, match="a region of the whole model, and others of"):
        carried_of_plan(made(), plan, {})


@pytest.mark.parametrize(
    ("count", "more"), [(1, ""), (3, ""), (4, "; and 1 more"), (9, "; and 7 more")]
)
def test_at_most_three_parameters_that_differ_are_named(count, more):
    names = [f"p{i} float32[1]" for i in range(count)]
    plan = replace(plan_of(), parameters=(*model_parameters(made()), *names))
    if count == 9:
        plan = replace(plan, parameters=(*plan.parameters, "q float32[1]"))
    with pytest.raises(PlanError, match="with other parameters than") as raised:
        carried_of_plan(made(), plan, {})
    named = "; ".join(f"p{i}, float32[1], is only in the first" for i in range(count))
    shown = "; ".join(named.split("; ")[:3])
    assert f"(second): {shown}{more}. Make a plan for this model" in str(raised.value)
    assert "was made for a Sequential with" in str(raised.value)


def test_what_a_fake_step_makes_anew_is_kept_where_a_real_one_writes_in_place():
    """On fake tensors, `linear` adds its bias by `add`; else by `add_`."""
    model = nn.Sequential(nn.Linear(6, 3), nn.GELU())
    x = torch.randn(4, 6, 5).transpose(1, 2)
    graph = mb.profile(model, x, fake=True, device="h100").graph
    names = [operator.name for operator in graph.operators]
    sums = [n for n, name in enumerate(names, 1) if name == "aten.add.Tensor"]
    region = mb.checkpoint(keep=Planned({(sums[0], 0): "aten.add.Tensor"}))

    loss = region(model)(x).sum()
    with CountedOperators() as backward:
        loss.backward()

    assert not {name for name in backward.counts if "add_" in name or "bmm" in name}
