"""The modes that people know by a name: a rule for every block, and no planning."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import attempt, planning
from membudget._torch import DispatchMode
from membudget.errors import BudgetError, OptionError
from membudget.fit import fit
from membudget.modes import MODES, check_mode, schedule_of_mode
from membudget.outcome import Metered
from membudget.planner.overheads import NO_OVERHEADS, Overheads
from membudget.planning import plan_for
from tests.devices import held_bytes
from tests.planner.models import MODELS, gpt

NAMED = ("none", "full", "selective", "attention", "every_2", "every_3")
DEAR = ("addmm", "mm", "bmm", "convolution", "attention")


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def profiled(name: str) -> mb.Profile:
    return mb.profile(*made(name), fake=True)


def paths(mode: str, found: mb.Profile) -> list[str]:
    calls = schedule_of_mode(mode, found.graph, NO_OVERHEADS).calls
    return [call.path for call in calls]


@pytest.mark.parametrize("mode", NAMED)
@pytest.mark.parametrize("name", ["gpt", "resnet_in_place", "unet", "lstm_tagger"])
def test_a_step_in_a_mode_is_the_plain_one_and_takes_what_is_predicted(name, mode):
    model, batch = made(name)
    with fit(model, batch, "1GiB", mode=mode, fake=True) as fitted:
        assert fitted.mode == mode
        assert fitted.audit().equal
        assert fitted.peak_bytes == pytest.approx(fitted.plan.peak_bytes, rel=0.02)
        assert bool(fitted.plan.regions) == (mode != "none")
        assert (fitted.plan.slowdown > 1) == (mode != "none")
        status = fitted.status().regions
        assert all(r.forwards and not r.differences for r in status)


def test_the_blocks_are_the_pieces_that_save_something_of_their_own():
    found = profiled("gpt")
    assert paths("full", found) == ["1", "2", "3", "4"]
    assert paths("selective", found) == ["1", "2", "3", "4"]
    assert paths("attention", found) == ["1", "2", "3", "4"]
    assert paths("every_1", found) == ["1", "2", "3", "4"]
    assert paths("every_2", found) == ["1", "3"]
    assert paths("every_3", found) == ["1", "4"]
    assert paths("every_100", found) == ["1"]
    assert paths("none", found) == []


def test_a_block_saves_at_most_a_quarter_of_what_is_saved():
    def pair() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Tanh()) for _ in range(2)))

    x = torch.ones(8, requires_grad=True)
    found = mb.profile(nn.Sequential(pair(), pair()), x, fake=True)
    assert paths("full", found) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize("mode", ["full", "every_2"])
def test_a_block_that_is_dropped_whole_keeps_nothing(mode):
    model, _ = made("gpt")
    plan = plan_for(profiled("gpt"), model, "1GiB", mode)
    assert plan.regions
    assert all(region.kept == () for region in plan.regions)


@pytest.mark.cpu_only("emu composes attention of products")
def test_selective_keeps_products_and_attention_in_every_block():
    model, _ = made("gpt")
    plan = plan_for(profiled("gpt"), model, "1GiB", "selective")
    for region in plan.regions:
        kept = {output.operator for output in region.kept}
        assert kept == {
            "aten.addmm.default",
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
        }


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.cpu_only("emu composes attention of products")
def test_attention_is_kept_in_every_block_and_nothing_else_is():
    model, _ = made("gpt")
    plan = plan_for(profiled("gpt"), model, "1GiB", "attention")
    kept = [output.operator for region in plan.regions for output in region.kept]
    assert set(kept) == {FLASH}
    assert all(region.kept for region in plan.regions)
    graph = profiled("gpt").graph
    chosen = schedule_of_mode("attention", graph, NO_OVERHEADS)
    again = {graph.operators[index].name for index in chosen.simulation.recomputed}
    assert "aten.addmm.default" in again
    assert FLASH not in again


class Counts(DispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_only("emu composes attention of products")
@pytest.mark.parametrize(("mode", "times"), [("attention", 1), ("full", 2)])
def test_attention_runs_once_in_a_step_that_keeps_it(mode, times):
    model, batch = made("gpt")
    with fit(model, batch, "1GiB", mode=mode, measure="none") as fitted:
        loss = model(batch).square().mean()
        loss.backward()  # What is verified first is behind us.
        with Counts() as counts:
            model(batch).square().mean().backward()
        assert fitted.audit().equal
    assert counts.ran[FLASH] == 4 * times
    products = counts.ran["aten.addmm.default"]
    assert products > 4 * 4 + 1, "the products of each block run again"


def test_selective_keeps_convolutions_and_makes_the_norms_again():
    found = profiled("resnet")
    chosen = schedule_of_mode("selective", found.graph, NO_OVERHEADS)
    graph = found.graph
    again = {graph.operators[index].name for index in chosen.simulation.recomputed}
    assert "aten.native_batch_norm.default" in again
    assert "aten.convolution.default" not in again


def test_the_modes_take_ever_fewer_bytes_and_ever_more_time():
    graph = mb.profile(*gpt(blocks=6), fake=True).graph
    chosen = {m: schedule_of_mode(m, graph, NO_OVERHEADS) for m in NAMED}
    peaks = {m: c.simulation.peak_bytes for m, c in chosen.items()}
    assert peaks["full"] < peaks["every_2"] < peaks["every_3"] < peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert peaks["attention"] < peaks["selective"]
    times = {m: c.seconds for m, c in chosen.items()}
    assert times["full"] > times["every_2"] > times["every_3"] > times["none"]
    assert times["full"] > times["selective"] > times["none"]
    # Attention that is composed of products, as on emu, has no kernel to keep.
    assert times["full"] >= times["attention"] > times["selective"]


def test_the_time_of_the_regions_themselves_counts():
    graph = profiled("gpt").graph
    overheads = Overheads(record_s=1e-3, record_cold_s=1e-3, again_s=1e-3)
    free, paid = (schedule_of_mode("full", graph, o) for o in (NO_OVERHEADS, overheads))
    operators = sum(
        not graph.operators[index].is_view
        for call in free.calls
        for index in range(call.start, call.end)
    )
    operators += len(free.simulation.recomputed)
    assert paid.seconds - free.seconds == pytest.approx(operators * 1e-3)


@pytest.mark.parametrize("mode", NAMED)
def test_nothing_is_planned_in_a_mode_that_fits(mode, monkeypatch):
    def planned(*_: Any) -> Any:
        raise AssertionError("a planner was made")

    monkeypatch.setattr(planning, "Planner", planned)
    model, batch = made("mlp")
    fit(model, batch, "1GiB", mode=mode, fake=True).remove()


class Routed(nn.Module):
    """Each row goes where its largest score says."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.scores(x).softmax(-1).topk(1)
        y = torch.einsum("nd,ndf->nf", x, self.experts[chosen[:, 0]])
        return x + weights * y.relu()


@pytest.mark.parametrize("mode", ["full", "selective", "attention", "every_2"])
def test_a_routing_decision_is_kept_in_every_mode(mode):
    model, batch = nn.Sequential(*(Routed() for _ in range(4))), torch.randn(32, 16)
    with fit(model, batch, "1GiB", mode=mode, fake=True) as fitted:
        assert fitted.audit().equal
        graph, chosen = fitted.profile.graph, fitted.attempts[-1].schedule
        names = [
            {graph.operators[graph.storages[s].birth].name for s in region.kept}
            for region in chosen.choices
        ]
        assert all("aten.topk.default" in kept for kept in names)
        # The engine keeps them without being told.
        assert all(status.differences == 0 for status in fitted.status().regions)


def test_a_model_without_blocks_is_one_block():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).sin().exp()

    with fit(Functional(), torch.randn(8, 16), "1GiB", mode="full") as fitted:
        assert [region.path for region in fitted.plan.regions] == [""]
        assert fitted.audit().equal
        assert "(the model)" in fitted.report()


def test_the_report_names_the_mode():
    model, batch = made("mlp")
    with fit(model, batch, "1GiB", mode="full", fake=True) as fitted:
        assert "full  a rule, without planning" in fitted.report()
    with fit(model, batch, "60%", fake=True) as fitted:
        assert fitted.mode == "auto"
        assert "a rule" not in fitted.report()


# What does not fit, and what is no mode.


@pytest.mark.parametrize(
    "mode",
    [*NAMED[::2], *(pytest.param(m, marks=pytest.mark.slow) for m in NAMED[1::2])],
)
def test_a_mode_that_takes_too_much_says_what_it_takes_and_what_auto_needs(mode):
    model, batch = made("gpt")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        BudgetError, match=f"mode='{mode}' is predicted to allocate"
    ) as e:
        fit(model, batch, "10%", mode=mode, fake=True)
    assert "the smallest plan of mode='auto' needs" in str(e.value)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert {type(m) for m in model.modules()} == {
        type(m) for m in made("gpt")[0].modules()
    }

    error = e.value
    with fit(model, batch, error.least_bytes, fake=True) as fitted:
        assert fitted.peak_bytes <= error.least_bytes - error.before_bytes


def test_what_is_measured_decides_where_the_prediction_is_near(monkeypatch):
    others = held_bytes()
    model, batch = made("gpt")
    found = mb.profile(model, batch, fake=True)
    peak = schedule_of_mode("full", found.graph, NO_OVERHEADS).simulation.peak_bytes
    budget = others + found.graph.static.total + peak
    honest = attempt.planned_run
    classes = [type(module) for module in model.modules()]

    def less(*step: Any) -> Metered:
        run = honest(*step)
        return dataclasses.replace(run, peak_bytes=run.peak_bytes - peak // 50)

    monkeypatch.setattr(attempt, "planned_run", less)
    with fit(model, batch, budget - peak // 50, mode="full", fake=True) as fitted:
        assert fitted.plan.peak_bytes > fitted.plan.budget_bytes >= fitted.peak_bytes

    more = Metered(peak + 1, Mock())
    monkeypatch.setattr(attempt, "planned_run", lambda *step: more)
    with pytest.raises(
        BudgetError, match=f"is measured to allocate {peak + 1:,} bytes"
    ):
        fit(model, batch, budget, mode="full", fake=True)
    assert [type(module) for module in model.modules()] == classes


def test_a_plan_of_a_mode_is_refused_by_its_prediction():
    model, _ = made("gpt")
    with pytest.raises(BudgetError, match="mode='selective' is predicted to allocate"):
        plan_for(profiled("gpt"), model, "10%", "selective")


@pytest.mark.parametrize(
    "mode",
    [
        "",
        "all",
        "every_n",
        "every_0",
        "every_-1",
        "every_2.5",
        "every_1000000",
        "AUTO",
        None,
        2,
        [],
    ],
)
def test_what_is_no_mode_is_refused_with_those_that_there_are(mode):
    model, batch = made("mlp")
    with pytest.raises(OptionError, match="there is no mode") as raised:
        fit(model, batch, "60%", mode=mode, fake=True)
    assert all(repr(known) in str(raised.value) for known in MODES)
    with pytest.raises(OptionError, match="there is no mode"):
        plan_for(profiled("mlp"), model, "60%", mode)


@pytest.mark.parametrize("mode", [*MODES, "every_1", "every_17", "every_999999"])
def test_the_modes_are_known(mode):
    check_mode(mode)
