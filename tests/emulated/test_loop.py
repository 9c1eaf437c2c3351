"""A budget of a loop is enough on a device that raises beyond it."""

from __future__ import annotations

import pytest
import torch

import membudget as mb
from membudget.loop.meter import BatchMeter, PeerRoom
from membudget.memory.counting import Counted
from tests.emulated import emu
from tests.emulated.limited import Trained, limited, peak, runs_out

SHARE = 0.85


def test_a_measurement_keeps_its_peak_where_that_of_another_model_begins():
    emu.configure(segment_bytes=512)
    peak_bytes, device = 1 << 20, torch.device("emu:0")
    first, second = BatchMeter(Counted(device)), BatchMeter(Counted(device))
    for meter in (first, second):
        meter._counted.start()
    first.begin(PeerRoom)
    first.mark("outputs")
    torch.empty(peak_bytes, dtype=torch.uint8, device=device)
    second.begin(PeerRoom)
    first.mark("backward")
    found = first.end()
    assert found is not None
    assert found.tail_bytes == peak_bytes
    assert found.peak_bytes >= peak_bytes
    other = second.end()
    assert other is not None
    assert other.peak_bytes == 0


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
