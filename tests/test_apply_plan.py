"""A plan on a model: the step is the plain one, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.errors import BudgetError, MembudgetError, PlanError, SelectionError
from membudget.planned import model_parameters
from membudget.planner.choice import Choice, made_in
from membudget.planner.plan import Plan
from membudget.planner.planner import Planner
from membudget.planner.region_plans import region_plan
from membudget.planning import make_plan
from membudget.step import Step
from tests.oracles import CountedOperators
from tests.planner.models import MODELS, Made


def plan_of(model: nn.Module, batch: Any, percent: int = 60) -> Plan:
    """Return a plan at a share of the plain peak, or at the next that one fits."""
    found = mb.profile(model, batch, fake=True)
    planner = Planner(found.graph)
    for more in range(percent, 100, 5):
        budget = planner.plain_peak_bytes * more // 100
        with suppress(BudgetError):
            chosen = planner.fastest(budget)
            return make_plan(found, chosen, model, budget)
    raise AssertionError("nothing fits")


def facts_of_step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Run a step from the same start; return whatever it leaves behind."""
    torch.manual_seed(7)
    step = Step(model, batch, None)
    step.prepare()
    facts = {"loss": step.run().detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        facts[f"gradient {name}"] = parameter.grad
    step.prepare()
    facts |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    facts["stream"] = torch.get_rng_state()
    return facts


def check_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


def planned(name: str, percent: int = 60) -> tuple[Made, Made, Plan]:
    """Return a model twice, and a plan for it."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return (model, batch), (copy.deepcopy(model), batch), plan_of(model, batch, percent)


@pytest.mark.parametrize("percent", [30, 85])
@pytest.mark.parametrize("name", MODELS)
def test_steps_under_a_plan_are_the_plain_steps(name, percent):
    plain, other, plan = planned(name, percent)
    assert plan.regions
    applied = mb.apply(other[0], plan)
    for _ in range(2):
        check_same(facts_of_step(*plain), facts_of_step(*other))
    status = applied.status()
    calls: Counter[str] = Counter()
    for of_plan in plan.regions:
        calls[of_plan.path] += len(of_plan.numbers) or 1
    assert [r.name for r in status.regions] == list(calls)
    for region in status.regions:
        assert (region.forwards, region.differences) == (2 * calls[region.name], 0)
        assert region.skipped == region.unrepeatable == 0
    assert any(region.recomputes >= 2 for region in status.regions)


def test_a_plan_is_applied_from_its_file(tmp_path: Path):
    plain, other, plan = planned("mlp")
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for source in (path, str(path), plan.to_json()):
        applied = mb.apply(other[0], source)
        assert applied.names == tuple(region.path for region in plan.regions)
        check_same(facts_of_step(*plain), facts_of_step(*other))
        applied.remove()


def test_a_half_written_plan_is_refused_and_nothing_is_put_on(tmp_path: Path):
    _, (model, _), plan = planned("mlp")
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json()[:200])
    before = [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(PlanError, match="cannot be read"):
        mb.apply(model, path)
    assert [m.__dict__.keys() for m in model.modules()] == [d.keys() for d in before]


def test_a_plan_for_another_model_is_refused():
    *_, plan = planned("mlp")
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"for a Sequential with other parameters"):
        mb.apply(other, plan)


def test_a_plan_that_names_a_module_that_is_not_there_is_refused():
    _, (model, _), plan = planned("mlp")
    wrong = dataclasses.replace(plan.regions[-1], path="nowhere")
    broken = dataclasses.replace(plan, regions=(*plan.regions[:-1], wrong))
    with pytest.raises(PlanError, match="names 'nowhere', which the model lacks"):
        mb.apply(model, broken)
    classes = {type(module) for module in model.modules()}
    assert classes <= {nn.Sequential, nn.Linear, nn.GELU}


@pytest.mark.parametrize(
    "selection", [{"names": "0"}, {"blocks": nn.Linear}, {"spans": [("0", "1")]}]
)
def test_a_plan_beside_a_selection_is_refused(selection):
    _, (model, _), plan = planned("mlp")
    with pytest.raises(SelectionError, match="pass a plan or a selection of modules"):
        mb.apply(model, plan, **selection)


def test_unknown_options_beside_a_plan_are_refused():
    _, (model, _), plan = planned("mlp")
    with pytest.raises(MembudgetError, match="nonsense"):
        mb.apply(model, plan, nonsense=1)


def test_a_plan_that_is_taken_off_leaves_the_model_as_it_was():
    plain, (model, batch), plan = planned("gpt")
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    classes = [type(m) for m in model.modules()]
    applied = mb.apply(model, plan)
    facts_of_step(model, batch)
    facts_of_step(*plain)
    applied.remove()
    applied.remove()
    assert [type(m) for m in model.modules()] == classes
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
    check_same(facts_of_step(*plain), facts_of_step(model, batch))
    assert all(region.forwards == 1 for region in applied.status().regions)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(_dumps(m))])
def test_a_copy_of_a_model_with_a_plan_makes_the_same_steps(copied):
    plain, (model, batch), plan = planned("resnet")
    mb.apply(model, plan)
    check_same(facts_of_step(*plain), facts_of_step(copied(model), batch))


def _dumps(model: nn.Module) -> bytes:
    return pickle.dumps(model)


def test_a_model_with_a_plan_is_trained_and_evaluated_in_turn():
    plain, other, plan = planned("resnet")
    mb.apply(other[0], plan)
    for mode in (False, True, False):
        plain[0].train(mode)
        other[0].train(mode)
        check_same(facts_of_step(*plain), facts_of_step(*other))
    with torch.no_grad():
        assert torch.equal(plain[0](plain[1]), other[0](other[1]))


class Turning(nn.Module):
    """A block that takes another way when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.turns = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.turns:
            y = F.dropout(y.sin(), 0.5).exp()
        return self.second(F.gelu(y)).tanh()


def turning(percent: int = 80) -> tuple[nn.Sequential, nn.Sequential, Tensor, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Turning() for _ in range(4)))
    batch = torch.randn(32, 16)
    plan = plan_of(model, batch, percent)
    assert any(region.kept for region in plan.regions)
    return model, copy.deepcopy(model), batch, plan


def test_a_step_that_takes_another_way_is_right_and_counted():
    plain, other, batch, plan = turning()
    kept = {region.path for region in plan.regions if region.kept}
    applied = mb.apply(other, plan)
    for turns in (False, True, False, True, True):
        for model in (plain, other):
            blocks: Any = model
            for block in blocks:
                block.turns = turns
        check_same(facts_of_step(plain, batch), facts_of_step(other, batch))
    found = {r.name: r.differences for r in applied.status().regions}
    assert all(found[path] in (0, 3) for path in found)
    assert any(found[path] == 3 for path in kept)
    assert "(3 calls ran other operators than planned)" in str(applied.status())


def test_no_difference_is_shown_where_none_was():
    _, other, batch, plan = turning()
    applied = mb.apply(other, plan)
    facts_of_step(other, batch)
    assert "planned" not in str(applied.status())


def test_a_plan_knows_a_model_by_names_shapes_and_dtypes_alone():
    model, _ = MODELS["mlp"]()
    same, _ = MODELS["mlp"]()
    assert model_parameters(model) == model_parameters(same)
    assert model_parameters(model) != model_parameters(same.double())


class Routed(nn.Module):
    """Two experts, of which each row takes the one with the higher score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1)
        both = torch.stack([expert(x).tanh() for expert in self.experts], 1)
        return (both.gather(1, chosen[..., None].expand(-1, 1, 16))[:, 0]) * weight


def test_what_the_engine_keeps_anyway_is_not_in_a_plan():
    torch.manual_seed(0)
    model, batch = nn.Sequential(Routed(), Routed()), torch.randn(64, 16)
    graph = mb.profile(model, batch, fake=True).graph
    (call,) = (call for call in graph.calls if call.path == "")
    region = Choice(call.start, call.end)
    kept = frozenset(made_in(graph, region))
    everything = region_plan(graph, "", Choice(region.start, region.end, kept))
    assert not any("topk" in output.operator for output in everything.kept)
    plan = Plan("Sequential", model_parameters(model), 0, 0, 0, 1, 1, "", (everything,))
    routed = copy.deepcopy(model)
    applied = mb.apply(routed, plan)
    check_same(facts_of_step(model, batch), facts_of_step(routed, batch))
    assert applied.status().regions[0].differences == 0


class Emptied(nn.Module):
    """Two layers with an empty tensor between them, as of a batch without objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        objects = hidden[:0].tanh()
        output: Tensor = self.second(torch.cat([hidden.sigmoid(), objects]))
        return output


def test_what_is_empty_is_in_a_plan_that_keeps_nothing_else_and_not_recomputed():
    torch.manual_seed(0)
    model, batch = nn.Sequential(Emptied(), Emptied()), torch.randn(64, 16)
    graph = mb.profile(model, batch, fake=True).graph
    (call,) = (call for call in graph.calls if call.path == "")
    region = region_plan(graph, "", Choice(call.start, call.end))
    assert [k.operator for k in region.kept] == ["aten.tanh.default"] * 2
    plan = Plan("Sequential", model_parameters(model), 0, 0, 0, 1, 1, "", (region,))
    emptied = copy.deepcopy(model)
    mb.apply(emptied, plan, verify=False)
    check_same(facts_of_step(model, batch), facts_of_step(emptied, batch))
    with CountedOperators() as counting:
        facts_of_step(emptied, batch)
    assert (counting.counts["tanh"], counting.counts["sigmoid"]) == (2, 4)
