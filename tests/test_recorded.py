"""Fits from a cache: what is read from it serves, and what is stale is made anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.allowance import Budget, Share
from membudget.attach import has_region
from membudget.fitted import DOES_NOT_FIT
from membudget.profile import Profile, profiling
from membudget.profile.cache import FROM_CACHE, Cache
from membudget.recorded import StaleProfileError, fit_recorded
from membudget.step import Step
from tests.devices import held_bytes
from tests.model_state import state_of
from tests.planner.models import MODELS
from tests.rows.test_row_c14_metered import with_workspace

CACHED = "profile         cached  it was read from the cache"


def made(name: str = "mlp") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note on what tensors each step is recorded."""
    found: list[str] = []
    record = profiling._new_profile

    def noting(step: Step, optimizer: Any, fake: bool, *others: Any) -> Profile:
        found.append("fake" if fake else "real")
        return record(step, optimizer, fake, *others)

    monkeypatch.setattr(profiling, "_new_profile", noting)
    return found


def alter(folder: Path, change: Callable[[Profile], Profile]) -> None:
    """Put another profile in place of the one in a cache."""
    (path,) = folder.iterdir()
    found = Profile.from_json(path.read_text().split("\n")[1])
    Cache(folder, reads=False).profile(lambda: path.stem, lambda: change(found))


@pytest.mark.parametrize("fake", [False, True])
def test_a_second_fit_records_no_step_and_finds_the_same_plan(tmp_path, recorded, fake):
    options: dict[str, Any] = {"cache": tmp_path, "fake": fake, "measure": "none"}
    with mb.fit(*made(), "60%", **options) as first:
        assert CACHED not in first.report()
    model, batch = made()
    before = state_of(model)
    with mb.fit(model, batch, "60%", **options) as second:
        assert recorded == ["fake" if fake else "real"]
        assert CACHED in second.report()
        assert second.plan == first.plan
        assert second.plan.regions
        assert second.peak_bytes <= second.plan.budget_bytes
        assert second.audit().equal
    assert state_of(model) == before


def test_another_budget_is_planned_from_the_same_profile(tmp_path, recorded):
    for percent in ("90%", "60%", "100%"):
        with mb.fit(*made(), percent, cache=tmp_path, measure="none") as fitted:
            assert fitted.peak_bytes <= fitted.plan.budget_bytes
    assert recorded == ["real"]


def test_without_a_budget_what_is_there_is_read_of_the_profile_that_is_made_anew(
    tmp_path, recorded, monkeypatch
):
    fitting: Any = import_module("membudget.fit")
    monkeypatch.setattr(fitting, "free_budget", lambda model: 1 << 30)
    options: dict[str, Any] = {"cache": tmp_path, "measure": "none"}

    def heavier(found: Profile) -> Profile:
        static = found.graph.static
        static = dataclasses.replace(static, buffers=static.buffers + 100_000)
        graph = dataclasses.replace(found.graph, static=static)
        return with_workspace(dataclasses.replace(found, graph=graph), 40_000)

    with mb.fit(*made(), **options) as right:
        alter(tmp_path, heavier)
    expected = right.plan.budget_bytes
    del right  # Its model takes of the budget.
    with mb.fit(*made(), **options) as fitted:
        assert recorded == ["real", "real"]
        assert fitted.plan.budget_bytes == expected < 1 << 30


def test_a_plain_step_that_was_measured_to_fit_needs_no_regions():
    model, batch = made()
    found = mb.profile(model, batch)
    # Too little to be taken for bytes that the profile does not see.
    over = with_workspace(found, found.peak_bytes // 300)
    assert over.peak_bytes > found.peak_bytes
    budget = Budget(found.peak_bytes, 0, Share(1, False))
    with fit_recorded(Step(model, batch, None), over, budget) as fitted:
        assert fitted.plan.regions == ()
        assert fitted.peak_bytes == found.peak_bytes


def test_a_step_of_the_user_is_read_from_the_cache(tmp_path, recorded):
    options: dict[str, Any] = {"cache": tmp_path, "measure": "none"}
    for _ in range(2):
        model, batch = made()

        def step(model: nn.Module = model, batch: Any = batch) -> torch.Tensor:
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()
            return loss.detach()

        with mb.fit(step, modules=model, budget="70%", **options) as fitted:
            assert fitted.audit().equal
    assert recorded == ["real"]
    assert CACHED in fitted.report()


@pytest.mark.parametrize("more_bytes", [40_000, -40_000])
def test_a_cached_profile_with_another_peak_than_the_step_is_made_anew(
    tmp_path, recorded, more_bytes
):
    options: dict[str, Any] = {"cache": tmp_path, "measure": "none"}
    with mb.fit(*made(), "60%", **options) as right:
        pass
    alter(tmp_path, lambda found: with_workspace(found, more_bytes))
    with mb.fit(*made(), "60%", **options) as fitted:
        assert recorded == ["real", "real"]
        assert CACHED not in fitted.report()
        assert fitted.plan.budget_bytes == right.plan.budget_bytes
        assert fitted.audit().equal
    # What was found to be stale is not read again.
    with mb.fit(*made(), "60%", **options) as again:
        assert len(recorded) == 2
        assert CACHED in again.report()
        assert again.profile.peak_bytes == fitted.profile.peak_bytes


def renamed(found: Profile) -> Profile:
    """Return a profile of other operators with the same bytes."""
    operators = tuple(
        dataclasses.replace(o, name=o.name.replace("aten.addmm.", "aten.mm."))
        for o in found.graph.operators
    )
    assert operators != found.graph.operators
    graph = dataclasses.replace(found.graph, operators=operators)
    return dataclasses.replace(found, graph=graph)


@pytest.mark.parametrize("fake", [False, True])
def test_a_cached_profile_of_other_operators_is_made_anew(tmp_path, recorded, fake):
    options: dict[str, Any] = {"cache": tmp_path, "fake": fake, "mode": "selective"}
    options["measure"] = "none"
    with mb.fit(*made(), "100%", **options):
        pass
    alter(tmp_path, renamed)
    model, batch = made()
    with mb.fit(model, batch, "100%", **options) as fitted:
        assert len(recorded) == 2
        assert CACHED not in fitted.report()
        assert "ran other operators than planned" not in fitted.report()
        assert fitted.audit().equal
    assert not any(has_region(module) for module in model.modules())


def test_a_refusal_from_a_cached_profile_that_was_not_metered_is_checked(
    tmp_path, recorded
):
    options: dict[str, Any] = {"cache": tmp_path, "fake": True}
    others = held_bytes()
    with mb.fit(*made(), "90%", **options) as right:
        pass
    plan = right.plan
    budget = others + right.profile.graph.static.total + plan.budget_bytes
    del right  # Its model takes of the budget.
    alter(tmp_path, lambda found: with_workspace(found, 1 << 30))
    with mb.fit(*made(), budget, **options) as fitted:
        assert recorded == ["fake", "fake"]
        assert fitted.plan == plan
    with pytest.raises(mb.BudgetError, match="no plan fits in") as raised:
        mb.fit(*made(), "1%", **options)
    assert len(recorded) == 3
    assert raised.value.__cause__ is None


def test_a_step_that_does_not_fit_is_read_from_the_cache_too(
    tmp_path, recorded, monkeypatch
):
    fitting: Any = import_module("membudget.fit")
    profile_step = fitting.profile_step

    def short(step: Step, optimizer: Any, fake: bool, *others: Any) -> Profile:
        if not fake:
            raise torch.OutOfMemoryError("on purpose")
        found: Profile = profile_step(step, optimizer, fake, *others)
        return found

    monkeypatch.setattr(fitting, "profile_step", short)
    for _ in range(2):
        with mb.fit(*made(), "80%", cache=tmp_path) as fitted:
            assert DOES_NOT_FIT in fitted.report()
    assert recorded == ["fake"]
    assert CACHED in fitted.report()


def test_a_profile_that_is_not_from_a_cache_may_differ_from_the_step(recorded):
    model, batch = made()
    found = with_workspace(mb.profile(model, batch), 40_000)
    step = Step(model, batch, None)
    budget = Budget.of("60%", found)
    with fit_recorded(step, found, budget, measure="none") as fitted:
        assert "of its profile" in fitted.report()
    cached = dataclasses.replace(found, notes=(FROM_CACHE,))
    with pytest.raises(StaleProfileError):
        fit_recorded(step, cached, budget)
    assert not any(has_region(module) for module in model.modules())
