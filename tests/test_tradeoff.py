"""The trade-off of a step: fewer bytes, more seconds."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.errors import MissingExtraError, OptionError
from membudget.planner import search
from membudget.planning import plan_for, planner_of
from membudget.report import rendered
from membudget.tradeoff import Tradeoff, TradeoffRow, tradeoff
from tests.planner.models import MODELS

ROWS = (TradeoffRow(1000, 990, 1.5, 3), TradeoffRow(2048, 2048, 1.0, 0))
CURVE = Tradeoff("GPT", "measured", 4096, ROWS)


def profiled(name: str) -> mb.Profile:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return mb.profile(model, batch, fake=True)


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet_in_place", "shared_modules"])
def test_a_curve_leads_from_the_least_bytes_to_the_plain_step(name):
    found = profiled(name)
    planner = planner_of(found)

    curve = tradeoff(found, 6)

    assert len(curve.rows) == 6
    assert curve.rows[0].budget_bytes == planner.least_bytes()
    last = TradeoffRow(found.peak_bytes, found.peak_bytes, 1.0, 0)
    assert curve.rows[-1] == last
    assert curve.plain_peak_bytes == found.peak_bytes
    assert all(row.peak_bytes <= row.budget_bytes for row in curve.rows)
    assert all(row.regions > 0 for row in curve.rows[:-1])
    assert all(a.slowdown >= b.slowdown for a, b in pairwise(curve.rows))


def test_the_budgets_are_evenly_spaced():
    budgets = [row.budget_bytes for row in tradeoff(profiled("mlp"), 9).rows]
    gaps = {b - a for a, b in pairwise(budgets)}
    assert max(gaps) - min(gaps) <= 1


def test_a_row_says_what_a_plan_for_its_budget_says():
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    found = mb.profile(model, batch, fake=True)
    row = tradeoff(found, 5).rows[2]

    plan = plan_for(found, model, found.graph.static.total + row.budget_bytes)

    assert plan.budget_bytes == row.budget_bytes
    assert plan.peak_bytes == row.peak_bytes
    assert plan.slowdown == row.slowdown
    assert len(plan.regions) == row.regions


def test_no_schedule_of_a_curve_is_annealed(monkeypatch):
    def annealed(*_: Any) -> Any:
        raise AssertionError("a schedule was annealed")

    monkeypatch.setattr(search, "anneal", annealed)
    assert len(tradeoff(profiled("mlp"), 3).rows) == 3


def test_a_curve_names_the_model_and_where_its_times_are_from():
    found = profiled("mlp")
    curve = tradeoff(found, 2)
    assert (curve.model, curve.cost) == (found.model, found.cost)
    assert curve.static_bytes == found.graph.static.total


def test_twenty_budgets_are_planned_by_default():
    assert len(tradeoff(profiled("mlp")).rows) == 20


def test_a_step_of_which_nothing_can_be_dropped_has_one_row():
    found = mb.profile(torch.nn.Linear(4, 4), torch.ones(1, 4), fake=True)
    (row,) = tradeoff(found, 5).rows
    assert (row.budget_bytes, row.slowdown, row.regions) == (found.peak_bytes, 1.0, 0)


@pytest.mark.parametrize("budgets", [1, 0, -3, True, 2.0, "many"])
def test_fewer_than_two_budgets_are_refused(budgets):
    with pytest.raises(OptionError, match="whole number of budgets, at least 2; got"):
        tradeoff(profiled("mlp"), budgets)


def test_a_curve_is_printed_as_a_table():
    lines = str(CURVE).splitlines()
    assert lines[0] == (
        "GPT: bytes above the 4.0 KiB in use before the step; times measured"
    )
    assert lines[2].split() == ["budget", "of", "plain", "peak", "slowdown", "regions"]
    assert lines[4].split() == ["1000", "B", "48.8%", "990", "B", "1.500", "3"]
    assert lines[4].startswith(" ")  # Every column is of numbers.
    assert lines[5].split() == ["2.0", "KiB", "100.0%", "2.0", "KiB", "1.000", "0"]


def test_a_curve_of_a_step_that_takes_nothing_is_printed():
    nothing = replace(CURVE, rows=(TradeoffRow(0, 0, 1.0, 0),))
    assert str(nothing).splitlines()[4].split()[2] == "0.0%"


def test_a_curve_becomes_plain_data():
    data = json.loads(json.dumps(CURVE.to_dict()))
    assert data["static_bytes"] == 4096
    assert data["rows"][0] == {
        "budget_bytes": 1000,
        "peak_bytes": 990,
        "slowdown": 1.5,
        "regions": 3,
    }


def test_a_picture_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "membudget\[plots\]"'):
        CURVE.save_png(tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


class Drawn:
    """Stands for matplotlib's figure and its axes, and notes what is asked of them."""

    def __init__(self, **options: Any) -> None:
        self.asked: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.asked["figure"] = (), options
        FIGURES.append(self)

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            self.asked[name] = args, options
            if name == "savefig":
                args[0].write(b"a picture")
            return self

        return note


FIGURES: list[Drawn] = []


def test_a_picture_shows_slowdown_over_the_predicted_peak(tmp_path: Path, monkeypatch):
    library, figures = ModuleType("matplotlib"), ModuleType("matplotlib.figure")
    figures.Figure = Drawn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figures)
    rows = tuple(replace(row, peak_bytes=row.peak_bytes << 20) for row in ROWS)
    replace(CURVE, rows=rows).save_png(tmp_path / "curve.png")

    asked = FIGURES.pop().asked
    assert asked["figure"] == ((), {"figsize": (7, 4.5), "layout": "constrained"})
    assert asked["plot"] == (([990.0, 2048.0], [1.5, 1.0]), {"marker": "o"})
    assert asked["set_xlabel"] == (("predicted peak of the step, MiB",), {})
    assert asked["set_ylabel"] == (("predicted slowdown",), {})
    assert asked["set_title"] == (("GPT, times measured",), {})
    assert asked["grid"] == ((), {"alpha": 0.3})
    assert asked["savefig"][1] == {"format": "png", "dpi": 150}
    assert (tmp_path / "curve.png").read_bytes() == b"a picture"
    with pytest.raises(OptionError, match=r"missing/curve\.png' cannot be written"):
        CURVE.save_png(tmp_path / "missing" / "curve.png")


@needs_matplotlib
def test_a_picture_is_a_png(tmp_path: Path):
    path = tmp_path / "curve.png"
    CURVE.save_png(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert list(tmp_path.iterdir()) == [path]


@needs_matplotlib
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(OptionError, match="cannot be written"):
        CURVE.save_png(tmp_path / "missing" / "curve.png")


def test_brackets_in_a_cell_are_no_markup():
    assert "h[red]" in rendered(("module",), [("h[red]",)])
