"""The seconds that tests plan with are given, not measured."""

from __future__ import annotations

import pytest
import torch

import membudget as mb
from tests.planner.models import gpt


@pytest.mark.parametrize("fake", [True, False])
def test_two_profiles_of_one_step_have_the_same_seconds(fake: bool) -> None:
    one, two = (mb.profile(*gpt(blocks=2), fake=fake).graph for _ in range(2))
    assert [o.seconds for o in one.operators] == [o.seconds for o in two.operators]


@pytest.mark.parametrize("fake", [True, False])
def test_seconds_are_shaken_by_a_seed(
    fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in ("", "1", "1", "2"):
        monkeypatch.setenv("MEMBUDGET_SHAKE_SECONDS", seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        found.append(mb.profile(model, torch.ones(2, 8), fake=fake).graph.seconds)
    assert found[1] == found[2]
    assert len(set(found)) == 3
