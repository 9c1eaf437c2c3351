"""Devices: names, rates, and devices that the user defines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.profile import DEVICES, Device, devices, profile
from membudget.profile.devices import device_of, this_processor

MINE = Device("mine", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)


@pytest.mark.parametrize("name", ["h100", "H100", "RTX 4090", "rtx-4090", "mi300x"])
def test_a_device_is_found_by_its_name(name):
    key = name.lower().replace(" ", "").replace("-", "")

    assert device_of(name) is DEVICES[key]


def test_an_unknown_device_is_rejected_with_the_known_names():
    with pytest.raises(mb.OptionError, match=r"no device 'tpu'.*h100.*cpu"):
        device_of("tpu")


def test_an_unknown_device_is_rejected_before_anything_runs():
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(mb.OptionError, match="no device 'tpu'"):
        profile(Fails(2, 2), torch.ones(1, 2), device="tpu")


@pytest.mark.parametrize(
    ("flops_per_s", "bytes_per_s", "link_bytes_per_s", "words"),
    [
        ({"float32": 0.0}, 1.0, 1.0, r"flops_per_s\['float32'\] = 0.0"),
        ({"float32": 1.0, "float16": -1.0}, 1.0, 1.0, r"\['float16'\] = -1.0"),
        (
            {"float32": 1.0},
            0,
            1.0,
            "bytes_per_s = 0; a rate must be positive",
        ),
        ({"float32": 1.0}, 1.0, float("nan"), "link_bytes_per_s = nan"),
        ({"float16": 1.0}, 1.0, 1.0, "no rate for 'float32'"),
    ],
)
def test_a_device_without_rates_is_rejected(
    flops_per_s, bytes_per_s, link_bytes_per_s, words
):
    with pytest.raises(mb.OptionError, match=words):
        Device("mine", flops_per_s, bytes_per_s, link_bytes_per_s)


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "seconds"),
    [
        (1000, 10, "float32", 10.0),
        (1000, 10, "bfloat16", 2.5),
        (1000, 10, "float64", 10.0),
        (0, 50, "float32", 5.0),
        (1000, 500, "bfloat16", 50.0),
        (0, 0, "int64", 0.0),
    ],
)
def test_the_roofline_is_the_slower_of_compute_and_memory(flops, moved, dtype, seconds):
    assert MINE.seconds(flops, moved, dtype) == seconds


def test_a_device_of_the_user_is_used_unchanged():
    found = profile(nn.Linear(4, 4), torch.ones(2, 4), device=MINE)

    assert found.cost == "mine"
    product = next(o for o in found.graph.operators if o.flops)
    assert product.seconds == max(64 / 100, (product.read_bytes + 32) / 10)


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_every_device_of_the_table_has_all_rates(device):
    assert {"float32", "bfloat16", "float16"} <= device.flops_per_s.keys()
    assert device.bytes_per_s > device.link_bytes_per_s > 0
    assert device.memory_bytes >= 24 << 30


def test_this_processor_is_measured_once(monkeypatch):
    monkeypatch.setattr(devices, "this_processor", this_processor)
    assert this_processor() is this_processor() is device_of("CPU")


def test_one_slow_run_does_not_change_the_median(monkeypatch):
    durations = [1.0, 1.0, 50.0, 1.0, 2.0]
    readings = iter([t for d in durations for t in (100.0, 100.0 + d)])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    runs: list[int] = []

    seconds = devices._seconds_of(lambda: runs.append(1), repeats=len(durations))

    assert seconds == 1.0
    # One more, which is not timed: the first is slower than the others.
    assert len(runs) == len(durations) + 1
