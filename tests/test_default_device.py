"""A default device is the user's: membudget's own tensors are where it needs them.

The default here is `meta`, on which a tensor has no values to be taken by mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.profile import devices
from membudget.profile.devices import launch_seconds, this_processor
from membudget.state import rng_memory
from membudget.state.bits import fingerprint
from membudget.state.identity import TensorCopy, first_difference
from membudget.state.rng_memory import raw_state_reader
from tests.oracles import assert_same_step, plain, run_step
from tests.zoo import Call, Case

pytestmark = pytest.mark.cpu_only("the default device is another")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 6))


def under_meta(call: Call) -> Call:
    """Run a call with another default device than its tensors have."""
    call.around = lambda: torch.device("meta")
    return call


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "rerun"},
        {"engine": "replay", "verify": True},
        {"engine": "replay", "verify": "fingerprints"},
    ],
)
def test_a_region_of_cpu_tensors_has_the_plain_bits(options):
    def way(call: Call) -> object:
        return mb.checkpoint(call.function, *call.args, **options)

    case = Case("", lambda: under_meta(Call(model(), (torch.randn(5, 6),))))
    assert_same_step(run_step(case, way), run_step(case, plain))


def test_a_model_is_fitted_and_audited():
    net, x = model(), torch.randn(5, 6)
    with torch.device("meta"):
        assert mb.audit(net, x).equal
        with mb.fit(net, x, "100%", fake=True) as fitted:
            assert fitted.peak_bytes > 0


def test_fingerprints_are_those_without_it():
    x = torch.arange(9.0)
    expected = fingerprint(x)
    with torch.device("meta"):
        assert fingerprint(x) == expected


def test_the_first_difference_is_found():
    def found() -> object:
        return first_difference(TensorCopy("", (x,)), TensorCopy("", (y,)))

    x, y = torch.zeros(2, 3), torch.eye(2, 3)
    expected = found()
    with torch.device("meta"):
        assert found() == expected is not None


def test_the_memory_of_a_generator_is_read():
    expected = raw_state_reader(torch.default_generator) is None
    rng_memory._is_reliable.cache_clear()
    with torch.device("meta"):
        assert (raw_state_reader(torch.default_generator) is None) == expected


def test_the_rates_of_this_processor_are_measured_on_it(monkeypatch):
    made: list[Tensor] = []

    def note(function: Callable[[], Tensor], repeats: int = 1) -> float:
        made.append(function())
        return 1.0

    monkeypatch.setattr(devices, "_seconds_of", note)
    monkeypatch.setattr(devices, "launch_seconds", launch_seconds.__wrapped__)
    with torch.device("meta"):
        this_processor.__wrapped__()
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu", "cpu"]
