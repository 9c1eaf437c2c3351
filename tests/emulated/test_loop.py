"""A budget of a loop is enough on a device that raises beyond it."""

from __future__ import annotations

import pytest
import torch

import membudget as mb
from tests.emulated.limited import Trained, limited, peak, runs_out

SHARE = 0.85


@pytest.mark.parametrize("name", ["gpt", "mlp", "dropout_transformer", "mixer"])
def test_a_loop_trains_on_a_device_that_has_no_more_than_its_budget(name: str):
    with limited():
        plain, _ = Trained(name).steps()
        plain_bytes = peak("allocated")
    budget = int(SHARE * plain_bytes)
    with limited(budget):
        trained = Trained(name)
        with mb.budget(trained.model, budget, optimizer=trained.optimizer) as fitted:
            found, _ = trained.steps()
        reserved = peak("reserved")
    assert all(map(torch.equal, plain, found))
    assert reserved <= budget
    assert runs_out(name, budget)
    assert fitted.status().situations[0].plans >= 1
