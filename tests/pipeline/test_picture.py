"""Timelines as a picture."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from membudget.errors import MissingExtraError
from membudget.pipeline import save_timelines, simulate_pipeline
from tests.planner.pipelines import COSTS, order_of


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="plots"):
        save_timelines(tmp_path / "step.png", {})


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
def test_each_timeline_is_a_panel_of_one_picture(tmp_path: Path) -> None:
    found = simulate_pipeline(order_of("1F1B", 2, 2), [COSTS] * 2)
    path = tmp_path / "step.png"
    save_timelines(path, {"measured": found.events, "simulated": found.events})
    assert path.read_bytes().startswith(b"\x89PNG")
