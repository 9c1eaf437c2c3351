"""What `fit` is given that it cannot use: each is refused in words, or done right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import BudgetError, MembudgetError, OptionError, PlanError
from membudget.fit import fit
from membudget.planner.plan import VERSION
from membudget.planning import plan_for
from tests.devices import default_device, held_bytes
from tests.model_state import state_of
from tests.planner.models import MODELS, mlp


def made(name: str = "mlp") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def check_refused(
    model: nn.Module, batch: Any, words: str, budget: Any = "60%", **options: Any
) -> MembudgetError:
    """Check that fitting is refused with some words, and the model left as it was."""
    before = state_of(model)
    with pytest.raises(MembudgetError, match=words) as raised:
        fit(model, batch, budget, **options)
    assert state_of(model) == before
    return raised.value


# Budgets


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("8parsec", "has the unit 'parsec'; write GiB for 1024³ bytes"),
        ("8G", "has the unit 'G'; write GiB for 1024³ bytes"),
        ("GiB", "a size is a number of bytes, such as '8GiB'; got 'GiB'"),
        ("1e300GiB", "'1e300GiB' is more than any memory has"),
        ("140%", "a percentage budget must be above 0 and at most 100, .* got '140%'"),
    ],
)
def test_a_nonsense_budget_is_refused_before_a_step_runs(budget, words):
    class Never(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise AssertionError("a step ran")

    error = check_refused(Never(4, 4), torch.ones(2, 4), words, budget)
    assert isinstance(error, OptionError)


@pytest.mark.parametrize("budget", ["0.001%", 1000, "1KiB"])
def test_an_impossible_budget_is_refused_with_what_is_there_and_the_least(budget):
    others = held_bytes()
    model, batch = made()
    error = check_refused(model, batch, "no plan fits in", budget, fake=True)
    assert isinstance(error, BudgetError)
    static = others + mb.profile(model, batch, fake=True).graph.static.total
    assert f"of which {static:,} are in use before the step" in str(error)
    assert error.before_bytes == static
    least = f"needs {error.least_bytes - static:,}. Smallest feasible budget: "
    least += f"{error.least_bytes:,} bytes"
    assert least in str(error)


# Plans


def plan_text(**changes: Any) -> str:
    model, batch = made()
    plan = plan_for(mb.profile(model, batch, fake=True), model, "60%")
    return json.dumps({**plan.to_dict(), **changes})


def apply_file(text: str, path: Path, model: nn.Module, words: str) -> None:
    path.write_text(text)
    before = state_of(model)
    with pytest.raises(PlanError, match=words):
        mb.apply(model, path)
    assert state_of(model) == before


def test_a_plan_of_another_model_is_refused(tmp_path):
    wider = nn.Sequential(nn.Linear(64, 65), nn.GELU(), nn.Linear(65, 64))
    words = r"0\.0\.weight, float32\[128,64\], is only in the first; .* and 25 more"
    apply_file(plan_text(), tmp_path / "plan.json", wider, words)


def test_a_truncated_plan_is_refused(tmp_path):
    text = plan_text()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        words = "the plan cannot be read"
        apply_file(text[:length], tmp_path / "plan.json", made()[0], words)


def test_a_plan_of_a_newer_version_is_refused(tmp_path):
    newer = plan_text(version=VERSION + 1)
    words = f"of versions 6 and {VERSION}; this one has version {VERSION + 1}"
    apply_file(newer, tmp_path / "plan.json", made()[0], words)


def test_a_plan_without_its_regions_is_refused(tmp_path):
    data = json.loads(plan_text())
    del data["regions"]
    words = r"plan\.regions is missing: the plan is not whole"
    apply_file(json.dumps(data), tmp_path / "plan.json", made()[0], words)


# Seconds


class Abacus(mb.Device):
    """A device whose times are no numbers."""

    def seconds(self, flops: int, moved_bytes: int, dtype: str) -> float:
        return float("nan")


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_times_that_are_no_numbers_are_refused(mode):
    slow = Abacus("abacus", {"float32": 1.0}, 1.0, 1.0)
    words = r"operator 0 \(aten.* takes nan seconds; a planner needs finite times"
    check_refused(*made(), words, "90%", mode=mode, device=slow, fake=True)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("mode", ["auto", "selective"])
def test_a_profile_with_a_time_that_is_none_makes_no_plan(wrong, mode):
    model, batch = made()
    found = mb.profile(model, batch, fake=True)
    broken = dataclasses.replace(found.graph.operators[3], seconds=wrong)
    operators = (*found.graph.operators[:3], broken, *found.graph.operators[4:])
    graph = dataclasses.replace(found.graph, operators=operators)
    with pytest.raises(OptionError, match=f"operator 3 .* takes {wrong} seconds"):
        plan_for(dataclasses.replace(found, graph=graph), model, "90%", mode)


# Models


class Turning(nn.Module):
    """A block that takes another way when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.turns = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.sin().exp() if self.turns else nn.functional.gelu(y)
        return self.second(y).tanh()


def test_a_model_that_changes_between_steps_is_counted_and_its_gradients_are_right():
    blocks = [Turning() for _ in range(4)]
    model, batch = nn.Sequential(*blocks), torch.randn(64, 16)
    with fit(model, batch, "85%", fake=True, mode="selective") as fitted:
        kept = {region.path for region in fitted.plan.regions if region.kept}
        assert kept
        assert "other operators" not in fitted.report()
        for block in blocks:
            block.turns = True
        assert fitted.audit().equal
        found = {region.name: region for region in fitted.status().regions}
        assert any(found[path].differences for path in kept)
    assert "ran other operators than planned" in str(fitted.status())
    assert "ran other operators than planned, and may keep less" in fitted.report()


class Functional(nn.Module):
    """Code without modules."""

    def __init__(self, has_weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.weight is None else x @ self.weight
        for _ in range(6):
            x = x.sin().exp().tanh()
        return x


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("percent", [100, 90])
def test_a_model_without_submodules_or_parameters_is_fitted(has_weight, percent):
    model = Functional(has_weight)
    batch = torch.randn(64, 16, requires_grad=not has_weight)
    with fit(model, batch, f"{percent}%", fake=True) as fitted:
        paths = [region.path for region in fitted.plan.regions]
        assert paths == ([""] if percent < 100 else [])
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal


def test_a_model_of_which_nothing_can_be_dropped_is_refused_with_the_least():
    model = nn.Linear(16, 16)
    error = check_refused(model, torch.ones(4, 16), "no plan fits in", "90%")
    assert isinstance(error, BudgetError)
    plain = mb.profile(model, torch.ones(4, 16)).peak_bytes
    assert error.least_bytes == error.before_bytes + plain


@pytest.mark.parametrize("fake", [True, False])
def test_a_step_in_which_nothing_requires_a_gradient_is_refused(fake):
    model, batch = made("resnet")
    model.requires_grad_(False)
    words = "the loss does not require a gradient.*: every parameter is frozen, or"
    check_refused(model, batch, words, fake=fake)
    words = "the loss does not require a gradient"
    check_refused(Functional(has_weight=False), torch.ones(2, 16), words, fake=fake)


@pytest.mark.parametrize("batch", [{}, ()])
@pytest.mark.parametrize("fake", [True, False])
def test_an_empty_batch_is_refused_with_what_is_missing(batch, fake):
    words = (
        rf"the batch is an empty {type(batch).__name__}, so Sequential would be called "
        r"with nothing \(missing a required argument: 'input'\)"
    )
    check_refused(made()[0], batch, words, fake=fake)


def test_a_model_that_takes_no_arguments_is_fitted_with_an_empty_batch():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.randn(64, 64))
            self.body, _ = mlp()

        def forward(self) -> Any:
            return self.body(self.start)

    with fit(Alone(), {}, "90%", fake=True) as fitted:
        assert fitted.plan.regions
        assert fitted.audit().equal


@pytest.mark.parametrize("budget", ["60%", None])
def test_a_model_that_is_not_a_module_is_rejected(budget):
    wrong: Any = torch.sin
    with pytest.raises(OptionError, match=r"expected a torch\.nn\.Module"):
        fit(wrong, torch.ones(2), budget)


def test_a_model_that_carries_regions_of_its_user_is_not_fitted():
    model, batch = made()
    applied = mb.apply(model, names="0")
    words = "carries 1 region already, the first on '0'.*remove\\(\\) what"
    check_refused(model, batch, words, "90%", fake=True)
    applied.remove()
    fit(model, batch, "90%", fake=True).remove()


@pytest.mark.parametrize("budget", ["90%", None])
def test_a_step_without_a_backward_pass_is_refused(budget):
    model, batch = made()
    with pytest.raises(OptionError, match="the step ran no backward pass"):
        fit(lambda: model(batch), modules=model, budget=budget or "1GiB")


def test_a_model_that_copies_itself_for_each_call_is_refused():
    model, batch = made()
    with pytest.raises(OptionError, match=r"DataParallel, .* as in model\.module"):
        fit(nn.DataParallel(model), batch, "90%")
    with pytest.raises(OptionError, match=r"DataParallel, .* as in model\.module"):
        mb.budget(nn.DataParallel(model), "90%").start()


def test_parameters_on_several_devices_are_not_one_budget():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    where = f"Sequential are on {default_device()} and meta, and a bud"
    with pytest.raises(OptionError, match=where):
        mb.fit(model, torch.ones(2, 4), "50%")
