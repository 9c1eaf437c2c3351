"""While plans are made no garbage is collected, of which planning makes none."""

from __future__ import annotations

import gc

import pytest

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
    model, batch = MODELS[name]()
    graph = profile(model, batch, fake=True).graph
    gc.collect()
    gc.disable()  # Or it would look, as soon as it is on again.
    try:
        planner = Planner(graph)
        planner.candidates(planner.least_bytes())
        del planner
        assert gc.collect() == 0
    finally:
        gc.enable()
