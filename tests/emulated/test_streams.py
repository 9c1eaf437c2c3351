"""Work runs when somebody waits for it: a missing wait is seen every time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.emulated import emu

N = 1000


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def first(x: Tensor) -> float:
    return float(x.flatten()[0])


def copied_in_beside(waits: bool) -> float:
    """Read on one stream what another copies in."""
    side, host = torch.Stream("emu"), torch.ones(N).pin_memory()
    with side:
        x = host.to("emu", non_blocking=True)
        event = side.record_event()
    if waits:
        current().wait_event(event)
    return first(x + 1)


def offloaded(records: bool) -> float:
    """Copy out on one stream what the other frees and overwrites."""
    side, host = torch.Stream("emu"), torch.zeros(N).pin_memory()
    x = torch.full((N,), 3.0, device="emu")
    side.wait_stream(current())
    with side:
        host.copy_(x, non_blocking=True)
    if records:
        x.record_stream(side)
    del x
    y = torch.full((N,), 7.0, device="emu")
    current().synchronize()
    side.synchronize()
    assert first(y) == 7.0
    return first(host)


def copied_out(waits: bool) -> float:
    """Read page-locked memory that a copy is queued to."""
    host = torch.zeros(N).pin_memory()
    host.copy_(torch.full((N,), 3.0, device="emu"), non_blocking=True)
    if waits:
        current().synchronize()
    return first(host)


def overwritten(waits: bool) -> float:
    """Overwrite page-locked memory that a copy is queued from."""
    host = torch.ones(N).pin_memory()
    x = host.to("emu", non_blocking=True)
    if waits:
        current().synchronize()
    host.fill_(9.0)
    return first(x)


RACES: dict[str, tuple[Callable[[bool], float], float, float]] = {
    "missing wait_event": (copied_in_beside, 2.0, math.nan),
    "missing record_stream": (offloaded, 3.0, 7.0),
    "early read": (copied_out, 3.0, 0.0),
    "early overwrite": (overwritten, 1.0, 9.0),
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_is_lost_every_time(race: str):
    run, _, lost = RACES[race]
    found = [run(False) for _ in range(3)]
    assert found == pytest.approx([lost] * 3, nan_ok=True)


@pytest.mark.parametrize("mode", ["eager", "lazy", "threads"])
@pytest.mark.parametrize("race", RACES)
def test_who_waits_reads_the_right_values_in_every_mode(race: str, mode: emu.Mode):
    emu.configure(mode=mode)
    run, right, _ = RACES[race]
    assert run(True) == right


def test_a_launch_returns_before_it_has_run():
    x = torch.ones(4, device="emu")
    current().synchronize()
    for _ in range(50):
        x = x + 1
    assert not current().query()
    assert first(x) == 51
    assert current().query()


def test_a_wait_runs_only_what_it_demands():
    side = torch.Stream("emu")
    out = torch.zeros(1).pin_memory()
    with side:
        out.copy_(torch.ones(1, device="emu"), non_blocking=True)
    torch.ones(1, device="emu").item()
    assert first(out) == 0.0
    side.synchronize()
    assert first(out) == 1.0


def test_pageable_memory_is_copied_before_the_host_goes_on():
    host = torch.ones(N)
    x = host.to("emu", non_blocking=True)
    host.fill_(9.0)
    assert first(x) == 1.0
    back = torch.zeros(N)
    back.copy_(x, non_blocking=True)
    assert first(back) == 1.0


def test_the_backward_pass_runs_on_the_streams_of_the_forward():
    side, main = torch.Stream("emu"), current()
    w = torch.ones(100, device="emu", requires_grad=True)
    side.wait_stream(main)
    with side:
        y = w * 3
    main.wait_stream(side)
    (y * 2).sum().backward()
    assert w.grad is not None
    assert first(w.grad) == 6.0


def test_an_error_of_a_kernel_is_raised_by_a_later_wait():
    table = torch.randn(3, 2, device="emu")
    found = torch.nn.functional.embedding(torch.tensor([7], device="emu"), table)
    with pytest.raises(IndexError, match="index out of range"):
        found.sum().item()
    assert torch.ones(1, device="emu").item() == 1.0


def test_page_locked_memory_that_dies_lives_until_its_copies_have_run():
    x = torch.ones(N).pin_memory().to("emu", non_blocking=True)
    others = [torch.zeros(N).pin_memory() for _ in range(4)]
    assert first(x) == 1.0
    assert len(others) == 4
