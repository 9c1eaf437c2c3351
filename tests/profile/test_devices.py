"""Devices: names, rates, and devices that the user defines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from membudget.profile import DEVICES, Device, devices, profile
from membudget.profile.devices import (
    device_of,
    launch_seconds,
    optimizer_named,
    this_processor,
)


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


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


def test_other_load_does_not_lower_a_rate_while_one_run_has_none(monkeypatch):
    durations = [3.0, 2.0, 50.0, 1.0, 2.0]
    readings = iter([t for d in durations for t in (100.0, 100.0 + d)])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    runs: list[int] = []

    seconds = devices._seconds_of(lambda: runs.append(1), repeats=len(durations))

    assert seconds == 1.0
    # One more, which is not timed: the first is slower than the others.
    assert len(runs) == len(durations) + 1


# As the vendors' data sheets have them: TFLOPS dense in half precision, TF32 and
# float32, memory in GB/s, host link in GB/s, and the size of the memory in bytes.
SHEETS: dict[str, tuple[str, float, float | None, float, float, float, int]] = {
    "h100": ("H100 SXM5", 989.4, 494.7, 66.9, 3350, 63, 80 << 30),
    "h200": ("H200 SXM", 989.4, 494.7, 66.9, 4800, 63, 141_000_000_000),
    "a100": ("A100 SXM4 80 GB", 312, 156, 19.5, 2039, 31.5, 80 << 30),
    "l4": ("L4", 121, 60, 30.3, 300, 31.5, 24 << 30),
    "rtx4090": ("RTX 4090", 165.2, 82.6, 82.6, 1008, 31.5, 24 << 30),
    "mi300x": ("MI300X", 1307.4, None, 163.4, 5300, 63, 192_000_000_000),
}


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_of_the_table_has_the_rates_of_its_data_sheet(name):
    title, half, tf32, single, speed, link, memory = SHEETS[name]
    rates = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": single}
    device = DEVICES[name]

    found = {dtype: rate / 1e12 for dtype, rate in device.flops_per_s.items()}
    assert found == pytest.approx({d: r for d, r in rates.items() if r is not None})
    assert device.name == title
    assert device.bytes_per_s == pytest.approx(speed * 1e9)
    assert device.link_bytes_per_s == pytest.approx(link * 1e9)
    assert device.memory_bytes == memory


def test_a_device_without_a_size_has_an_unknown_one():
    assert MINE.memory_bytes == 0


def test_this_processor_s_rates_are_those_of_a_product_and_a_copy(monkeypatch):
    def half(function: Callable[[], Tensor], repeats: int = 1) -> float:
        function()
        return 0.5

    monkeypatch.setattr(devices, "_seconds_of", half)
    monkeypatch.setattr(devices, "launch_seconds", launch_seconds.__wrapped__)
    found = this_processor.__wrapped__()

    assert found.name == "this CPU, measured"
    assert found.flops_per_s == {"float32": 2 * 512**3 / 0.5}
    # 32 MiB are read, and 32 MiB written.
    assert found.bytes_per_s == found.link_bytes_per_s == (64 << 20) / 0.5
    assert found.launch_s == 0.5 / 14


def test_the_small_step_runs_so_many_operators():
    step = devices.small_step()
    with Operators() as operators:
        step()

    assert operators.count == devices.SMALL_OPERATORS


def test_an_operator_takes_its_launch_and_its_kernel():
    device = Device("mine", {"float32": 100.0}, 10.0, 1.0, launch_s=0.25)

    assert device.seconds(200, 10, "float32") == 0.25 + 2.0
    assert device.seconds(0, 0, "float32") == 0.25


def test_a_rate_is_the_median_of_seven_runs():
    runs: list[int] = []
    devices._seconds_of(lambda: runs.append(1))
    assert len(runs) == 1 + 7


@pytest.mark.parametrize("name", ["AdamW", "adamw", "SGD"])
def test_an_optimizer_is_found_by_its_name(name):
    assert optimizer_named(name).__name__.lower() == name.lower()


@pytest.mark.parametrize("name", ["optimizer", "lion"])
def test_an_unknown_optimizer_is_rejected_with_the_known_names(name):
    with pytest.raises(mb.OptionError, match=rf"no optimizer '{name}': .*adamw") as e:
        optimizer_named(name)
    assert "optimizer," not in str(e.value).partition("it has")[2]
