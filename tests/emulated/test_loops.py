"""Loops drawn at random keep their budget on the device, and end in the plain bits.

It reserves what tensors take, so that the budget bounds their bytes.
"""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.emulated import emu
from tests.loops.held import Run, check
from tests.loops.loop import STEPS, Loop, drawn

FIRST, FEW, MANY = 102, 2, 300


def peak_bytes(attention: emu.Attention, function: Run) -> int:
    """Run a function on the device; return the most bytes that it reserved there."""
    before = others_bytes()
    emu.configure(segment_bytes=0, attention=attention)
    with torch.device("emu"):
        function()
    torch.accelerator.synchronize()
    return emu.counters()["most_reserved_bytes"] - before


def others_bytes() -> int:
    """Return the bytes that other tests hold on the device."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved()


def check_on_device(loop: Loop, **options: Any) -> list[int]:
    """Check that a loop keeps its budgets and its bits; return the budgets."""
    # Of what serves attention there, only operators have a second derivative.
    attention: emu.Attention = "math" if loop.inner else "fused"
    return check(loop, partial(peak_bytes, attention), others_bytes, **options)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FEW))
def test_a_random_loop_keeps_its_budget_on_the_device(seed):
    check_on_device(drawn(seed))


GENERATING = {"generates": "cached", "model": "language"}


@pytest.mark.parametrize(
    "case",
    [
        {"inner": True, "model": "mixed"},
        pytest.param(GENERATING, marks=pytest.mark.slow),
    ],
)
def test_what_no_plan_lowers_is_refused_on_the_device_or_fits(case):
    plain = drawn(FIRST)
    never = {f.name: False for f in fields(Loop) if f.type == "bool"}
    texts = {"autocast": "", "scaler": "", "generates": "", "optimizer": "SGD"}
    steps = {"sizes": (8,) * STEPS, "accumulation": 1}
    loop = replace(plain, **(never | texts | steps | {"share": 0.3} | case))
    assert len(check_on_device(loop)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST + FEW, FIRST + MANY))
def test_many_random_loops_keep_their_budgets_on_the_device(seed):
    check_on_device(drawn(seed))
