"""Row B4: a plain step that runs out of memory is profiled on fake tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb


def test_row_b04_a_step_that_runs_out_of_memory_is_profiled_fake_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    fitting: Any = import_module("membudget.fit")
    profile_step = fitting.profile_step

    def short(step: Any, optimizer: Any, fake: bool, device: Any) -> mb.Profile:
        if not fake:
            raise torch.OutOfMemoryError("on purpose")
        found: mb.Profile = profile_step(step, optimizer, fake, device)
        return found

    monkeypatch.setattr(fitting, "profile_step", short)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with mb.fit(model, torch.randn(64, 16), "100%") as fitted:
        assert fitted.profile.tensors == "fake"
        assert "the plain step ran out of memory" in fitted.report()
