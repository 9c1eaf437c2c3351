"""While plans are made no garbage is collected, of which planning makes none."""

from __future__ import annotations

import gc

import pytest

from membudget.errors import BudgetError
from membudget.planner.collector import collector_off
from membudget.planner.planner import Planner
from membudget.profile import profile
from tests.planner.models import MODELS


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_afterwards_as_it_was(was_on):
    try:
        if not was_on:
            gc.disable()
        with collector_off(), collector_off():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_a_planner_leaves_nothing_for_the_collector(name):
    """Not even one that fails: it would keep what it was asked for alive."""
    model, batch = MODELS[name]()
    graph = profile(model, batch, fake=True).graph
    gc.collect()
    planner = Planner(graph)
    planner.candidates(planner.least_bytes())
    with pytest.raises(BudgetError, match="no plan fits"):
        planner.candidates(1)
    assert gc.isenabled()
    del planner
    found = gc.collect()
    assert found == 0
